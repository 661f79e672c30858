"""Depthwise convolution, gradient of the filter and of the bias: configs, legality, features and
launches of ``depthwise_wgrad.cu``. As many filters as channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Table, Tabled, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_FIELDS = (
    "vec", "tile_q", "row_groups", "prefetch", "lanes_c", "threads", "bands", "splits",
    "reduction",
)  # fmt: skip
MAX_SUMS = 128  # of a thread: more would leave too few registers for the sliding window


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
    # Loading so far ahead pays for few taps, dividing filter rows among threads for many: no filter
    # has both.
    kept = (np.minimum(row_groups, prefetch) == 1) | (50 // prefetch * vec > 16 * row_groups)
    return config_table(_FIELDS, rows[kept])


class DepthwiseWgrad(Tabled):
    """``kernels/depthwise_wgrad.cu``."""

    configs = _config_table()
    kernel = "depthwise_wgrad"
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

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
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

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        vec = t["vec"]
        # Filter rows of a thread if half as many threads shared a filter.
        half = ceil_div(problem.r, np.maximum(t["row_groups"] // 2, 1))
        return (
            (w.in_x <= depthwise.MAX_COLUMNS)
            & (w.sums <= MAX_SUMS)
            # Each group of filter rows reads the whole input again, which pays for large filters
            # only.
            & (
                (t["row_groups"] == 1)
                | ((half * problem.s * vec > 32) & (w.row_groups == t["row_groups"]))
            )
            & (w.registers <= common.MOST_ESTIMATED_REGISTERS)
            & (w.smem_bytes <= device.smem_per_block)
            & (w.lanes * w.row_groups <= t["threads"])
            & depthwise.worth_sharing(t, w, device)
        )

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, w = problem, self.configs[row], self._one(problem, row)
        splits, reduction = int(t["splits"]), int(t["reduction"])
        dilation_h, dilation_w = depthwise.dilation(p)
        defines = (
            *macros(R=p.r, S=p.s, STRIDE_H=p.stride[0], STRIDE_W=p.stride[1]),
            *macros(DILATION_H=dilation_h, DILATION_W=dilation_w),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(t, ("vec", "tile_q")),
            ("BLOCK_R", int(w.block_r)),
            *common.config_macros(t, ("prefetch",)),
            *common.agreed_macros(
                max_threads=depthwise.MAX_THREADS,
                **common.named(w, "row_groups in_x depth thread_floats"),
            ),
        )
        scalars = {
            **kernel_sizes(p, "n c h w p q pad_h pad_w"),
            **common.named(w, "band_rows bands q_tiles"),
            **depthwise.lane_scalars(w),
            "splits": splits,
            "reduction": reduction,
        }
        step = self._step(defines, w.blocks, w.block_threads, w.smem_bytes, scalars)
        return depthwise.with_sums(step, p, splits, reduction, int(w.c_tiles))

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        vec, tile_q, (stride_h, stride_w) = t["vec"], t["tile_q"], problem.stride
        dilation_h, dilation_w = problem.map(depthwise.dilation)
        w.block_r = ceil_div(problem.r, t["row_groups"])
        w.row_groups = ceil_div(problem.r, w.block_r)  # without empty ones
        w.depth = dilation_h * (w.block_r - 1) // stride_h + 1  # output rows of the sliding window
        w.in_x = stride_w * (tile_q - 1) + dilation_w * (problem.s - 1) + 1  # of a tile
        w.sums = w.block_r * problem.s * vec  # of a thread
        w.thread_floats = problem.s * vec  # the sums that it leaves in shared memory at a time
        lanes_c, threads = t["lanes_c"], t["threads"]
        depthwise.share_lanes(w, problem.c // vec, lanes_c, threads, w.row_groups)
        w.smem_bytes = w.thread_floats * w.block_threads * 4
        w.band_rows, w.bands = common.cut(problem.p, t["bands"])
        w.q_tiles = ceil_div(problem.q, tile_q)
        w.tiles = problem.n * w.bands * w.q_tiles  # of each channel
        w.blocks = w.c_tiles * t["splits"]
        inputs, outputs = stride_h * w.in_x * vec, tile_q * vec
        packed = problem.itemsize / 4
        w.registers = (  # an estimate
            w.sums
            + w.depth * outputs
            + inputs
            + (inputs + outputs) * packed * t["prefetch"]
            + problem.bias * vec
            + 32
        ).astype(np.int64)
        # Instructions that a thread issues in one step: products, conversions, the filter's slide,
        # addresses, and others.
        w.thread_step = (
            w.sums * tile_q + inputs + 2 * outputs + 4 * (stride_h * w.in_x + tile_q) + 30
        )
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the larger of the times of device memory and of the instructions,
        stretched by the waste of the last wave and of the threads' last tile; plus a fixed latency
        for each row that cannot be hidden, and the time of the reduction."""
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.block_threads, registers, w.smem_bytes)
        ideal_rounds = w.tiles / (t["splits"] * w.tiles_at_once)
        rounds = np.ceil(ideal_rounds)
        steps = w.band_rows + w.depth - 1
        pixels = problem.stride[0] * w.in_x + t["tile_q"]
        load_bytes = pixels * t["vec"] * problem.itemsize
        threads = w.blocks * w.block_threads
        instructions = threads * rounds * steps * w.thread_step
        seconds = np.maximum(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.instructions_s(instructions, device, issued=1.0),
        )
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        step_s = common.DEPTHWISE_WGRAD_STEP_S
        return {
            **occupancy.features(),
            "q_waste": w.q_tiles * t["tile_q"] / problem.q,
            "bands_cut": w.bands,
            "halo_rows": steps / w.band_rows,
            "halo_columns": w.in_x / (problem.stride[1] * t["tile_q"]),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "run_bytes": w.lanes * t["vec"] * problem.itemsize,
            "bytes_in_flight": occupancy.resident * w.block_threads * load_bytes * t["prefetch"],
            "work": w.thread_step / (t["tile_q"] * t["vec"]),
            "log_work": np.log2(instructions),
            "log_load_bytes": np.log2(
                threads * rounds * steps * load_bytes / problem.minimum_bytes
            ),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(occupancy.waves, common.WAVE_AND_LAUNCH_S, rounds * steps, step_s)
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (DepthwiseWgrad("depthwise_wgrad", "wgrad", depthwise.WGRAD_OPERANDS),)
