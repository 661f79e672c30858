"""Depthwise convolution, gradient of the filter and of the bias: configs, legality, features and
launches of ``depthwise_wgrad.cu``. As many filters as channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import each, picked
from confpred.families.common import Occupancy
from confpred.families.depthwise import Lanes
from confpred.families.protocol import Array
from confpred.families.table import Table, Tiled, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_FIELDS = (
    "vec", "tile_q", "row_groups", "prefetch", "lanes_c", "threads", "bands", "splits",
    "reduction",
)  # fmt: skip
MAX_SUMS = 128  # of a thread: more would leave too few registers for the window


def _config_table() -> NDArray[np.void]:
    reductions = depthwise.reductions((4, 8, 16, 32, 64, 128, 256))
    rows = crossed(
        (1, 2, 4),
        (4, 8),
        (1, 2, 4),
        (1, 2, 4),
        (depthwise.LEAST_LANES, 32),
        (128, 256),
        (1, 4, 16),
        reductions,
    )
    vec, _, row_groups, prefetch = rows.T[:4]
    # Loading so far ahead pays for few taps, dividing filter rows among threads for many: no window
    # has both.
    kept = (np.minimum(row_groups, prefetch) == 1) | (50 // prefetch * vec > 16 * row_groups)
    return config_table(_FIELDS, rows[kept])


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles, resources and work of some configs on one problem; arrays over these configs."""

    block_r: Array
    row_groups: Array  # groups of filter rows, without empty ones
    in_x: Array  # input columns of a tile
    depth: Array  # output rows of the window
    sums: Array  # of a thread
    thread_floats: Array  # of shared memory: the sums that a thread leaves there at a time
    registers: Array  # an estimate
    smem_bytes: Array
    lanes: Lanes
    band_rows: Array
    bands: Array
    q_tiles: Array
    tiles: Array  # tiles of each channel
    blocks: Array
    work: Array  # instructions that a thread issues in one step


_CONFIGS = _config_table()
_WHOLE = Table.of(_CONFIGS)


