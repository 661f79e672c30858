"""Depthwise convolution, gradients of the input and of the filter in one pass: configs, legality,
features and launches of ``depthwise_both.cu``. As many filters as channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div, macros
from confpred.families.protocol import Array
from confpred.families.table import Table, Tabled, config_table, crossed
from confpred.problem.conv2d import Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.gradients import GRADIENTS
from confpred.problem.operation import Launch

_COMPILED = ("vec", "tile_w", "window", "filter_shared", "prefetch", "min_blocks")
_FIELDS = (*_COMPILED, "lanes_c", "threads", "bands", "splits", "reduction")
#: How the window of the output's gradient slides and what it keeps, as the kernel numbers it.
TURNED, MOVED, PACKED = range(3)
MAX_SUMS = 128  # of a thread: more would leave too few registers for the window
#: By the blocks that a multiprocessor must hold: registers of a thread for that, and the estimates
#: between which such a bound changes the kernel and hardly makes it spill.
_BOUNDS = np.array((common.MAX_REGISTERS, common.MAX_REGISTERS, 128, 80))
_LEAST, _MOST = np.array((0, 0, 112, 96)), np.array((0, common.MOST_ESTIMATED_REGISTERS, 148, 116))


def _config_table() -> NDArray[np.void]:
    reductions = depthwise.reductions((8, 16, 32, 64, 128, 256))
    rows = crossed(
        (1, 2, 4),
        (2, 4, 8),
        (TURNED, MOVED, PACKED),
        (0, 1),
        (1, 2),
        (1, 2, 3),
        (depthwise.LEAST_LANES, 32),
        (128, 256),
        (1, 4, 16),
        reductions,
    )
    vec, tile_w, window, filter_shared, prefetch, min_blocks = rows.T[:6]
    # A turn of two steps each is too long a loop; packed rows are for windows that leave no room
    # for the filter; and three blocks fit where a thread has few pixels.
    kept = (window != TURNED) | (prefetch == 1)
    kept &= (window != PACKED) | (filter_shared == 1)
    kept &= (min_blocks < 3) | (vec * tile_w <= 4)
    return config_table(_FIELDS, rows[kept & (vec * tile_w <= 16)])


_CONFIGS = _config_table()


def _starts(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how far above and left of the image the first group of rows and of columns begins, and
    the newest row and column of the output's gradient that it meets."""
    pairs = zip(problem.padding, problem.stride, strict=True)
    (origin_h, shift_h), (origin_w, shift_w) = (divmod(pad, stride) for pad, stride in pairs)
    return (shift_h, shift_w), (origin_h, origin_w)


def _groups(problem: Problem) -> int:
    """Return into how many groups of `stride` rows the input is cut."""
    found: int = ceil_div(problem.h + problem.padding[0] % problem.stride[0], problem.stride[0])
    return found


