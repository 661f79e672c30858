"""Gradient of a grouped convolution's filter at any group width, with that of the bias from the
same sweep: configs, legality, features and launch of ``anywidth_wgrad.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import anywidth, common
from confpred.families.anywidth import MOST_ROW_VECTORS, Walk, depth_of, describe_axes
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Shaped, Table, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

#: (images, rows, columns) of a tile: whole tensor-core steps of 16 pixels.
_TILES = (
    (1, 4, 8), (1, 8, 8), (2, 4, 8), (1, 8, 16), (1, 4, 28), (2, 7, 8), (1, 14, 16), (1, 2, 56),
)  # fmt: skip
#: Groups of a block, and the most channels of `out_grad` and of `in` of each.
_BLOCKS = (
    *((1, k, c) for k in (16, 32, 64, 128) for c in (8, 16, 32, 64)),
    *((g, k, c) for g in (2, 4, 8) for k in (16, 32) for c in (8, 16, 32)),
    (2, 64, 64),
)
_BLOCK_K, _BLOCK_C = (16, 32, 64, 128), (8, 16, 32, 64)
#: Warps of a group along the channels of `out_grad`, and along the units.
_WARPS = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (2, 4))
#: How many parts the tiles of all images are cut into; blocks share sums so.
_SPLITS = tuple(2**i for i in range(10))
_COMPILED = (
    "block_n", "block_p", "block_q", "block_g", "block_k", "block_c", "warps_k", "warps_u",
    "stages",
)  # fmt: skip
_FIELDS = (*_COMPILED, "splits")
_LEAST_TILE = 32
#: Pixels of a chain of sums, at most: from twice as many on, an H200's results were wrong in their
#: last digits.
_MOST_SUMMED = 2**17
_SUM_COLUMNS = 32  # elements a block of ``depthwise_wgrad_sum.cu``


def _config_table() -> NDArray[np.void]:
    """Return the config space: blocks of two to eight warps."""
    rows = crossed(_TILES, _BLOCKS, _WARPS, [(2,), (3,)], [(split,) for split in _SPLITS])
    n, p, q, g, _, _, warps_k, warps_u, stages, _ = rows.T
    warps, pixels = g * warps_k * warps_u, n * p * q
    # Copies of large tiles need no third stage to be hidden.
    kept = (warps >= 2) & (warps <= 8) & ((stages == 2) | (pixels <= 64))
    return config_table(_FIELDS, np.ascontiguousarray(rows[kept]))


class AnyWidthWgrad(Shaped):
    """``kernels/anywidth_wgrad.cu``. Its kernels share kinds as those of
    `confpred.families.anywidth.anywidth.AnyWidth` do."""

    configs = _config_table()
    kernel = "anywidth_wgrad"
    kernel_fields = _COMPILED
    shared_features = (
        "log_n", "log_c", "log_k", "log_p", "log_q", "r", "s", "group_width", "depth",
        "log_groups", "stride_h", "stride_w", "dilation_h", "dilation_w", "bfloat16", "bias",
        "log_bytes", "log_intensity", "in_vector", "out_vector",
        *_FIELDS,
        "threads", "warp_tiles", "warp_units", "pieces", "k_tiles", "k_blocks", "c_blocks",
        "smem_bytes", "registers", "products", "fragment_bytes", "loads",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "rounds",
        "n_waste", "p_waste", "q_waste", "g_waste", "k_waste", "c_waste", "halo", "split_tiles",
        "split_tail", "parts", "bytes_in_flight", "log_sum_bytes", "log_load_bytes",
        "log_products", "log_estimate",
    )  # fmt: skip

    def _handles(self, problem: Problem) -> bool:
        return anywidth.handles(problem) and _elements(problem) <= common.MAX_INT

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        return (
            (w.blocks <= common.MAX_INT)
            & common.well_filled(
                _LEAST_TILE,
                (t["block_n"], problem.n),
                (t["block_p"], problem.p),
                (t["block_q"], problem.q),
            )
            & ((t["block_g"] == 1) | (t["block_g"] < 2 * problem.groups))
            # A count of splits that makes them as long as half as many does is the same launch
            # again; more blocks than keep the device busy only cost their start and end.
            & (
                (t["splits"] == 1)
                | (
                    (w.split_tiles < ceil_div(w.all_tiles, np.maximum(t["splits"] // 2, 1)))
                    & (w.split_tiles >= 2)
                    & (w.blocks <= 4 * device.sm_count)
                )
            )
            # Tensor cores round each of a chain of sums towards zero, so long chains lose digits.
            & (w.split_tiles * t["block_n"] * t["block_p"] * t["block_q"] <= _MOST_SUMMED)
            # There are blocks for a half of the device, unless so few are done soon.
            & ((2 * w.blocks >= device.sm_count) | (w.split_tiles <= 8))
            # Partial sums of more bytes than the layer would take longer than the layer.
            & (
                (t["splits"] == 1)
                | (4 * w.parts * _elements(problem) <= np.maximum(problem.minimum_bytes, 2**20))
            )
        )

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        w.p_tiles = ceil_div(problem.p, t["block_p"])
        w.q_tiles = ceil_div(problem.q, t["block_q"])
        w.all_tiles = ceil_div(problem.n, t["block_n"]) * w.p_tiles * w.q_tiles
        w.split_tiles, w.parts = common.cut(w.all_tiles, t["splits"])
        w.group_blocks = ceil_div(problem.groups, t["block_g"])
        k_blocks = ceil_div(ceil_div(problem.map(depth_of), 8), t["block_k"] // 8)
        c_blocks = ceil_div(ceil_div(problem.group_width, 8), t["block_c"] // 8)
        w.sums = w.group_blocks * k_blocks * c_blocks  # blocks that have sums of their own
        w.blocks = w.sums * w.parts
        return w

    def _shape(self, problem: Problem, table: Table) -> Any:
        rows, columns = describe_axes(problem)
        return table.kept(_shape, problem.group_width, depth_of(problem), rows, columns)

    def launch(self, problem: Problem, row: int) -> Launch:
        p, w, (rows, columns) = problem, self._one(problem, row), describe_axes(problem)
        defines = (
            *common.macros(GIN=p.group_width, GOUT=depth_of(p), R=p.r, S=p.s),
            *common.macros(DOWN_H=rows.down, DOWN_W=columns.down),
            *common.macros(STEP_H=rows.step, STEP_W=columns.step),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(threads=w.threads, smem_bytes=w.smem_bytes),
            *common.agreed_macros(k_blocks=w.k_blocks, c_blocks=w.c_blocks),
        )
        scalars = {
            **kernel_sizes(p, "n h w p q groups pad_h pad_w"),
            "in_step_h": rows.in_step,
            "in_step_w": columns.in_step,
            **common.named(w, "group_blocks p_tiles q_tiles"),
            "tiles": w.all_tiles,
            "tiles_a_split": w.split_tiles,
            "splits": w.parts,
        }
        sweep = self._step(defines, w.blocks, w.threads, w.smem_bytes, scalars)
        parts, elements = int(w.parts), _elements(p)
        if parts == 1:
            return Launch((sweep,))
        sizes = {"filter_elements": p.filter_elements, "elements": elements, "splits": parts}
        add = common.sum_step("depthwise_wgrad_sum", p, elements, _SUM_COLUMNS, 4, sizes)
        return Launch((sweep, add), scratch_bytes=4 * parts * elements)

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave
        or, in the first, of the multiprocessors with fewer blocks than others: those of device
        memory, of the copies from L2 into shared memory with their halos, and of the tensor cores;
        plus a fixed latency for each tile of a block that cannot be hidden, and the time to add the
        blocks' sums."""
        down, across = problem.map(describe_axes)
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        stretch = np.where(
            occupancy.waves <= 1,
            occupancy.sm_blocks * device.sm_count / w.blocks,
            occupancy.wave_waste,
        )
        swept = w.sums * w.all_tiles
        loaded = swept * (w.stage_bytes * 1.0)
        products = swept * w.products
        sum_bytes = np.where(w.parts == 1, 0.0, 4.0 * w.parts * _elements(problem))
        seconds = common.largest(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.l2_s(loaded, device),
            common.products_s(products, device),
            anywidth.shared_s(swept * w.fragment_bytes, device),
            problem.map(device.roofline_s),
        )
        second = common.DEPTHWISE_SECOND_KERNEL_S + 2 * sum_bytes / device.dram_bytes_per_s
        pixels = t["block_n"] * t["block_p"] * t["block_q"]
        return {
            "depth": problem.map(depth_of),
            "log_groups": np.log2(problem.groups),
            "in_vector": problem.map(lambda p: anywidth.vector_of(p.group_width)),
            "out_vector": problem.map(lambda p: anywidth.vector_of(depth_of(p))),
            "registers": registers,
            **occupancy.features(),
            "rounds": occupancy.rounds,
            "n_waste": ceil_div(problem.n, t["block_n"]) * t["block_n"] / problem.n,
            "p_waste": w.p_tiles * t["block_p"] / problem.p,
            "q_waste": w.q_tiles * t["block_q"] / problem.q,
            "g_waste": w.group_blocks * t["block_g"] / problem.groups,
            "k_waste": w.k_blocks * w.k_tiles * 16 / problem.map(depth_of),
            "c_waste": w.c_blocks * w.pieces * 8 / problem.group_width,
            "halo": w.tile_pixels / (pixels * down.down * across.down),
            # The remainder for the last split, as a fraction of a whole one.
            "split_tail": (w.all_tiles - (w.parts - 1) * w.split_tiles) / w.split_tiles,
            "bytes_in_flight": occupancy.resident * (t["stages"] - 1) * w.stage_bytes,
            "log_sum_bytes": np.log2(1 + sum_bytes),
            "log_load_bytes": np.log2(loaded / problem.minimum_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * stretch
            + common.waves_s(
                occupancy.waves, common.WAVE_AND_LAUNCH_S, w.split_tiles, common.STEP_S
            )
            + np.where(w.parts == 1, 0.0, second),
        }


def _elements(problem: Any) -> Any:
    """Return how many float32 sums a split has."""
    return problem.filter_elements + problem.k * problem.bias


def _shape(table: Table, width: int, depth: int, rows: Walk, columns: Walk) -> Workings:
    t, w, taps = table.columns, Workings(), rows.taps * columns.taps
    in_pieces, out_pieces = ceil_div(width, 8), ceil_div(depth, 8)
    groups, pixels = t["block_g"], t["block_n"] * t["block_p"] * t["block_q"]
    w.c_blocks = ceil_div(in_pieces, t["block_c"] // 8)
    w.k_blocks = ceil_div(out_pieces, t["block_k"] // 8)
    w.pieces = ceil_div(in_pieces, w.c_blocks)
    w.k_tiles = ceil_div(out_pieces, 2 * w.k_blocks)
    units = taps * w.pieces
    w.warp_tiles, w.warp_units = ceil_div(w.k_tiles, t["warps_k"]), ceil_div(units, t["warps_u"])
    w.threads = 32 * groups * t["warps_k"] * t["warps_u"]
    tile_h = rows.down * (t["block_p"] - 1) + rows.step * (rows.taps - 1) + 1
    tile_w = columns.down * (t["block_q"] - 1) + columns.step * (columns.taps - 1) + 1
    w.tile_pixels = t["block_n"] * tile_h * tile_w  # of `in`, with the halo
    in_bytes = w.tile_pixels * 16 * (groups * w.pieces | 1)
    w.stage_bytes = in_bytes + pixels * 16 * (groups * w.k_tiles * 2 | 1)
    w.smem_bytes = t["stages"] * w.stage_bytes
    in_vectors = groups * tile_w * w.pieces * (8 // anywidth.vector_of(width))  # of a row
    grad_vectors = groups * t["block_q"] * w.k_tiles * 2 * (8 // anywidth.vector_of(depth))
    rows_loaded = (tile_h * in_vectors + t["block_p"] * grad_vectors) * t["block_n"]
    w.loads = rows_loaded / w.threads  # vectors of a tile that a thread copies
    work = w.warp_tiles * w.warp_units  # tensor-core tiles of a warp
    # An estimate: accumulators, fragments, addresses.
    w.registers = 4 * work + 8 * w.warp_tiles + w.warp_units + 44
    # Tensor-core instructions of a block for a tile.
    warps = w.threads // 32
    w.products = work * warps * (pixels // 16)
    # Bytes of shared memory that its fragments are read from.
    fragments = w.warp_tiles + ceil_div(w.warp_units, 2)
    w.fragment_bytes = fragments * warps * (pixels // 16 * 512)
    w.fits = (
        anywidth.is_first(out_pieces, t["block_k"], _BLOCK_K)
        & anywidth.is_first(in_pieces, t["block_c"], _BLOCK_C)
        & ((groups == 1) | ((w.k_blocks == 1) & (w.c_blocks == 1)))
        # Groups are cut and shared by warps almost evenly.
        & (4 * (w.c_blocks * w.pieces - in_pieces) <= in_pieces)
        & ((t["warps_k"] == 1) | (t["warps_k"] * w.warp_tiles == w.k_tiles))
        & (4 * (t["warps_u"] * w.warp_units - units) <= units)
        # Sums fill a good part of the registers, as all of a block read the same pixels; few taps
        # of few channels do not, and filters of many taps leave room for few channels.
        & ((work >= 8) | (t["warps_k"] * t["warps_u"] <= 2))
        & (work <= 36)
        & ((w.threads >= 128) | (w.k_tiles * units <= 48))
        # Warps divide the longer side, so that fragments are read less often.
        & ((t["warps_k"] == 1) | (w.warp_units <= 4 * w.warp_tiles))
        & ((t["warps_u"] == 1) | (w.warp_tiles <= w.warp_units))
        & (np.maximum(in_vectors, grad_vectors) <= MOST_ROW_VECTORS)
        & (w.smem_bytes <= anywidth.MOST_THREAD_BYTES * w.threads)
        & (w.registers <= common.MOST_ESTIMATED_REGISTERS)
        & (w.registers * w.threads <= Device.regs_per_sm)
    )
    return w


_OPERANDS = ("filter_grad", "bias_grad", "out_grad", "in", "scratch")
FAMILIES = (AnyWidthWgrad("anywidth_wgrad", "wgrad", _OPERANDS),)
