"""Families of ``kernels/dense_tiles.cu``: configs, legality, features, launch.

They serve dense layers whose ``in`` (the layer's input, and in dgrad the gradient of its output)
has at most ``MOST_CHANNELS`` channels: the filter of a block's channels has to stay in shared
memory. Channels are multiples of 8, the window is at most 7x7, the stride 1 or 2 along each axis,
without dilation, float16 or bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common
from confpred.families.batch import each, each_row
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Array, Rows
from confpred.families.table import Table, Tabled, config_table
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

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


_CONFIGS = _config_table()
_WHOLE = Table.of(_CONFIGS)

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
class _Axis:
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


def _axis_of(problem: Problem, axis: int) -> _Axis:
    window = (problem.r, problem.s)[axis]
    stride = problem.stride[axis]
    if problem.direction == "dgrad":
        outputs = (problem.h, problem.w)[axis]
        return _Axis(stride, 1, 1, stride, ceil_div(window, stride), ceil_div(outputs, stride))
    outputs = (problem.p, problem.q)[axis]
    if window == 1:  # what lies between the inputs that are met need not be read
        return _Axis(1, stride, 1, 1, 1, outputs)
    return _Axis(stride, 1, stride, 1, window, outputs)


def _axes_of(problem: Problem) -> tuple[_Axis, _Axis]:
    """Return the rows and the columns of `problem`."""
    return _axis_of(problem, 0), _axis_of(problem, 1)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shapes of all configs for a window, a direction and a number of channels; arrays
    over a table."""

    threads: Array
    warp_tiles: Array
    work: Array  # tensor-core tiles of a warp
    tile_pixels: Array  # of `in`, with the halo
    tile_bytes: Array
    filter_bytes: Array
    smem_bytes: Array
    registers: Array  # an estimate: accumulators, fragments, addresses
    products: Array  # tensor-core instructions of a block for a tile, at most


