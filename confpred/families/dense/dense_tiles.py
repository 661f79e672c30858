"""Families of ``kernels/dense_tiles.cu``: configs, legality, features, launch.

They serve dense layers whose ``in`` (the layer's input, and in dgrad the gradient of its output)
has at most ``MOST_CHANNELS`` channels: the filter of a block's channels has to stay in shared
memory. Channels are multiples of 8, the filter is at most 7x7, the stride 1 or 2 along each axis,
without dilation, float16 or bfloat16.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Shaped, Table, config_table
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_Pair = tuple[int, int]
DTYPES = ("float16", "bfloat16")
MOST_CHANNELS = 128
MAX_WINDOW = 7
MAX_STRIDE = 2

#: (images, rows, columns) of a tile: some fill tensor-core tiles of 16 pixels, the others the
#: images of networks whose sizes are multiples of 7.
_TILES = (
    (1, 4, 8), (2, 4, 4),
    (1, 8, 8), (1, 4, 16), (4, 4, 4), (1, 7, 7), (1, 4, 14),
    (1, 8, 16), (1, 4, 32), (2, 8, 8), (8, 4, 4), (2, 7, 7), (1, 7, 14), (1, 2, 56),
    (1, 16, 16), (1, 8, 32), (4, 8, 8), (4, 7, 7), (1, 14, 14), (1, 4, 56),
)  # fmt: skip
#: (channels, warps along them) of a block.
_CHANNELS = (
    (16, 1), (24, 1), (32, 1), (32, 2), (40, 1), (48, 1), (48, 2), (48, 3), (64, 1), (64, 2),
    (64, 4), (80, 2), (96, 2), (96, 3), (128, 4),
)  # fmt: skip
#: How many tiles a block computes, one after the other.
_IN_TURN = (1, 2, 4, 8)
_COMPILED = ("block_n", "block_p", "block_q", "block_k", "warps_m", "warps_k", "buffers")
_FIELDS = (*_COMPILED, "tiles")
_LEAST_TILE, _LEAST_CHANNELS = 32, 16


def _config_table() -> NDArray[np.void]:
    """Return the config space: blocks of two to eight warps, each with two to sixteen tensor-core
    tiles of 16 pixels x 8 channels."""
    rows = []
    for tile, (block_k, warps_k), warps_m, tiles in itertools.product(
        _TILES, _CHANNELS, (1, 2, 4, 8), _IN_TURN
    ):
        m_tiles = ceil_div(tile[0] * tile[1] * tile[2], 16)
        warp_tiles = ceil_div(m_tiles, warps_m)
        idle = warp_tiles * warps_m - m_tiles
        work = warp_tiles * (block_k // warps_k // 8)
        if not 2 <= warps_m * warps_k <= 8 or not 2 <= work <= 16 or 4 * idle > m_tiles:
            continue
        if tiles > 1 and m_tiles < 4:
            continue  # what a small tile costs is not what several in turn would save
        rows.append((*tile, block_k, warps_m, warps_k, 1 if tiles == 1 else 2, tiles))
    return config_table(_FIELDS, rows)


_SHARED_FEATURES = (
    "log_n", "log_c", "log_k", "log_p", "log_q", "r", "s", "stride_h", "stride_w", "bfloat16",
    "log_bytes", "log_intensity", "pixel_alignment",
    *_FIELDS,
    "threads", "warp_tiles", "work", "smem_bytes", "registers", "products",
    "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "rounds",
    "n_waste", "p_waste", "q_waste", "k_waste", "k_blocks", "halo", "in_turn",
    "bytes_in_flight", "log_load_bytes", "log_filter_bytes", "log_products", "log_estimate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _DenseAxis:
    """The rows or the columns of a layer, as the kernel knows them.

    Attributes:
        stride: what the kernel is compiled for.
        in_step: inputs from one to the next that a tile reads.
        down: inputs of a tile from one output position to the next.
        lattices: 2 where output positions of different parity meet different taps.
        taps: of a lattice, at most.
        positions: output positions of a lattice, at most.
    """

    stride: int
    in_step: int
    down: int
    lattices: int
    taps: int
    positions: int


def _describe_axis(problem: Problem, axis: int) -> _DenseAxis:
    window = (problem.r, problem.s)[axis]
    stride = problem.stride[axis]
    if problem.direction == "dgrad":
        outputs = (problem.h, problem.w)[axis]
        return _DenseAxis(stride, 1, 1, stride, ceil_div(window, stride), ceil_div(outputs, stride))
    outputs = (problem.p, problem.q)[axis]
    if window == 1:  # what lies between the inputs that are met need not be read
        return _DenseAxis(1, stride, 1, 1, 1, outputs)
    return _DenseAxis(stride, 1, stride, 1, window, outputs)


def _describe_axes(problem: Problem) -> tuple[_DenseAxis, _DenseAxis]:
    """Return the rows and the columns of `problem`."""
    return _describe_axis(problem, 0), _describe_axis(problem, 1)


def _in_channels(problem: Problem) -> int:
    """Return the channels that the kernel reads, and sums over."""
    return problem.c if problem.direction == "fprop" else problem.k


def _out_channels(problem: Problem) -> int:
    """Return the channels that the kernel writes."""
    return problem.k if problem.direction == "fprop" else problem.c


class DenseTiles(Shaped):
    """One direction of ``kernels/dense_tiles.cu``."""

    configs = _config_table()
    kernel = "dense_tiles"
    kernel_fields = _COMPILED
    shared_features = _SHARED_FEATURES

    def _handles(self, problem: Problem) -> bool:
        taps = zip((problem.r, problem.s), problem.dilation, strict=True)
        return (
            problem.dtype in DTYPES
            and problem.groups == 1
            and problem.c % 8 == 0
            and problem.k % 8 == 0
            and _in_channels(problem) <= MOST_CHANNELS
            and max(problem.r, problem.s) <= MAX_WINDOW
            and max(problem.stride) <= MAX_STRIDE
            and max(problem.h * problem.w, problem.p * problem.q) <= common.MAX_INT
            and all(window == 1 or dilation == 1 for window, dilation in taps)
        )

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        rows, columns = problem.map(_describe_axes)
        return (
            (w.blocks <= common.MAX_INT)
            & common.well_filled(
                _LEAST_TILE,
                (t["block_n"], problem.n),
                (t["block_p"], rows.positions),
                (t["block_q"], columns.positions),
            )
            & ((t["block_k"] < 2 * problem.map(_out_channels)) | (t["block_k"] <= _LEAST_CHANNELS))
            & ((t["tiles"] == 1) | (w.all_tiles >= 2 * t["tiles"]))
        )

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        rows, columns = problem.map(_describe_axes)
        w.n_tiles = ceil_div(problem.n, t["block_n"])
        w.p_tiles = ceil_div(rows.positions, t["block_p"])
        w.q_tiles = ceil_div(columns.positions, t["block_q"])
        w.all_tiles = w.n_tiles * w.p_tiles * w.q_tiles * (rows.lattices * columns.lattices)
        w.k_blocks = ceil_div(problem.map(_out_channels), t["block_k"])
        w.blocks = ceil_div(w.all_tiles, t["tiles"]) * w.k_blocks
        return w

    def _shape(self, problem: Problem, table: Table) -> Any:
        p, (rows, columns) = problem, _describe_axes(problem)
        taps, down = (rows.taps, columns.taps), (rows.down, columns.down)
        return table.kept(_shape, _in_channels(p), p.r * p.s, taps, down, p.direction == "dgrad")

    def launch(self, problem: Problem, row: int) -> Launch:
        p, config, w = problem, self.configs[row], self._one(problem, row)
        rows, columns = _describe_axes(p)
        defines = (
            *macros(DGRAD=int(p.direction == "dgrad"), CIN=_in_channels(p), R=p.r, S=p.s),
            *macros(STRIDE_H=rows.stride, STRIDE_W=columns.stride),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(config, _COMPILED),
            *common.agreed_macros(threads=w.threads, smem_bytes=w.smem_bytes),
        )
        scalars = {
            "n": p.n,
            **common.image_scalars(p),
            "k": _out_channels(p),
            **kernel_sizes(p, "pad_h pad_w"),
            "in_step_h": rows.in_step,
            "in_step_w": columns.in_step,
            **common.named(w, "k_blocks p_tiles q_tiles n_tiles"),
            "tiles": w.all_tiles,
            "tiles_a_block": config["tiles"],
        }
        return Launch((self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars),))

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave:
        those of device memory, of the copies from L2 into shared memory with their halos, and of
        the tensor cores; plus a fixed latency for each tile of a block."""
        down, across = problem.map(_describe_axes)
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        in_turn = np.minimum(t["tiles"], w.all_tiles)
        filters = w.blocks * w.filter_bytes
        read = w.all_tiles * w.k_blocks
        images = read * w.tile_pixels * (problem.map(_in_channels) * 2.0)
        products = read * w.products
        seconds = common.largest(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.l2_s(filters + images, device),
            common.products_s(products, device),
            problem.map(device.roofline_s),
        )
        _, (height, width) = problem.map(common.image_sizes)
        pixels = t["block_n"] * t["block_p"] * t["block_q"]
        return {
            "log_p": np.log2(height),
            "log_q": np.log2(width),
            "registers": registers,
            **occupancy.features(),
            "rounds": occupancy.rounds,
            "n_waste": w.n_tiles * t["block_n"] / problem.n,
            "p_waste": w.p_tiles * t["block_p"] / down.positions,
            "q_waste": w.q_tiles * t["block_q"] / across.positions,
            "k_waste": w.k_blocks * t["block_k"] / problem.map(_out_channels),
            "halo": w.tile_pixels / (pixels * down.down * across.down),
            "in_turn": in_turn,
            "bytes_in_flight": occupancy.resident * t["buffers"] * w.tile_bytes,
            "log_load_bytes": np.log2((filters + images) / problem.minimum_bytes),
            "log_filter_bytes": np.log2(w.filter_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(
                occupancy.waves, common.WAVE_AND_LAUNCH_S, in_turn, common.DEPTHWISE_STEP_S
            ),
        }


def _shape(
    table: Table, channels: int, window: int, taps: _Pair, down: _Pair, dgrad: bool
) -> Workings:
    t, w = table.columns, Workings()
    k_steps = ceil_div(channels, 16)
    out_chunks = t["block_k"] // 8
    m_tiles = ceil_div(t["block_n"] * t["block_p"] * t["block_q"], 16)
    w.threads = 32 * t["warps_m"] * t["warps_k"]
    w.warp_tiles = ceil_div(m_tiles, t["warps_m"])
    warp_columns = t["block_k"] // t["warps_k"] // 8
    w.work = w.warp_tiles * warp_columns  # tensor-core tiles of a warp
    tile_h = down[0] * (t["block_p"] - 1) + taps[0]
    tile_w = down[1] * (t["block_q"] - 1) + taps[1]
    w.tile_pixels = t["block_n"] * tile_h * tile_w  # of `in`, with the halo
    w.tile_bytes = w.tile_pixels * 16 * (2 * k_steps | 1)
    out_bytes = m_tiles * 16 * 16 * (out_chunks | 1)
    if dgrad:
        w.filter_bytes = window * k_steps * 16 * 16 * (out_chunks | 1)
    else:
        w.filter_bytes = t["block_k"] * (16 * (window * k_steps * 2 | 1))
    w.smem_bytes = t["buffers"] * w.tile_bytes + out_bytes + w.filter_bytes
    # An estimate: accumulators, fragments, addresses.
    w.registers = 4 * w.work + 5 * w.warp_tiles + 2 * warp_columns + 36
    # Tensor-core instructions of a block for a tile, at most.
    w.products = w.work * t["warps_m"] * t["warps_k"] * k_steps * taps[0] * taps[1]
    w.fits = (w.registers <= common.MOST_ESTIMATED_REGISTERS) & (
        w.registers * w.threads <= Device.regs_per_sm
    )
    return w


_EPILOGUE = ("bias", "activation", "residual")
FAMILIES = (
    DenseTiles("dense_fprop", "fprop", ("out", "in", "filter", "bias", "residual"), _EPILOGUE),
    DenseTiles("dense_dgrad", "dgrad", ("in_grad", "out_grad", "filter")),
)
