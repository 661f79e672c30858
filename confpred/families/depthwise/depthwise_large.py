"""The depthwise families for large filters, whose result is an image: configs, legality, features
and launches of ``depthwise_large.cu``, for the forward direction and for the gradient of the input.
The parts that ``depthwise_large_wgrad.py`` shares are here too.

They serve layers of group width 1, unit stride and dilation, as many filters as channels, filters
larger than the other depthwise families have along an axis, up to 64x64, any padding, float16 and
bfloat16. Layers in float32 are left to PyTorch's operator.

An output of an R x S filter takes about (S + 8) R multiply-adds of the tensor cores, as the zeros
of the band are multiplied too. For 31x31, that is 1,240 of the at least 1,024 that a multiprocessor
does in a clock; ordinary arithmetic takes 961 of 128.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.depthwise.depthwise_banded import padding_read
from confpred.families.protocol import Array, Columns, Floats, Mask
from confpred.families.table import Shaped, Table, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_FIELDS = ("vec", "block_c", "images", "tiles_m", "tiles_n", "part", "min_blocks")
#: Channels that one instruction loads or stores.
VECTORS = (1, 2, 4, 8)
_IMAGES = (1, 2, 4)
_MOST_TILES = 16  # of a warp; each has four accumulators in a thread


def _config_table() -> NDArray[np.void]:
    rows = crossed(VECTORS, (8, 16), _IMAGES, (1, 2, 4), (1, 2, 4, 7, 8), (4, 8), (1, 2, 3))
    tiles = rows[:, 3] * rows[:, 4]
    # Blocks of 16 warps bound the registers already.
    kept = (tiles <= _MOST_TILES) & ((rows[:, 1] == 8) | (rows[:, 6] == 1))
    return config_table(_FIELDS, rows[kept])


def most_registers(t: Columns) -> Array:
    """Return the registers that a thread can have if a multiprocessor is to hold ``min_blocks``
    blocks, which have a warp for each channel."""
    share = Device.regs_per_sm // (32 * t["block_c"] * t["min_blocks"]) // 8 * 8
    return np.minimum(share, common.MAX_REGISTERS)


def plane_bytes(t: Columns, channel: Any) -> Array:
    """Return the bytes of the planes of a block, of `channel` bytes each; both kernels assert
    it."""
    return t["block_c"] * channel + 128


class Large(Shaped):
    """Base of the families for large filters."""

    def _handles(self, problem: Problem) -> bool:
        return (
            problem.dtype != "float32"
            and problem.group_width == 1
            and problem.k == problem.c
            and max(problem.r, problem.s) > depthwise.MAX_WINDOW
            and problem.stride == (1, 1)
            and depthwise.dilation(problem) == (1, 1)
            and problem.filter_elements + problem.c <= common.MAX_INT
        )

    @staticmethod
    @abstractmethod
    def _block(table: Table, r: int, s: int, bias: bool) -> Workings:
        """Return the `_shape` for problems of this filter, with a bias or without."""

    def _shape(self, problem: Problem, table: Table) -> Workings:
        return table.kept(self._block, problem.r, problem.s, problem.bias)

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        def fits(p: Problem) -> Mask:
            w, t = self._shape(p, table), table.columns
            most, blocks = most_registers(t), t["min_blocks"]
            room: Mask = (
                (w.registers <= 1.15 * most)  # hardly spills, as `banded.fits` has it
                # A bound that changes nothing would be the same kernel again.
                & ((blocks == 1) | (w.registers > 0.95 * most))
                & (w.smem_bytes <= device.smem_per_block)
                & (blocks * (w.smem_bytes + device.smem_reserved_per_block) <= device.smem_per_sm)
                & (blocks * w.threads <= 32 * device.warps_per_sm)
            )
            return room

        def accessed(t: Columns) -> Mask:
            widest: Mask = t["vec"] == np.gcd(problem.c, VECTORS[-1])
            return widest & ((t["block_c"] < 2 * problem.c) | (t["block_c"] == 8))

        return table.by(("vec", "block_c"), accessed) & problem.each_row(fits)


def _rows_inside(problem: Problem) -> tuple[int, int]:
    """Return the padding above the image that is read, and the height of this image."""
    return padding_read(problem)[0], common.image_sizes(problem)[0][0]


class DepthwiseLarge(Large):
    """One direction of ``kernels/depthwise_large.cu``."""

    configs = _config_table()
    kernel = "depthwise_large"
    kernel_fields = _FIELDS
    shared_features = (
        "log_n", "log_k", "log_p", "log_q", "r", "s", "bfloat16", "log_bytes", "log_intensity",
        *_FIELDS,
        "threads", "registers", "smem_bytes", "span", "products",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste", "p_waste",
        "c_waste", "n_waste", "halo_rows", "halo_columns", "steps", "parts", "pixel_alignment",
        "log_work", "log_products", "log_load_bytes", "log_estimate",
    )  # fmt: skip

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        height, width = problem.map(common.image_sizes)[1]

        # Tiles less than twice as large as what they cover, or the smallest.
        def suited(t: Columns) -> Mask:
            rows = 16 // t["images"] * t["tiles_m"]
            most_images = t["images"] >= np.minimum(problem.n, max(_IMAGES))
            smallest = most_images & (t["tiles_m"] == 1)
            few: Mask = (t["images"] < 2 * problem.n) | (t["images"] == 1)
            return few & ((rows < 2 * height) | smallest)

        def narrow(t: Columns) -> Mask:
            columns = ceil_div(width, 8 * t["tiles_n"]) * t["tiles_n"]
            wasteful = 4 * columns > 5 * ceil_div(width, 8)
            return (t["tiles_n"] == 1) | np.logical_not(wasteful)

        return (
            table.by(("images", "tiles_m"), suited)
            & table.by(("tiles_n",), narrow)
            & super()._cheap_rules(problem, device, table)
        )

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        counted: Mask = w.blocks <= common.MAX_INT
        return counted

    def launch(self, problem: Problem, row: int) -> Launch:
        p, w = problem, self._one(problem, row)
        defines = (
            *macros(R=p.r, S=p.s, FLIP=int(self.direction == "dgrad")),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(self.configs[row], _FIELDS),
            *common.agreed_macros(**common.named(w, "threads smem_bytes")),
        )
        scalars = {
            "n": p.n,
            "c": p.c,
            **common.image_scalars(p),
            **dict(zip(("pad_h", "pad_w"), padding_read(p), strict=True)),
            **common.named(w, "bands q_tiles c_tiles"),
        }
        return Launch((self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars),))

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        height, width = problem.map(common.image_sizes)[1]
        w.rows = 16 // t["images"] * t["tiles_m"]  # of an image in a block
        w.c_tiles = ceil_div(problem.c, t["block_c"])
        w.q_tiles = ceil_div(width, 8 * t["tiles_n"])
        w.bands = ceil_div(height, w.rows)
        w.image_tiles = ceil_div(problem.n, t["images"])
        w.blocks = w.c_tiles * w.q_tiles * w.bands * w.image_tiles
        return w

    @staticmethod
    def _block(table: Table, r: int, s: int, bias: bool) -> Workings:
        t, w = table.columns, Workings()
        images, tiles_m, tiles_n, part = (t[f] for f in ("images", "tiles_m", "tiles_n", "part"))
        span = (s + 14) // 8
        w.threads = 32 * t["block_c"]
        w.span = np.full(len(part), span)
        w.pairs = (tiles_n + span) // 2  # of eights of input columns
        ring = 16 // images + part // tiles_m - 1
        w.ring_bytes = images * tiles_m * ring * (32 * w.pairs + 16)  # of a channel
        w.smem_bytes = plane_bytes(t, w.ring_bytes) + t["block_c"] * part * (8 * span + 8) * 2
        w.products = tiles_m * tiles_n * span / 2  # of a warp and step, if no column is padding
        # Fitted to what the assembler reports of 72 kernels.
        w.registers = tiles_m * (4.7 * tiles_n + 0.9 * span) + 66
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the largest of three times, plus a latency for each wave and part:
        the times of device memory or L2, of the tensor cores, and of the instructions of the
        multiprocessor with the most blocks."""
        height, width = problem.map(common.image_sizes)[1]
        above, in_height = problem.map(_rows_inside)
        registers = np.minimum(w.registers, most_registers(t))
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        # With one band, steps in which all rows are padding are left out.
        every = problem.r + t["tiles_m"] - 1
        inside = np.minimum(every, in_height + above) - np.maximum(above - w.rows, 0)
        steps = np.where(w.bands == 1, np.maximum(inside, 1), every)
        parts = ceil_div(steps, t["part"])
        rows = steps + w.rows - t["tiles_m"]  # of input, of an image
        pair_items = rows * t["images"] * 8 * w.pairs  # of the 8 channels that 8 warps load
        fullest = occupancy.sm_blocks * device.sm_count * w.threads / 32
        products = steps * w.products
        # An ldmatrix keeps shared memory busy for as long as ten instructions take to issue.
        work = products + steps * (10 * w.pairs + 5 * w.span + 12 + problem.s * 15 / 32)
        work += pair_items / (8 * 32) * 45 + parts * 30 + common.BLOCK_INSTRUCTIONS
        load_bytes = w.blocks * pair_items * 2 * t["block_c"] * problem.itemsize
        seconds = common.largest(
            problem.map(device.roofline_s),  # although rows of padding are left out
            common.l2_s(load_bytes * (16 // t["block_c"]), device),
            common.products_s(fullest * products, device),
            common.instructions_s(fullest * work * 32, device),
        )
        return {
            "log_p": np.log2(height),
            "log_q": np.log2(width),
            **occupancy.features(),
            "q_waste": w.q_tiles * 8 * t["tiles_n"] / width,
            "p_waste": w.bands * w.rows / height,
            "c_waste": w.c_tiles * t["block_c"] / problem.c,
            "n_waste": w.image_tiles * t["images"] / problem.n,
            "halo_rows": rows / w.rows,
            "halo_columns": 2 * w.pairs / t["tiles_n"],
            "steps": steps,
            "parts": parts,
            "log_work": np.log2(w.blocks * (w.threads / 32) * work),
            "log_products": np.log2(w.blocks * (w.threads / 32) * products),
            "log_load_bytes": np.log2(load_bytes / problem.minimum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, parts, common.LOAD_S),
        }


_EPILOGUE = ("bias", "residual", "activation")
FAMILIES = (
    DepthwiseLarge("depthwise_large_fprop", "fprop", depthwise.FPROP_OPERANDS, _EPILOGUE),
    DepthwiseLarge("depthwise_large_dgrad", "dgrad", depthwise.DGRAD_OPERANDS),
)
