"""Families of ``kernels/anywidth.cu``: configs, legality, features, launch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import anywidth, common
from confpred.families.anywidth import MOST_ROW_VECTORS, depth_of, describe_axes
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Shaped, Table, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_Pair = tuple[int, int]
#: (images, rows, columns) of a tile: some fill tensor-core tiles of 16 pixels, the others the
#: images of networks whose sizes are multiples of 7.
_TILES = (
    (1, 4, 8), (1, 8, 8), (2, 4, 8), (1, 4, 16), (1, 8, 16), (1, 4, 28), (1, 14, 14),
    (1, 16, 16), (2, 7, 7), (4, 7, 7), (1, 7, 14),
)  # fmt: skip
#: Groups of a block, and the most channels of `out` of each.
_GROUPS = ((1, 32), (1, 64), (1, 128), (2, 32), (2, 64), (4, 32), (8, 32))
_BLOCK_K, _BLOCK_C = (32, 64, 128), (8, 16, 32, 64, 128)
#: Passes in flight, and how many tiles a block computes, one after the other.
_FLOWS = ((1, 1), (2, 1), (3, 1), (2, 2), (2, 4), (2, 8))
_COMPILED = (
    "block_n", "block_p", "block_q", "block_g", "block_k", "block_c", "warps_m", "warps_k",
    "stages",
)  # fmt: skip
_FIELDS = (*_COMPILED, "tiles")
_LEAST_TILE = 32


def _config_table() -> NDArray[np.void]:
    """Return the config space: blocks of two to eight warps."""
    parts = (_TILES, _GROUPS, [(c,) for c in _BLOCK_C], [(m,) for m in (1, 2, 4, 8)])
    rows = crossed(*parts, [(k,) for k in (1, 2, 4)], _FLOWS)
    n, p, q, g, _, c, warps_m, warps_k, _, tiles = rows.T
    warps, m_tiles = g * warps_m * warps_k, ceil_div(n * p * q, 16)
    kept = (
        (warps >= 2)
        & (warps <= 8)
        # Warps share the pixels evenly, but for a fifth.
        & (5 * (ceil_div(m_tiles, warps_m) * warps_m - m_tiles) <= m_tiles)
        # Where blocks have several groups these are narrow: one pass, and warps of their own.
        & ((g == 1) | ((warps_k == 1) & (c <= 64)))
        & ((tiles == 1) | (m_tiles >= 4))
    )
    return config_table(_FIELDS, np.ascontiguousarray(rows[kept]))


_SHARED_FEATURES = (
    "log_n", "log_c", "log_k", "log_p", "log_q", "r", "s", "group_width", "depth", "log_groups",
    "stride_h", "stride_w", "dilation_h", "dilation_w", "bfloat16", "log_bytes", "log_intensity",
    "in_vector", "out_vector",
    *_FIELDS,
    "threads", "warp_tiles", "warp_columns", "passes", "pieces", "k_blocks", "smem_bytes",
    "registers", "products", "fragment_bytes", "loads",
    "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "rounds",
    "n_waste", "p_waste", "q_waste", "g_waste", "k_waste", "c_waste", "halo", "in_turn",
    "bytes_in_flight", "log_load_bytes", "log_filter_bytes", "log_products", "log_estimate",
)  # fmt: skip


def _widths(problem: Problem) -> _Pair:
    """Return the channels of a group, of what the kernel reads and of what it writes."""
    widths = (problem.group_width, depth_of(problem))
    return widths if problem.direction == "fprop" else (widths[1], widths[0])


class AnyWidth(Shaped):
    """One direction of ``kernels/anywidth.cu``. Layers whose groups do not give a whole multiple of
    their channels share a `confpred.problem.conv2d.Kind` with others; what is known of the
    registers of their kernels is the larger number."""

    configs = _config_table()
    kernel = "anywidth"
    kernel_fields = _COMPILED
    shared_features = _SHARED_FEATURES

    def _handles(self, problem: Problem) -> bool:
        return anywidth.handles(problem)

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        rows, columns = problem.map(describe_axes)
        return (
            (w.blocks <= common.MAX_INT)
            & common.well_filled(
                _LEAST_TILE,
                (t["block_n"], problem.n),
                (t["block_p"], rows.positions),
                (t["block_q"], columns.positions),
            )
            & ((t["block_g"] == 1) | (t["block_g"] < 2 * problem.groups))
            & ((t["tiles"] == 1) | (w.all_tiles >= 2 * t["tiles"]))
        )

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        rows, columns = problem.map(describe_axes)
        w.n_tiles = ceil_div(problem.n, t["block_n"])
        w.p_tiles = ceil_div(rows.positions, t["block_p"])
        w.q_tiles = ceil_div(columns.positions, t["block_q"])
        w.all_tiles = w.n_tiles * w.p_tiles * w.q_tiles * (rows.lattices * columns.lattices)
        w.group_blocks = ceil_div(problem.groups, t["block_g"])
        _, width = problem.map(_widths)
        w.parts = ceil_div(ceil_div(width, 8), t["block_k"] // 8) * w.group_blocks
        w.blocks = ceil_div(w.all_tiles, t["tiles"]) * w.parts
        return w

    def _shape(self, problem: Problem, table: Table) -> Any:
        rows, columns = describe_axes(problem)
        met, down, step = (
            (getattr(rows, name), getattr(columns, name)) for name in ("met", "down", "step")
        )
        taps, dgrad = problem.r * problem.s, problem.direction == "dgrad"
        return table.kept(_shape, _widths(problem), taps, met, down, step, dgrad)

    def launch(self, problem: Problem, row: int) -> Launch:
        p, w, (rows, columns) = problem, self._one(problem, row), describe_axes(problem)
        g_in, g_out = _widths(p)
        defines = (
            *macros(DGRAD=int(p.direction == "dgrad"), GIN=g_in, GOUT=g_out, R=p.r, S=p.s),
            *macros(DOWN_H=rows.down, DOWN_W=columns.down, STEP_H=rows.step, STEP_W=columns.step),
            *macros(HALVED_H=rows.halved, HALVED_W=columns.halved),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(
                threads=w.threads, smem_bytes=w.smem_bytes, k_blocks=w.k_blocks, passes=w.passes
            ),
        )
        scalars = {
            "n": p.n,
            **common.image_scalars(p),
            **kernel_sizes(p, "groups pad_h pad_w"),
            "in_step_h": rows.in_step,
            "in_step_w": columns.in_step,
            **common.named(w, "group_blocks p_tiles q_tiles n_tiles"),
            "tiles": w.all_tiles,
            "tiles_a_block": self.configs[row]["tiles"],
        }
        return Launch((self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars),))

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave:
        those of device memory, of the copies from L2 into shared memory with their halos and
        filters, and of the tensor cores; plus a fixed latency for each pass that cannot be
        hidden."""
        down, across = problem.map(describe_axes)
        g_in, g_out = problem.map(_widths)
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        in_turn = np.minimum(t["tiles"], w.all_tiles)
        read = w.all_tiles * w.parts  # tiles of images, each with all of its passes
        filters = np.where(w.passes == 1, w.blocks, read) * (w.filter_bytes * 1.0)
        images = read * w.tile_pixels * (t["block_g"] * (w.passes * w.pieces * 16.0))
        products = read * w.products
        seconds = common.largest(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.l2_s(filters + images, device),
            common.products_s(products, device),
            anywidth.shared_s(read * w.fragment_bytes, device),
            problem.map(device.roofline_s),
        )
        _, (height, width) = problem.map(common.image_sizes)
        pixels = t["block_n"] * t["block_p"] * t["block_q"]
        steps = in_turn * w.passes
        return {
            "log_p": np.log2(height),
            "log_q": np.log2(width),
            "depth": problem.map(depth_of),
            "log_groups": np.log2(problem.groups),
            "in_vector": problem.map(lambda p: anywidth.vector_of(_widths(p)[0])),
            "out_vector": problem.map(lambda p: anywidth.vector_of(_widths(p)[1])),
            "registers": registers,
            **occupancy.features(),
            "rounds": occupancy.rounds,
            "n_waste": w.n_tiles * t["block_n"] / problem.n,
            "p_waste": w.p_tiles * t["block_p"] / down.positions,
            "q_waste": w.q_tiles * t["block_q"] / across.positions,
            "g_waste": w.group_blocks * t["block_g"] / problem.groups,
            "k_waste": w.k_blocks * w.columns * 8 / g_out,
            "c_waste": w.passes * w.pieces * 8 / g_in,
            "halo": w.tile_pixels / (pixels * down.down * across.down),
            "in_turn": in_turn,
            "bytes_in_flight": occupancy.resident * np.maximum(t["stages"] - 1, 1) * w.stage_bytes,
            "log_load_bytes": np.log2((filters + images) / problem.minimum_bytes),
            "log_filter_bytes": np.log2(w.filter_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(occupancy.waves, common.WAVE_AND_LAUNCH_S, steps, common.STEP_S),
        }


def _shape(
    table: Table, widths: _Pair, taps: int, met: _Pair, down: _Pair, step: _Pair, dgrad: bool
) -> Workings:
    t, w = table.columns, Workings()
    in_pieces, out_pieces = (ceil_div(width, 8) for width in widths)
    groups = t["block_g"]
    w.passes = ceil_div(in_pieces, t["block_c"] // 8)
    w.pieces = ceil_div(in_pieces, w.passes)  # of 8 channels, of a pass
    w.k_blocks = ceil_div(out_pieces, t["block_k"] // 8)
    w.columns = ceil_div(out_pieces, w.k_blocks)  # tiles of 8 channels of `out` of a block's group
    w.warp_columns = ceil_div(w.columns, t["warps_k"])
    pixels = t["block_n"] * t["block_p"] * t["block_q"]
    m_tiles = ceil_div(pixels, 16)
    w.warp_tiles = ceil_div(m_tiles, t["warps_m"])
    w.threads = 32 * groups * t["warps_m"] * t["warps_k"]
    tile_h = down[0] * (t["block_p"] - 1) + step[0] * (met[0] - 1) + 1
    tile_w = down[1] * (t["block_q"] - 1) + step[1] * (met[1] - 1) + 1
    w.tile_pixels = t["block_n"] * tile_h * tile_w  # of `in`, with the halo
    tile_bytes = w.tile_pixels * 16 * (groups * w.pieces | 1)
    if dgrad:
        w.filter_bytes = groups * taps * w.pieces * 8 * 16 * (w.columns | 1)
    else:
        w.filter_bytes = groups * w.columns * 8 * 16 * (taps * w.pieces | 1)
    one_pass = w.passes == 1
    w.stage_bytes = tile_bytes + np.where(one_pass, 0, w.filter_bytes)
    out_bytes = pixels * 16 * (groups * w.columns | 1)
    w.smem_bytes = t["stages"] * w.stage_bytes + np.where(one_pass, w.filter_bytes, 0) + out_bytes
    # Vectors of a pass that a thread copies.
    row_vectors = tile_w * groups * w.pieces * (8 // anywidth.vector_of(widths[0]))
    w.loads = t["block_n"] * tile_h * row_vectors / w.threads
    work = w.warp_tiles * w.warp_columns  # tensor-core tiles of a warp
    # An estimate: accumulators, fragments, addresses.
    w.registers = 4 * work + 5 * w.warp_tiles + 2 * w.warp_columns + 44
    # Tensor-core instructions of a block for a tile, at most.
    steps = met[0] * ceil_div(met[1] * w.pieces, 2) * w.passes
    warps = w.threads // 32
    w.products = work * warps * steps
    # Bytes of shared memory that its fragments are read from.
    w.fragment_bytes = (w.warp_tiles + ceil_div(w.warp_columns, 2)) * warps * (steps * 512)
    depth = taps * w.pieces  # eights of the sum in a pass
    w.fits = (
        anywidth.is_first(out_pieces, t["block_k"], _BLOCK_K)
        & anywidth.is_first(in_pieces, t["block_c"], _BLOCK_C)
        & np.where(one_pass, (t["stages"] == 1) | (t["tiles"] > 1), t["stages"] > 1)
        & (one_pass | (t["tiles"] == 1))
        & ((groups == 1) | (one_pass & (w.k_blocks == 1) & (groups * out_pieces <= 16)))
        # Groups are cut and shared by warps almost evenly.
        & (4 * (w.passes * w.pieces - in_pieces) <= in_pieces)
        & (4 * (t["warps_k"] * w.warp_columns - w.columns) <= w.columns)
        # A pass is long enough for its copies to be hidden, and no longer than that takes; one of
        # few channels reads a part of each sector.
        & (one_pass | ((depth >= 5) & (depth <= 56)))
        & ((t["block_c"] >= 16) | (in_pieces == 1) | (taps > 25))
        & ((work >= 2) | (pixels <= _LEAST_TILE))
        & (work <= 24)
        # Two warps have enough to do in small blocks.
        & ((w.threads >= 128) | (m_tiles * w.columns <= 16))
        & ((t["stages"] < 3) | (depth <= 24))
        # Warps divide the longer side, so that fragments are read less often.
        & ((t["warps_k"] == 1) | (w.warp_tiles <= 2 * w.warp_columns))
        & ((t["warps_m"] == 1) | (w.warp_columns <= 4 * w.warp_tiles))
        & (row_vectors <= MOST_ROW_VECTORS)
        & (w.smem_bytes <= anywidth.MOST_THREAD_BYTES * w.threads)
        & (w.registers <= common.MOST_ESTIMATED_REGISTERS)
        & (w.registers * w.threads <= Device.regs_per_sm)
    )
    return w


_EPILOGUE = ("bias", "activation", "residual")
FAMILIES = (
    AnyWidth("anywidth_fprop", "fprop", ("out", "in", "filter", "bias", "residual"), _EPILOGUE),
    AnyWidth("anywidth_dgrad", "dgrad", ("in_grad", "out_grad", "filter")),
)
