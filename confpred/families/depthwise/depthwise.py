"""The depthwise families whose result is an image: configs, legality, features and launches of
``depthwise.cu``, for the forward direction and for the gradient of the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.depthwise import DepthwiseAxis
from confpred.families.protocol import Columns, Floats, Mask
from confpred.families.table import Table, Tabled, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_COMPILED = ("vec", "tile_q", "filter_shared", "min_blocks", "prefetch")
_FIELDS = (*_COMPILED, "lanes_c", "threads", "bands")


def _config_table() -> NDArray[np.void]:
    rows = crossed(
        (1, 2, 4),
        (2, 4, 7, 8),
        (0, 1),
        (1, 2),
        (1, 2, 4),
        (depthwise.LEAST_LANES, 32, 64),
        (128, 256),
        (1, 2, 4, 8, 16),
    )
    vec, _, filter_shared, _, prefetch = rows.T[:5]
    # Sharing pays from 24 taps on, loading so far ahead up to 12: no filter has both.
    kept = (vec != 1) | (filter_shared != 1) | (prefetch != 4)
    return config_table(_FIELDS, rows[kept])


_SHARED = (
    "log_n", "log_k", "log_p", "log_q", "r", "s", "stride_h", "stride_w",
    "dilation_h", "dilation_w", "itemsize", "log_bytes", "log_intensity",
    *_FIELDS,
    "lanes", "c_tiles", "tiles_at_once", "block_threads", "in_x", "registers", "smem_bytes",
    "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste",
    "band_groups", "bands_cut", "row_tail", "halo_rows", "halo_columns", "steps",
    "lane_waste", "run_bytes", "pixel_alignment", "bytes_in_flight", "work", "log_work",
    "log_load_bytes", "log_estimate",
)  # fmt: skip


def _describe_axes(problem: Problem) -> tuple[DepthwiseAxis, DepthwiseAxis]:
    """Return the vertical axis and the horizontal one."""
    p, (tall, wide) = problem, depthwise.dilation(problem)
    return (
        DepthwiseAxis.of(p.direction, p.h, p.p, p.r, p.stride[0], p.padding[0], tall),
        DepthwiseAxis.of(p.direction, p.w, p.q, p.s, p.stride[1], p.padding[1], wide),
    )


class DepthwiseImage(Tabled):
    """One direction of ``kernels/depthwise.cu``."""

    configs = _config_table()
    kernel = "depthwise"
    kernel_fields = _COMPILED
    shared_features = _SHARED

    def _handles(self, problem: Problem) -> bool:
        return depthwise.handles(problem) and (self.direction == "fprop" or problem.k <= problem.c)

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        vertical, horizontal = problem.map(_describe_axes)
        taps, width = problem.r * problem.s, horizontal.size_out
        return (
            table.by(
                ("vec", "filter_shared", "lanes_c"),
                lambda t: (
                    depthwise.accessible(t["vec"], problem)
                    & depthwise.distinct_lanes(problem.k // t["vec"], t["lanes_c"])
                    # Shared memory pays from 24 elements of a thread's filter on, and registers do
                    # not hold more than 100.
                    & np.where(t["filter_shared"], taps * t["vec"] >= 24, taps * t["vec"] <= 100)
                ),
            )
            & table.by(
                ("tile_q", "prefetch"),
                lambda t: (
                    depthwise.worth_loading_ahead(t["prefetch"], taps)
                    # Each input column of a gradient feeds `up` outputs, which one tile computes.
                    & (t["tile_q"] % horizontal.up == 0)
                    # A tile twice as wide as the image does the work of a smaller one, slower; the
                    # narrowest tile has 2 columns.
                    & ((t["tile_q"] < 2 * width) | (t["tile_q"] == 2))
                ),
            )
            & table.by(("bands",), lambda t: common.distinct_bands(vertical.groups, t["bands"]))
        )

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        return (
            (w.in_x <= depthwise.MAX_COLUMNS)
            & (w.registers <= common.MOST_ESTIMATED_REGISTERS)
            # Bounding the registers so that two blocks fit changes nothing where a thread needs
            # few, and makes it spill where it needs many.
            & ((t["min_blocks"] == 1) | ((w.registers > 100) & (w.registers <= 132)))
            & (w.smem_bytes <= device.smem_per_block)
            & (np.maximum(w.blocks, w.blocks * w.tiles_at_once) <= common.MAX_INT)
        )

    def launch(self, problem: Problem, row: int) -> Launch:
        p, w = problem, self._one(problem, row)
        down, across = _describe_axes(p)
        defines = (
            *macros(R=p.r, S=p.s, UP_H=down.up, UP_W=across.up, DOWN_H=down.down),
            *macros(DOWN_W=across.down, DILATION_H=down.dilation, DILATION_W=across.dilation),
            ("FLIP", int(self.direction == "dgrad")),
            dtype_macro(p),
            *common.epilogue_macros(p),
            ("REPEAT", int(w.repeat)),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(max_threads=depthwise.MAX_THREADS, in_x=w.in_x, depth=w.depth),
            *common.agreed_macros(filter_pitch=w.pitch),
        )
        scalars = {
            "n": p.n,
            "k": p.k,
            "multiplier": p.k // p.c,
            **common.image_scalars(p),
            "origin_h": down.origin,
            "origin_w": across.origin,
            "shift_h": down.shift,
            "shift_w": across.shift,
            **common.named(w, "band_groups bands q_tiles"),
            **depthwise.lane_scalars(w),
        }
        return Launch((self._step(defines, w.blocks, w.block_threads, w.smem_bytes, scalars),))

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        down, across = problem.map(_describe_axes)
        vec, tile_q = t["vec"], t["tile_q"]
        w.repeat = np.minimum(vec, problem.k // problem.c)
        taps = problem.r * problem.s
        # Groups of accumulators.
        reach = down.dilation * (down.window - 1) + (down.up - 1) * down.down
        w.depth = reach // (down.up * down.down) + 1
        width = across.down * (tile_q - 1) + across.dilation * (across.window - 1)
        w.in_x = width // across.up + 1  # input columns of a tile
        access = np.minimum(vec, 4)
        w.pitch = (taps * vec // access | 1) * access  # floats that the filters of a lane take
        depthwise.share_lanes(w, ceil_div(problem.k, vec), t["lanes_c"], t["threads"])
        w.smem_bytes = w.lanes * w.pitch * 4
        w.band_groups, w.bands = common.cut(down.groups, t["bands"])
        w.q_tiles = ceil_div(across.size_out + across.shift, tile_q)
        tiles = problem.n * w.bands * w.q_tiles
        w.blocks = ceil_div(tiles, w.tiles_at_once) * w.c_tiles
        outputs = down.up * tile_q * vec
        inputs = down.down * w.in_x * vec // w.repeat
        packed = problem.itemsize / 4
        w.registers = (  # an estimate
            w.depth * outputs
            + inputs * (1 + packed * t["prefetch"])
            # Unrolled steps share what they read of the filter, so that it stays in registers.
            + np.where(t["filter_shared"] & (t["prefetch"] == 1), 4, taps) * vec
            + outputs * packed * problem.residual
            + 28
        ).astype(np.int64)
        # Instructions that a thread issues in one step: products, conversions, addresses, loads of
        # the filter, stores, and others.
        w.thread_step = (
            taps * outputs // (down.up * across.up)
            + inputs
            + 4 * down.down * w.in_x
            + t["filter_shared"] * taps * ceil_div(vec, 4)
            + 2 * outputs
            + 30
        )
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the larger of two times, plus a latency for each wave and step: the
        time of device memory, whose rate is bounded where too little is in flight, and the time of
        the instructions of the multiprocessor with the most blocks."""
        down, across = problem.map(_describe_axes)
        bound = np.where(t["min_blocks"] == 2, 128, common.MAX_REGISTERS)
        registers = np.minimum(w.registers, bound)
        occupancy = Occupancy.of(device, w.blocks, w.block_threads, registers, w.smem_bytes)
        steps = w.band_groups + w.depth - 1
        load_bytes = down.down * w.in_x * (t["vec"] // w.repeat) * problem.itemsize
        threads = w.blocks * w.block_threads
        in_flight = occupancy.resident * w.block_threads * load_bytes * t["prefetch"]
        # Steps whose input rows are padding only finish output rows.
        computed = np.minimum(steps, ceil_div(down.size_in, down.down))
        thread_work = computed * w.thread_step + (steps - computed) * 0.25 * w.thread_step
        thread_work += common.BLOCK_INSTRUCTIONS
        fullest = occupancy.sm_blocks * device.sm_count * w.block_threads
        seconds = np.maximum(
            common.memory_s(problem.minimum_bytes, device, in_flight),
            common.instructions_s(fullest * thread_work, device),
        )
        last_band = down.groups - (w.bands - 1) * w.band_groups
        return {
            **occupancy.features(),
            "q_waste": w.q_tiles * t["tile_q"] / across.size_out,
            "bands_cut": w.bands,
            "row_tail": last_band / w.band_groups,
            "halo_rows": steps / w.band_groups,
            "halo_columns": w.in_x * across.up / (across.down * t["tile_q"]),
            "steps": steps,
            "lane_waste": w.block_threads / (w.lanes * w.tiles_at_once),
            "run_bytes": w.lanes * t["vec"] * problem.itemsize,
            "bytes_in_flight": in_flight,
            "work": w.thread_step / (down.up * t["tile_q"] * t["vec"]),
            "log_work": np.log2(threads * thread_work),
            "log_load_bytes": np.log2(threads * steps * load_bytes / problem.minimum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, steps, common.DEPTHWISE_STEP_S),
        }


_EPILOGUE = ("multiplier", "bias", "residual", "activation")
FAMILIES = (
    DepthwiseImage("depthwise_fprop", "fprop", depthwise.FPROP_OPERANDS, _EPILOGUE),
    DepthwiseImage("depthwise_dgrad", "dgrad", depthwise.DGRAD_OPERANDS),
)