class DenseTiles(Tabled):
    """One direction of ``kernels/dense_tiles.cu``."""

    configs = _CONFIGS
    whole = _WHOLE
    kernel_fields = _COMPILED
    shared_features = _SHARED_FEATURES

    def _handles(self, problem: Problem) -> bool:
        return handles(problem)

    def _first(self, problem: Any, device: Device, table: Table) -> NDArray[np.bool_]:
        return each_row(lambda p: _fits(p, device, table), problem)

    def _rules(self, problem: Any, device: Device, t: Mapping[str, Array]) -> NDArray[np.bool_]:
        cut = _cut(problem, t)
        rows, columns = each(_axes_of, problem)
        return (
            (cut.blocks <= common.MAX_INT)
            # A tile twice as large as what it covers does the work of a smaller one, slower; the
            # smallest tiles serve whatever is smaller still.
            & (
                (
                    (t["block_n"] < 2 * problem.n)
                    & (t["block_p"] < 2 * rows.positions)
                    & (t["block_q"] < 2 * columns.positions)
                )
                | (t["block_n"] * t["block_p"] * t["block_q"] <= _LEAST_TILE)
            )
            & (
                (t["block_k"] < 2 * each(_out_channels, problem))
                | (t["block_k"] <= _LEAST_CHANNELS)
            )
            & ((t["tiles"] == 1) | (cut.tiles >= 2 * t["tiles"]))
        )

    def _workings(self, problem: Any, table: Table, at: Rows) -> _Shape:
        return each_row(lambda p: _shape_of(p, table), problem, at)

    def launch(self, problem: Problem, row: int) -> Launch:
        p, shape = problem, _shape_of(problem)
        rows, columns = _axes_of(p)
        cut = _cut(p, _WHOLE.at(np.array([row])))
        threads, smem_bytes = shape.threads[row], shape.smem_bytes[row]
        defines = (
            ("DGRAD", int(p.direction == "dgrad")),
            ("CIN", _in_channels(p)),
            ("R", p.r),
            ("S", p.s),
            ("STRIDE_H", rows.stride),
            ("STRIDE_W", columns.stride),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(_CONFIGS[row], _COMPILED),
            *common.agreed_macros(threads=threads, smem_bytes=smem_bytes),
        )
        sizes = ((p.h, p.w), (p.p, p.q))
        (h, w), (height, width) = sizes if self.direction == "fprop" else sizes[::-1]
        scalars = {
            "n": p.n,
            "h": h,
            "w": w,
            "p": height,
            "q": width,
            "k": _out_channels(p),
            **kernel_sizes(p, "pad_h pad_w"),
            "in_step_h": rows.in_step,
            "in_step_w": columns.in_step,
            **common.named(cut, "k_blocks p_tiles q_tiles n_tiles tiles"),
            "tiles_a_block": _CONFIGS["tiles"][row],
        }
        step = common.kernel_step(
            "dense_tiles", defines, cut.blocks, threads, smem_bytes, self.operands, scalars
        )
        return Launch((step,))

    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], workings: _Shape
    ) -> dict[str, NDArray[np.float64]]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave:
        those of device memory, of the copies from L2 into shared memory with their halos, and of
        the tensor cores; plus a fixed latency for each tile of a block."""
        shape, cut = workings, _cut(problem, t)
        down, across = each(_axes_of, problem)
        registers = np.minimum(shape.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, cut.blocks, shape.threads, registers, shape.smem_bytes)
        in_turn = np.minimum(t["tiles"], cut.tiles)
        filters = cut.blocks * shape.filter_bytes
        read = cut.tiles * cut.k_blocks
        images = read * shape.tile_pixels * (each(_in_channels, problem) * 2.0)
        products = read * shape.products
        seconds = np.maximum(
            problem.minimum_bytes / device.dram_bytes_per_s,
            np.maximum(common.l2_s(filters + images, device), common.products_s(products, device)),
        )
        seconds = np.maximum(seconds, each(device.roofline_s, problem))
        height, width = each(_out_size, problem)
        pixels = t["block_n"] * t["block_p"] * t["block_q"]
        return {
            "log_p": np.log2(height),
            "log_q": np.log2(width),
            **common.named(shape, "threads warp_tiles work smem_bytes products"),
            "registers": registers,
            **occupancy.features(),
            "rounds": occupancy.rounds,
            "n_waste": cut.n_tiles * t["block_n"] / problem.n,
            "p_waste": cut.p_tiles * t["block_p"] / down.positions,
            "q_waste": cut.q_tiles * t["block_q"] / across.positions,
            "k_waste": cut.k_blocks * t["block_k"] / each(_out_channels, problem),
            "k_blocks": cut.k_blocks,
            "halo": shape.tile_pixels / (pixels * down.down * across.down),
            "in_turn": in_turn,
            "bytes_in_flight": occupancy.resident * t["buffers"] * shape.tile_bytes,
            "log_load_bytes": np.log2((filters + images) / problem.minimum_bytes),
            "log_filter_bytes": np.log2(shape.filter_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(
                occupancy.waves, common.WAVE_AND_LAUNCH_S, in_turn, common.DEPTHWISE_STEP_S
            ),
        }


def handles(problem: Problem) -> bool:
    """Whether `problem` is a layer that the kernels compute."""
    taps = zip((problem.r, problem.s), problem.dilation, strict=True)
    return (
        problem.dtype in DTYPES
        and problem.groups == 1
        and problem.c % 8 == 0
        and problem.k % 8 == 0
        and _in_channels(problem) <= MOST_CHANNELS
        and max(problem.r, problem.s) <= MAX_WINDOW
        and max(problem.stride) <= MAX_STRIDE
        and all(window == 1 or dilation == 1 for window, dilation in taps)
    )


def _fits(problem: Problem, device: Device, table: Table) -> NDArray[np.bool_]:
    """Which rows of `table` serve the problem's window and channels on `device`."""
    shape = _shape_of(problem, table)
    return (
        (shape.smem_bytes <= device.smem_per_block)
        & (shape.registers <= common.MOST_ESTIMATED_REGISTERS)
        & (shape.registers * shape.threads <= Device.regs_per_sm)
    )


def _out_size(problem: Problem) -> tuple[int, int]:
    """Height and width of what the kernel writes."""
    return (problem.p, problem.q) if problem.direction == "fprop" else (problem.h, problem.w)