class DepthwiseBoth(Tabled):
    """``kernels/depthwise_both.cu``."""

    operation = GRADIENTS
    configs = _CONFIGS
    whole = Table.of(_CONFIGS)
    kernel = "depthwise_both"
    kernel_fields = _COMPILED
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "stride_h", "stride_w",
        "dilation_h", "dilation_w", "itemsize", "log_bytes", "log_intensity", "bias",
        *_FIELDS,
        "lanes", "c_tiles", "tiles_at_once", "block_threads", "out_x", "sums", "registers",
        "smem_bytes", "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste",
        "w_waste", "band_groups", "bands_cut", "halo_rows", "halo_columns", "rounds",
        "round_waste", "steps", "run_bytes", "pixel_alignment", "bytes_in_flight", "work",
        "log_work", "log_load_bytes", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def _handles(self, problem: Problem) -> bool:
        dilation, taps = depthwise.dilation(problem), (problem.r, problem.s)
        window = zip(problem.padding, dilation, taps, strict=True)
        return (
            problem.k == problem.c
            and depthwise.handles(problem)
            and problem.filter_elements + problem.c <= common.MAX_INT
            # Beyond, no input pixel meets the first pixels of the output, which the bias needs.
            and (not problem.bias or all(pad <= step * (n - 1) for pad, step, n in window))
        )

    def _first(self, problem: Any, device: Device, table: Table) -> NDArray[np.bool_]:
        taps, stride_w = problem.r * problem.s, problem.stride[1]
        groups = problem.each(_groups)
        return (
            table.by(
                ("vec", "filter_shared", "window", "lanes_c"),
                lambda t: (
                    depthwise.accessible(t["vec"], problem)
                    & depthwise.distinct_lanes(problem.c // t["vec"], t["lanes_c"])
                    # Registers hold small filters at no cost; large ones need shared memory.
                    & np.where(t["filter_shared"], taps * t["vec"] >= 18, taps * t["vec"] <= 50)
                    # Elements of 32 bits take as much room as floats.
                    & ((t["window"] != PACKED) | ((problem.itemsize < 4) & (t["vec"] > 1)))
                ),
            )
            & table.by(
                ("tile_w", "prefetch"),
                lambda t: (
                    depthwise.worth_loading_ahead(t["prefetch"], taps)
                    & (t["tile_w"] % stride_w == 0)
                    & ((t["tile_w"] < 2 * problem.w) | (t["tile_w"] == 2))
                ),
            )
            & table.by(("bands",), lambda t: common.distinct_bands(groups, t["bands"]))
            & table.by(("reduction",), lambda t: common.allowed(t["reduction"], problem))
        )

    def _rules(
        self, problem: Any, device: Device, t: Mapping[str, Array], w: Any
    ) -> NDArray[np.bool_]:
        return (
            (w.out_x <= depthwise.MAX_COLUMNS)
            & (w.sums <= MAX_SUMS)
            & (w.registers > _LEAST[t["min_blocks"]])
            & (w.registers <= _MOST[t["min_blocks"]])
            & (w.smem_bytes <= device.smem_per_block)
            & (w.lanes <= t["threads"])
            & depthwise.worth_sharing(t, w, device)
        )

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, w = problem, self.configs[row], self._one(problem, row)
        splits, reduction = int(t["splits"]), int(t["reduction"])
        dilation_h, dilation_w = depthwise.dilation(p)
        (shift_h, shift_w), (origin_h, origin_w) = _starts(p)
        defines = (
            *macros(R=p.r, S=p.s, STRIDE_H=p.stride[0], STRIDE_W=p.stride[1]),
            *macros(DILATION_H=dilation_h, DILATION_W=dilation_w),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(t, _COMPILED),
            *common.agreed_macros(
                max_threads=depthwise.MAX_THREADS,
                filter_pitch=w.pitch,
                **common.named(w, "out_x depth thread_floats"),
            ),
        )
        scalars = {
            **kernel_sizes(p, "n c h w p q"),
            "origin_h": origin_h,
            "origin_w": origin_w,
            "shift_h": shift_h,
            "shift_w": shift_w,
            **common.named(w, "band_groups bands w_tiles"),
            **depthwise.lane_scalars(w),
            "splits": splits,
            "reduction": reduction,
        }
        step = self._step(defines, w.blocks, w.block_threads, w.smem_bytes, scalars)
        return depthwise.with_sums(step, p, splits, reduction, int(w.c_tiles))

    def _cut(self, problem: Any, t: Mapping[str, Array]) -> Workings:
        w: Any = Workings()
        vec, tile_w, (stride_h, stride_w) = t["vec"], t["tile_w"], problem.stride
        dilation_h, dilation_w = problem.each(depthwise.dilation)
        (_, shift_w), _ = problem.each(_starts)
        taps = problem.r * problem.s
        w.depth = dilation_h * (problem.r - 1) // stride_h + 1  # output rows of the window
        w.out_x = (tile_w - 1) // stride_w + 1 + dilation_w * (problem.s - 1) // stride_w
        w.sums = taps * vec  # of a thread
        w.thread_floats = problem.s * vec  # the sums that it leaves in shared memory at a time
        access = np.minimum(vec, 4)
        w.pitch = (taps * vec // access | 1) * access  # floats that the filters of a lane take
        depthwise.share_lanes(w, problem.c // vec, t["lanes_c"], t["threads"])
        w.smem_bytes = 4 * np.maximum(w.lanes * w.pitch, w.thread_floats * w.block_threads)
        w.band_groups, w.bands = common.cut(problem.each(_groups), t["bands"])
        w.w_tiles = ceil_div(problem.w + shift_w, tile_w)
        w.tiles = problem.n * w.bands * w.w_tiles  # of each channel
        w.blocks = w.c_tiles * t["splits"]
        ins, outs = stride_h * tile_w * vec, w.out_x * vec
        share = problem.itemsize / 4
        ahead = share * t["prefetch"]
        kept = np.where(t["window"] == TURNED, 1.5, 1.2)
        kept = np.where(t["window"] == PACKED, 2.8 * share, kept)
        w.registers = (  # fitted to what the assembler reports of 200 kernels
            w.sums * np.where(t["filter_shared"], 1.5, 2.1)
            + (kept * w.depth + 1.3 * ahead) * outs
            + 1.9 * ahead * ins
            + problem.bias * vec
            + 48
        ).astype(np.int64)
        # Instructions that a thread issues in one step: products, conversions, loads of the
        # filter, the window's slide, addresses, stores, and the rest.
        w.thread_step = (
            2 * w.sums * tile_w // stride_w
            + np.where(t["window"] == PACKED, problem.r, 1) * outs
            + 2 * ins
            + t["filter_shared"] * taps
            + 4 * (2 * stride_h * tile_w + w.out_x)
            + 30
        )
        return w

    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], w: Any
    ) -> dict[str, NDArray[np.float64]]:
        """Estimate seconds as that of `DepthwiseWgrad`: the larger of the times of device memory
        and of the instructions, stretched by the waste of the last wave; plus a fixed latency for
        each row that cannot be hidden, and the time of the reduction."""
        registers = np.minimum(w.registers, _BOUNDS[t["min_blocks"]])
        occupancy = Occupancy.of(device, w.blocks, w.block_threads, registers, w.smem_bytes)
        ideal_rounds = w.tiles / (t["splits"] * w.tiles_at_once)
        rounds = np.ceil(ideal_rounds)
        steps = w.band_groups + 1  # the rows above the first are loaded at once
        step_bytes = (problem.stride[0] * t["tile_w"] + w.out_x) * t["vec"] * problem.itemsize
        threads = w.blocks * w.block_threads
        instructions = threads * rounds * steps * w.thread_step
        seconds = np.maximum(
            problem.minimum_bytes / device.dram_bytes_per_s,
            common.instructions_s(instructions, device, issued=1.0),
        )
        loaded = threads * rounds * (w.band_groups + w.depth - 1) * step_bytes
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        step_s = common.DEPTHWISE_WGRAD_STEP_S
        return {
            **occupancy.features(),
            "w_waste": w.w_tiles * t["tile_w"] / problem.w,
            "bands_cut": w.bands,
            "halo_rows": (w.band_groups + w.depth - 1) / w.band_groups,
            "halo_columns": w.out_x * problem.stride[1] / t["tile_w"],
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "run_bytes": w.lanes * t["vec"] * problem.itemsize,
            "bytes_in_flight": occupancy.resident * w.block_threads * step_bytes * t["prefetch"],
            "work": w.thread_step / (problem.stride[0] * t["tile_w"] * t["vec"]),
            "log_work": np.log2(instructions),
            "log_load_bytes": np.log2(loaded / problem.minimum_bytes),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(occupancy.waves, common.WAVE_AND_LAUNCH_S, rounds * steps, step_s)
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (DepthwiseBoth("depthwise_both", "both", depthwise.BOTH_OPERANDS),)
