"""Grouped convolution, forward: configs, legality, features and launch of ``grouped_fprop.cu``.

Layers of unit stride and dilation, as many filters as channels, group width 8, 16 or 32, any window
up to 7x7, any padding, float16 or bfloat16, with a fused bias and activation.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from confpred.convolution import CONVOLUTION
from confpred.device import Device
from confpred.families.base import KernelSource, Launch, Rows, Step
from confpred.problem import ACTIVATIONS, DTYPES, Problem

GROUP_WIDTHS = (8, 16, 32)
MAX_WINDOW = 7
MAX_OFFSET = 2**31 - 1  # the kernel addresses within a block's images by 32-bit offsets
MAX_REGISTERS = 255

#: (images, output columns) of a block: tensor-core tiles of 16 pixels that real widths fill well.
_PIXEL_ROWS = (
    *((n, q) for q in (8, 14, 16) for n in (1, 2, 4) if n * q >= 14),
    *((n, q) for q in (28, 32) for n in (1, 2)),
    (1, 64),
)
#: Into how many bands the output's rows are cut, one a block.
_BANDS = (1, 2, 4, 8, 16, 32)
_FIELDS = (
    "block_n",
    "block_q",
    "block_c",
    "warps_c",
    "warps_m",
    "stages",
    "filter_shared",
    "bands",
)


def _config_table() -> NDArray[np.void]:
    """The config space. What is left out never won by a percent where everything was measured."""
    rows = []
    for (
        block_n,
        block_q,
    ), block_c, warps_c, warps_m, stages, filter_shared, bands in itertools.product(
        _PIXEL_ROWS, (16, 32, 64), (1, 2, 4), (1, 2, 4), (3, 5), (0, 1), _BANDS
    ):
        tiles = -(-block_n * block_q // 16)
        warps = warps_c * warps_m
        warp_channels = block_c // warps_c
        if tiles % warps_m or warps > 4 or (warps == 1 and tiles > 1):
            continue
        if not 8 <= warp_channels <= 32 or tiles // warps_m * warp_channels > 64:
            continue  # a warp computes one to eight tensor-core tiles of 16 pixels x 8 channels
        rows.append((block_n, block_q, block_c, warps_c, warps_m, stages, filter_shared, bands))
    table = np.array(rows, dtype=[(name, np.int32) for name in _FIELDS])
    table.setflags(write=False)
    return table


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a window and a group width make of each config; arrays over the config table."""

    threads: NDArray[np.int64]
    warp_tiles: NDArray[np.int64]
    warp_groups: NDArray[np.int64]
    stage_bytes: NDArray[np.int64]
    smem_bytes: NDArray[np.int64]
    registers: NDArray[np.int64]  # an estimate: accumulators, filter, fragments, offsets
    loads: NDArray[np.int64]  # 16-byte copies a thread and step
    products: NDArray[np.int64]  # tensor-core instructions a warp and step
    fits: NDArray[np.bool_]  # what does not depend on the layer's sizes or the device