def _in_channels(problem: Problem) -> int:
    """Channels of what the kernel reads, and sums over."""
    return problem.c if problem.direction == "fprop" else problem.k


def _out_channels(problem: Problem) -> int:
    """Channels of what the kernel writes."""
    return problem.k if problem.direction == "fprop" else problem.c


@dataclass(frozen=True, slots=True)
class _Cut:
    """How configs cut a problem; arrays over those configs.

    Attributes:
        n_tiles, p_tiles, q_tiles: tiles along the images, and along a lattice of rows and columns.
        tiles: tiles in all lattices.
        k_blocks: blocks along the channels.
        blocks: of the launch.
    """

    n_tiles: Array
    p_tiles: Array
    q_tiles: Array
    tiles: Array
    k_blocks: Array
    blocks: Array


def _cut(problem: Any, t: Mapping[str, Array]) -> _Cut:
    """How the configs whose fields are the columns `t` cut `problem`."""
    rows, columns = each(_axes_of, problem)
    n_tiles = ceil_div(problem.n, t["block_n"])
    p_tiles = ceil_div(rows.positions, t["block_p"])
    q_tiles = ceil_div(columns.positions, t["block_q"])
    tiles = n_tiles * p_tiles * q_tiles * (rows.lattices * columns.lattices)
    k_blocks = ceil_div(each(_out_channels, problem), t["block_k"])
    blocks = ceil_div(tiles, t["tiles"]) * k_blocks
    return _Cut(n_tiles, p_tiles, q_tiles, tiles, k_blocks, blocks)


def _shape_of(problem: Problem, table: Table = _WHOLE) -> _Shape:
    rows, columns = _axes_of(problem)
    return table.kept(
        _shape,
        channels=_in_channels(problem),
        window=(problem.r, problem.s),
        taps=(rows.taps, columns.taps),
        down=(rows.down, columns.down),
        dgrad=problem.direction == "dgrad",
    )


def _shape(
    table: Table,
    channels: int,
    window: tuple[int, int],
    taps: tuple[int, int],
    down: tuple[int, int],
    dgrad: bool,
) -> _Shape:
    """Return the shape of a block. The kernel works most of it out from its macros too, and asserts
    that the threads and the shared memory are the same."""
    t = table.columns
    k_steps = ceil_div(channels, 16)
    out_chunks = t["block_k"] // 8
    m_tiles = ceil_div(t["block_n"] * t["block_p"] * t["block_q"], 16)
    warp_tiles = ceil_div(m_tiles, t["warps_m"])
    warp_columns = t["block_k"] // t["warps_k"] // 8
    tile_h = down[0] * (t["block_p"] - 1) + taps[0]
    tile_w = down[1] * (t["block_q"] - 1) + taps[1]
    tile_pixels = t["block_n"] * tile_h * tile_w
    tile_bytes = tile_pixels * 16 * (2 * k_steps | 1)
    out_bytes = m_tiles * 16 * 16 * (out_chunks | 1)
    all_taps = window[0] * window[1]
    if dgrad:
        filter_bytes = all_taps * k_steps * 16 * 16 * (out_chunks | 1)
    else:
        filter_bytes = t["block_k"] * (16 * (all_taps * k_steps * 2 | 1))
    work = warp_tiles * warp_columns
    return _Shape(
        threads=32 * t["warps_m"] * t["warps_k"],
        warp_tiles=warp_tiles,
        work=work,
        tile_pixels=tile_pixels,
        tile_bytes=tile_bytes,
        filter_bytes=filter_bytes,
        smem_bytes=t["buffers"] * tile_bytes + out_bytes + filter_bytes,
        registers=4 * work + 5 * warp_tiles + 2 * warp_columns + 36,
        products=work * t["warps_m"] * t["warps_k"] * k_steps * taps[0] * taps[1],
    )


_EPILOGUE = ("bias", "activation", "residual")
FAMILIES = (
    DenseTiles("dense_fprop", "fprop", ("out", "in", "filter", "bias", "residual"), _EPILOGUE),
    DenseTiles("dense_dgrad", "dgrad", ("in_grad", "out_grad", "filter")),
)