class DepthwiseWgrad(Tiled):
    """``kernels/depthwise_wgrad.cu``."""

    configs = _CONFIGS
    whole = _WHOLE
    kernel_fields = ("vec", "tile_q", "row_groups", "prefetch")  # the kernel: rows of a group
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "stride_h", "stride_w",
        "dilation_h", "dilation_w", "itemsize", "log_bytes", "log_intensity", "bias",
        *_FIELDS,
        "lanes", "c_tiles", "tiles_at_once", "block_threads", "block_r", "in_x", "sums",
        "registers", "smem_bytes", "blocks_per_sm", "warps_per_sm", "log_blocks", "waves",
        "wave_waste", "q_waste", "band_rows", "bands_cut", "halo_rows", "halo_columns",
        "rounds", "round_waste", "steps", "run_bytes", "pixel_alignment", "bytes_in_flight",
        "work", "log_work", "log_load_bytes", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def _handles(self, problem: Problem) -> bool:
        return (
            problem.k == problem.c
            and depthwise.handles(problem)
            and problem.filter_elements + problem.c <= common.MAX_INT
        )

    def _first(self, problem: Any, device: Device, table: Table) -> NDArray[np.bool_]:
        taps = problem.r * problem.s
        return (
            table.by(
                ("vec", "lanes_c"),
                lambda t: (
                    depthwise.accessible(t["vec"], problem)
                    & depthwise.distinct_lanes(problem.c // t["vec"], t["lanes_c"])
                ),
            )
            & table.by(
                ("tile_q", "prefetch"),
                lambda t: (
                    depthwise.worth_loading_ahead(t["prefetch"], taps)
                    & ((t["tile_q"] < 2 * problem.q) | (t["tile_q"] == 4))
                ),
            )
            & table.by(("bands",), lambda t: common.distinct_bands(problem.p, t["bands"]))
            & table.by(("reduction",), lambda t: common.allowed(t["reduction"], problem))
        )

    def _tiled_rules(
        self, problem: Any, device: Device, t: Mapping[str, Array], tiling: _Tiling
    ) -> NDArray[np.bool_]:
        vec, splits, lanes = t["vec"], t["splits"], tiling.lanes
        # Filter rows of a thread if half as many threads shared a window.
        half = common.ceil_div(problem.r, np.maximum(t["row_groups"] // 2, 1))
        return (
            (tiling.in_x <= depthwise.MAX_COLUMNS)
            & (tiling.sums <= MAX_SUMS)
            # Each group of filter rows reads the whole input again, which pays for large windows
            # only.
            & (
                (t["row_groups"] == 1)
                | ((half * problem.s * vec > 32) & (tiling.row_groups == t["row_groups"]))
            )
            & (tiling.registers <= common.MOST_ESTIMATED_REGISTERS)
            & (tiling.smem_bytes <= device.smem_per_block)
            & (lanes.lanes_c * tiling.row_groups <= t["threads"])
            & (np.maximum(tiling.blocks, tiling.tiles + splits * t["threads"]) <= common.MAX_INT)
            # There are blocks enough for half of the device, and no more than sixteen to a
            # multiprocessor, as far as there are tiles for their threads.
            & (
                (splits == 1)
                | (
                    (splits * lanes.tiles_at_once < 2 * tiling.tiles)
                    & (tiling.blocks <= 16 * device.sm_count)
                )
            )
            & (
                (2 * tiling.blocks >= device.sm_count)
                | (2 * splits * lanes.tiles_at_once >= tiling.tiles)
            )
        )

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, tiling = problem, self.configs[row], picked(self._cut_for(problem, row), 0)
        lanes, splits, reduction = tiling.lanes, int(t["splits"]), int(t["reduction"])
        dilation_h, dilation_w = depthwise.dilation(p)
        defines = (
            ("R", p.r),
            ("S", p.s),
            ("STRIDE_H", p.stride[0]),
            ("STRIDE_W", p.stride[1]),
            ("DILATION_H", dilation_h),
            ("DILATION_W", dilation_w),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(t, ("vec", "tile_q")),
            ("BLOCK_R", int(tiling.block_r)),
            *common.config_macros(t, ("prefetch",)),
            *common.agreed_macros(
                max_threads=depthwise.MAX_THREADS,
                **common.named(tiling, "row_groups in_x depth thread_floats"),
            ),
        )
        scalars = {
            **kernel_sizes(p, "n c h w p q pad_h pad_w"),
            **common.named(tiling, "band_rows bands q_tiles"),
            **common.named(lanes, "c_tiles lanes_c tiles_at_once"),
            "splits": splits,
            "reduction": reduction,
        }
        threads, smem_bytes = lanes.threads, tiling.smem_bytes
        step = common.kernel_step(
            "depthwise_wgrad", defines, tiling.blocks, threads, smem_bytes, self.operands, scalars
        )
        return depthwise.with_sums(step, p, splits, reduction, int(lanes.c_tiles))

    def _tiling(self, problem: Any, t: Mapping[str, Array]) -> _Tiling:
        vec, tile_q, (stride_h, stride_w) = t["vec"], t["tile_q"], problem.stride
        dilation_h, dilation_w = each(depthwise.dilation, problem)
        block_r = common.ceil_div(problem.r, t["row_groups"])
        row_groups = common.ceil_div(problem.r, block_r)
        depth = dilation_h * (block_r - 1) // stride_h + 1
        in_x = stride_w * (tile_q - 1) + dilation_w * (problem.s - 1) + 1
        sums = block_r * problem.s * vec
        thread_floats = problem.s * vec
        lanes = Lanes.of(problem.c // vec, t["lanes_c"], t["threads"], row_groups)
        band_rows, bands = common.cut(problem.p, t["bands"])
        q_tiles = common.ceil_div(problem.q, tile_q)
        inputs, outputs = stride_h * in_x * vec, tile_q * vec
        packed = problem.itemsize / 4
        registers = (
            sums
            + depth * outputs
            + inputs
            + (inputs + outputs) * packed * t["prefetch"]
            + problem.bias * vec
            + 32
        ).astype(np.int64)
        # The terms are products, conversions, the window's slide, addresses, and the rest.
        work = sums * tile_q + inputs + 2 * outputs + 4 * (stride_h * in_x + tile_q) + 30
        return _Tiling(
            block_r=block_r,
            row_groups=row_groups,
            in_x=in_x,
            depth=depth,
            sums=sums,
            thread_floats=thread_floats,
            registers=registers,
            smem_bytes=thread_floats * lanes.threads * 4,
            lanes=lanes,
            band_rows=band_rows,
            bands=bands,
            q_tiles=q_tiles,
            tiles=problem.n * bands * q_tiles,
            blocks=lanes.c_tiles * t["splits"],
            work=work,
        )

    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], workings: _Tiling
    ) -> dict[str, NDArray[np.float64]]:
        """Estimate seconds as the larger of the times of device memory and of the instructions,
        stretched by the waste of the last wave and of the threads' last tile; plus a fixed latency
        for each row that cannot be hidden, and the time of the reduction."""
        tiling = workings
        lanes = tiling.lanes
        registers = np.minimum(tiling.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, tiling.blocks, lanes.threads, registers, tiling.smem_bytes)
        ideal_rounds = tiling.tiles / (t["splits"] * lanes.tiles_at_once)
        rounds = np.ceil(ideal_rounds)
        steps = tiling.band_rows + tiling.depth - 1
        pixels = problem.stride[0] * tiling.in_x + t["tile_q"]
        load_bytes = pixels * t["vec"] * problem.itemsize
        threads = tiling.blocks * lanes.threads
        instructions = threads * rounds * steps * tiling.work
        seconds = np.maximum(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.instructions_s(instructions, device, issued=1.0),
        )
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        return {
            **lanes.features(),
            **common.named(tiling, "block_r in_x sums registers smem_bytes band_rows"),
            **occupancy.features(),
            "q_waste": tiling.q_tiles * t["tile_q"] / problem.q,
            "bands_cut": tiling.bands,
            "halo_rows": steps / tiling.band_rows,
            "halo_columns": tiling.in_x / (problem.stride[1] * t["tile_q"]),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "run_bytes": lanes.lanes_c * t["vec"] * problem.itemsize,
            "bytes_in_flight": occupancy.resident * lanes.threads * load_bytes * t["prefetch"],
            "work": tiling.work / (t["tile_q"] * t["vec"]),
            "log_work": np.log2(instructions),
            "log_load_bytes": np.log2(
                threads * rounds * steps * load_bytes / problem.minimum_bytes
            ),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(
                occupancy.waves,
                common.WAVE_AND_LAUNCH_S,
                rounds * steps,
                common.DEPTHWISE_WGRAD_STEP_S,
            )
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (DepthwiseWgrad("depthwise_wgrad", "wgrad", depthwise.WGRAD_OPERANDS),)