class GroupedFprop:
    """See the module's docstring and ``kernels/grouped_fprop.cu``."""

    name = "grouped_fprop"
    operation = CONVOLUTION
    configs = _config_table()
    feature_names: tuple[str, ...] = (
        *("log_n", "log_c", "log_p", "log_q", "r", "s", "group_width", "log_bytes"),
        *("log_intensity", "bfloat16", "bias", "activation"),
        *_FIELDS,
        *("threads", "warp_tiles", "warp_groups", "smem_bytes", "registers", "loads", "products"),
        *("blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste"),
        *("q_waste", "n_waste", "c_waste", "halo_rows", "halo_columns", "steps", "bytes_in_flight"),
        *("q_tail", "n_tail", "c_tail", "row_tail", "c_tiles", "bands_cut", "band_rows"),
        *("log_blocks_an_sm", "rounds", "log_images_at_once", "pixel_alignment"),
        *("log_load_bytes", "log_products", "log_estimate"),
    )

    def legal(self, problem: Problem, device: Device) -> NDArray[np.bool_]:
        t = self.configs
        if not self._handles(problem):
            return np.zeros(len(t), np.bool_)
        shape = _shape(problem.group_width, problem.r, problem.s)
        offset = t["block_n"] * np.int64(
            problem.c * max(problem.h * problem.w, problem.p * problem.q)
        )
        bands = t["bands"]
        band_rows = -(-problem.p // bands)
        legal: NDArray[np.bool_] = (
            shape.fits
            & (shape.smem_bytes <= device.smem_per_block)
            & (offset <= MAX_OFFSET)
            & (self._blocks(problem) <= MAX_OFFSET)
            # A tile twice as large as what it covers does the work of a smaller tile, slower; the
            # smallest tiles serve whatever is smaller still.
            & (
                ((t["block_n"] < 2 * problem.n) & (t["block_q"] < 2 * problem.q))
                | (t["block_n"] * t["block_q"] <= 16)
            )
            & ((t["block_c"] < 2 * problem.c) | (t["block_c"] <= max(16, problem.group_width)))
            # Bands of one row would read R rows to make one. A count that gives bands as high as
            # half the count does is the same launch again.
            & (
                (bands == 1)
                | ((band_rows >= 2) & (band_rows < -(-problem.p // (bands // 2).clip(1))))
            )
        )
        return legal

    def estimate_s(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float64]:
        return self._plan(problem, device, rows)["estimate"]

    def features(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float32]:
        plan = self._plan(problem, device, rows)
        columns = {
            "log_n": np.log2(problem.n),
            "log_c": np.log2(problem.c),
            "log_p": np.log2(problem.p),
            "log_q": np.log2(problem.q),
            "r": problem.r,
            "s": problem.s,
            "group_width": problem.group_width,
            "log_bytes": np.log2(problem.minimum_bytes),
            "log_intensity": np.log2(problem.flops / problem.minimum_bytes),
            "bfloat16": DTYPES.index(problem.dtype),
            "bias": problem.bias,
            "activation": ACTIVATIONS.index(problem.activation),
            # Rows of pixels that do not begin at a cache line are read and written in pieces.
            "pixel_alignment": np.gcd(2 * problem.c, 128),
            "log_estimate": np.log2(plan["estimate"] / device.roofline_s(problem)),
            **{field: self.configs[field][rows] for field in _FIELDS},
            **plan,
        }
        matrix = np.empty((len(rows), len(self.feature_names)), np.float32)
        for index, feature in enumerate(self.feature_names):
            matrix[:, index] = columns[feature]
        return matrix

    def launch(self, problem: Problem, row: int) -> Launch:
        t = self.configs[row]
        shape = _shape(problem.group_width, problem.r, problem.s)
        tile = tuple((f.upper(), int(t[f])) for f in _FIELDS if f != "bands")
        source = KernelSource(
            file="grouped_fprop.cu",
            entry="grouped_fprop",
            defines=(
                ("GW", problem.group_width),
                ("R", problem.r),
                ("S", problem.s),
                ("DTYPE", f"DTYPE_{problem.dtype.upper()}"),
                ("ACTIVATION", f"ACTIVATION_{problem.activation.upper()}"),
                ("HAS_BIAS", int(problem.bias)),
                *tile,
            ),
        )
        band_rows = -(-problem.p // int(t["bands"]))
        bands = -(-problem.p // band_rows)  # rounding up may have left the last ones empty
        q_tiles = -(-problem.q // int(t["block_q"]))
        c_tiles = -(-problem.c // int(t["block_c"]))
        n_tiles = -(-problem.n // int(t["block_n"]))
        step = Step(
            source,
            grid=(n_tiles * bands * q_tiles * c_tiles, 1, 1),
            block=(int(shape.threads[row]), 1, 1),
            smem_bytes=int(shape.smem_bytes[row]),
            operands=("out", "in", "filter", "bias"),
            scalars=(
                *(problem.n, problem.c, problem.h, problem.w, problem.p, problem.q),
                *(*problem.padding, band_rows, bands, q_tiles, c_tiles),
            ),
        )
        return Launch((step,))

    @staticmethod
    def _handles(problem: Problem) -> bool:
        return (
            problem.direction == "fprop"
            and problem.dtype != "float32"
            and not problem.residual
            and problem.group_width in GROUP_WIDTHS
            and problem.k == problem.c
            and max(problem.r, problem.s) <= MAX_WINDOW
            and problem.stride == (1, 1)
            and problem.dilation == (1, 1)
        )

    def _blocks(self, problem: Problem) -> NDArray[np.int64]:
        t = self.configs
        blocks = -(-problem.n // t["block_n"].astype(np.int64)) * -(-problem.q // t["block_q"])
        band_rows = -(-problem.p // t["bands"])
        bands = -(-problem.p // band_rows)  # rounding up may have left the last ones empty
        return np.asarray(blocks * -(-problem.c // t["block_c"]) * bands, np.int64)

    def _plan(self, problem: Problem, device: Device, rows: Rows) -> dict[str, NDArray[np.float64]]:
        """How each config would run `problem`: the derived features, and the estimated seconds.

        The estimate is the largest of three times, stretched by the waste of the last wave: device
        memory, the copies into shared memory with their halos (at an assumed 2x the memory rate,
        which is what L2 sustains), and the tensor cores at the half of their rate that `mma.sync`
        reaches; plus a fixed latency for each row of a block that cannot be hidden.
        """
        t = self.configs[rows]
        shape = _shape(problem.group_width, problem.r, problem.s)
        threads = shape.threads[rows]
        smem = shape.smem_bytes[rows] + device.smem_reserved_per_block
        registers = np.minimum(shape.registers[rows], MAX_REGISTERS)
        per_sm = np.minimum(
            np.minimum(device.smem_per_sm // smem, device.regs_per_sm // (threads * registers)),
            np.minimum(device.warps_per_sm * 32 // threads, device.blocks_per_sm),
        ).clip(1)
        blocks = self._blocks(problem)[rows]
        waves = blocks / (device.sm_count * per_sm)
        wave_waste = np.ceil(waves) / waves
        band_rows = -(-problem.p // t["bands"])
        bands = -(-problem.p // band_rows)
        c_tiles = -(-problem.c // t["block_c"])
        image_blocks = c_tiles * -(-problem.q // t["block_q"]) * bands
        steps = band_rows + problem.r - 1
        sm_blocks = np.ceil(blocks / device.sm_count)
        loaded = blocks * steps * t["block_n"] * (t["block_q"] + problem.s - 1.0) * t["block_c"] * 2
        products = blocks * steps * shape.products[rows] * (threads // 32.0)
        seconds = np.maximum(
            problem.minimum_bytes / device.dram_bytes_per_s,
            np.maximum(
                loaded / (2 * device.dram_bytes_per_s), products * 4096 / (device.tensor_flops / 2)
            ),
        )
        busy = np.minimum(waves, 1.0)  # a part-filled device draws on a part of its rates
        return {
            "threads": threads,
            "warp_tiles": shape.warp_tiles[rows],
            "warp_groups": shape.warp_groups[rows],
            "smem_bytes": shape.smem_bytes[rows],
            "registers": registers,
            "loads": shape.loads[rows],
            "products": shape.products[rows],
            "blocks_per_sm": per_sm,
            "warps_per_sm": np.minimum(waves, 1.0) * per_sm * threads / 32,
            "log_blocks": np.log2(blocks),
            "waves": waves,
            "wave_waste": wave_waste,
            "q_waste": -(-problem.q // t["block_q"]) * t["block_q"] / problem.q,
            "n_waste": -(-problem.n // t["block_n"]) * t["block_n"] / problem.n,
            "c_waste": -(-problem.c // t["block_c"]) * t["block_c"] / problem.c,
            # What is left for the last block of each dimension, as a part of a whole one.
            "q_tail": problem.q % t["block_q"] / t["block_q"],
            "n_tail": problem.n % t["block_n"] / t["block_n"],
            "c_tail": problem.c % t["block_c"] / t["block_c"],
            "row_tail": (problem.p - (bands - 1) * band_rows) / band_rows,
            "c_tiles": c_tiles,
            "bands_cut": bands,
            "band_rows": band_rows,
            "log_blocks_an_sm": np.log2(sm_blocks),
            "rounds": sm_blocks / np.minimum(sm_blocks, per_sm),
            "log_images_at_once": np.log2(
                np.minimum(device.sm_count * per_sm, blocks) / image_blocks
            ),
            "halo_rows": steps / band_rows,
            "halo_columns": (t["block_q"] + problem.s - 1) / t["block_q"],
            "steps": steps,
            "bytes_in_flight": busy * per_sm * (t["stages"] - 1) * shape.stage_bytes[rows],
            "log_load_bytes": np.log2(loaded / problem.minimum_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * wave_waste + np.ceil(waves) * (2e-6 + steps * 2e-7),
        }


@lru_cache(maxsize=256)
def _shape(group_width: int, r: int, s: int) -> _Shape:
    """Mirrors the constants at the top of the kernel."""
    t = {name: GroupedFprop.configs[name].astype(np.int64) for name in _FIELDS}
    threads = 32 * t["warps_c"] * t["warps_m"]
    chunks = t["block_c"] // 8
    pixel_bytes = 16 * (chunks | 1)
    row_pixels = t["block_n"] * (t["block_q"] + s - 1)
    stage_bytes = row_pixels * pixel_bytes
    m_tiles = -(-t["block_n"] * t["block_q"] // 16)
    warp_tiles = m_tiles // t["warps_m"]
    groups = t["block_c"] // group_width
    warp_groups = groups // t["warps_c"]
    n_tiles, k_steps = group_width // 8, -(-group_width // 16)
    taps = -(-s // 2) if group_width == 8 else s
    filter_chunks = r * s * group_width // 8
    filter_bytes = np.where(t["filter_shared"], 16 * (filter_chunks | 1) * t["block_c"], 0)
    loads = -(-row_pixels * chunks // threads)
    stores = -(-t["block_n"] * t["block_q"] * chunks // threads)
    accumulators = r * warp_groups * warp_tiles * n_tiles * 4
    filter_registers = np.where(
        t["filter_shared"], 8, warp_groups * r * taps * k_steps * n_tiles * 2
    )
    registers = accumulators + filter_registers + 5 * warp_tiles + loads + stores + 32
    fits = (
        (t["block_c"] % group_width == 0)
        & (groups > 0)
        & (groups % t["warps_c"] == 0)
        # Registers hold small filters at no cost.
        & ((group_width * r * s > 16 * 9) | (t["filter_shared"] == 0))
        & ((group_width > 8) | (t["filter_shared"] == 0))
        & (loads <= 32)
        & (registers <= MAX_REGISTERS)
        & (registers * threads <= Device.regs_per_sm)
    )
    return _Shape(
        threads=threads,
        warp_tiles=warp_tiles,
        warp_groups=warp_groups,
        stage_bytes=stage_bytes,
        smem_bytes=t["stages"] * stage_bytes + 2 * m_tiles * 16 * pixel_bytes + filter_bytes,
        registers=registers,
        loads=loads,
        products=warp_groups * warp_tiles * n_tiles * k_steps * taps * r,
        fits=fits,
    )


FAMILY = GroupedFprop()
