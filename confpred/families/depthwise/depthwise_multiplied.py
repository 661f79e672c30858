"""Gradients of depthwise convolution with a channel multiplier, as of layers that double the
channels: configs, legality, features and launches of ``depthwise_multiplied.cu`` and
``depthwise_multiplied_wgrad.cu``.

They serve layers of group width 1 with 2 to 8 times as many filters as channels, filters up to
11x11, stride 1 or 2 along each axis, any padding, and any of the dtypes; the ordinary depthwise
family has the forward direction.
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

MAX_MULTIPLIER = 8
_MOST_SUMS = 56  # of a thread, beside as many elements of the input
_IMAGE_FIELDS = ("vec", "lanes_c", "threads", "rounds")
_SUM_FIELDS = ("vec", "lanes_c", "threads", "splits", "reduction")


def _sum_table() -> NDArray[np.void]:
    splits = (4, 8, 16, 32, 64, 128, 256)
    added = [pair for pair in depthwise.reductions(splits) if pair[1] != common.ATOMIC]
    return config_table(_SUM_FIELDS, crossed((1, 2, 4), (8, 16, 32), (128, 256), added))


def _multiplier(problem: Problem) -> int:
    return problem.k // problem.c


class Multiplied(Tabled):
    """Base of both families."""

    def _handles(self, problem: Problem) -> bool:
        return (
            1 < _multiplier(problem) <= MAX_MULTIPLIER
            and depthwise.handles(problem)
            and depthwise.dilation(problem) == (1, 1)
            and problem.filter_elements + problem.k <= common.MAX_INT
        )

    def _defines(self, p: Problem, config: np.void) -> tuple[tuple[str, Any], ...]:
        return (
            *macros(R=p.r, S=p.s, STRIDE_H=p.stride[0], STRIDE_W=p.stride[1]),
            *macros(MULTIPLIER=_multiplier(p)),
            dtype_macro(p),
            *common.config_macros(config, ("vec",)),
            *common.agreed_macros(max_threads=depthwise.MAX_THREADS),
        )


class DepthwiseMultiplied(Multiplied):
    """``kernels/depthwise_multiplied.cu``."""

    configs = config_table(
        _IMAGE_FIELDS, crossed((1, 2, 4, 8), (8, 16, 32), (128, 256), (1, 2, 4, 8, 16))
    )
    kernel = "depthwise_multiplied"
    kernel_fields = ("vec",)
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "stride_h", "stride_w", "multiplier",
        "itemsize", "log_bytes", "log_intensity",
        *_IMAGE_FIELDS,
        "lanes", "c_tiles", "tiles_at_once", "block_threads", "registers", "smem_bytes",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "run_bytes",
        "pixel_alignment", "log_work", "log_estimate",
    )  # fmt: skip

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        vec = table.columns["vec"]
        fits = (problem.c % vec == 0) & (vec * problem.itemsize <= 16)
        lanes = depthwise.distinct_lanes(problem.c // vec, table.columns["lanes_c"])
        legal: Mask = fits & lanes & np.ones_like(vec, np.bool_)
        return legal

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        legal: Mask = (
            (w.smem_bytes <= device.smem_per_block)
            & (w.blocks <= common.MAX_INT)
            # Later pixels spare loads of the filter, as long as there are blocks for the device.
            & ((t["rounds"] == 1) | (w.blocks >= device.sm_count))
        )
        return legal

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, w = problem, self.configs[row], self._one(problem, row)
        scalars = {
            **kernel_sizes(p, "n c h w p q pad_h pad_w"),
            **depthwise.lane_scalars(w),
            "rounds": int(t["rounds"]),
        }
        defines = self._defines(p, t)
        return Launch((self._step(defines, w.blocks, w.block_threads, w.smem_bytes, scalars),))

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        multiplier, vec = problem.map(_multiplier), t["vec"]
        depthwise.share_lanes(w, problem.c // vec, t["lanes_c"], t["threads"])
        w.smem_bytes = problem.r * problem.s * w.lanes * vec * multiplier * 4
        pixels = problem.n * problem.h * problem.w
        w.blocks = w.c_tiles * ceil_div(pixels, w.tiles_at_once * t["rounds"])
        w.registers = 3 * vec + 38  # an estimate
        # Taps that meet a pixel, and instructions of a thread and pixel.
        stride_h, stride_w = problem.stride
        taps = ceil_div(problem.r, stride_h) * ceil_div(problem.s, stride_w)
        w.thread_pixel = taps * (3 * vec * multiplier + 12) + 40
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as the larger of the times of device memory and of the instructions,
        stretched by the waste of the last wave."""
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.block_threads, registers, w.smem_bytes)
        filters = w.smem_bytes / 4 / w.block_threads * 20  # instructions that bring them in
        work = w.blocks * w.block_threads * (t["rounds"] * w.thread_pixel + filters)
        seconds = common.largest(
            problem.map(device.roofline_s), common.instructions_s(work, device)
        )
        return {
            **occupancy.features(),
            "run_bytes": w.lanes * t["vec"] * problem.itemsize,
            "log_work": np.log2(work),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(
                occupancy.waves, common.WAVE_AND_LAUNCH_S, t["rounds"], common.DEPTHWISE_STEP_S
            ),
        }


class DepthwiseMultipliedWgrad(Multiplied):
    """``kernels/depthwise_multiplied_wgrad.cu``."""

    configs = _sum_table()
    kernel = "depthwise_multiplied_wgrad"
    kernel_fields = ("vec",)
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "stride_h", "stride_w", "multiplier",
        "itemsize", "bias", "log_bytes", "log_intensity",
        *_SUM_FIELDS,
        "lanes", "c_tiles", "tiles_at_once", "block_threads", "registers", "smem_bytes",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "rounds",
        "round_waste", "run_bytes", "pixel_alignment", "log_work", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        vec, multiplier = table.columns["vec"], problem.map(_multiplier)
        legal: Mask = (
            (problem.k % vec == 0)
            & ((vec % multiplier == 0) | (multiplier % vec == 0))
            & ((problem.s * vec <= _MOST_SUMS) | (vec == 1))
            & depthwise.distinct_lanes(problem.k // vec, table.columns["lanes_c"])
        )
        return legal

    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        legal: Mask = (w.lanes * problem.r <= t["threads"]) & depthwise.worth_sharing(t, w, device)
        return legal

    def launch(self, problem: Problem, row: int) -> Launch:
        p, t, w = problem, self.configs[row], self._one(problem, row)
        splits, reduction = int(t["splits"]), int(t["reduction"])
        scalars = {
            **kernel_sizes(p, "n k h w p q pad_h pad_w"),
            **depthwise.lane_scalars(w),
            "splits": splits,
            "reduction": reduction,
        }
        defines = (*self._defines(p, t), ("HAS_BIAS", int(p.bias)))
        step = self._step(defines, w.blocks, w.block_threads, w.smem_bytes, scalars)
        return depthwise.with_sums(step, p, splits, reduction)

    def _cut(self, problem: Any, t: Columns) -> Workings:
        w: Any = Workings()
        vec = t["vec"]
        depthwise.share_lanes(w, problem.k // vec, t["lanes_c"], t["threads"], problem.r)
        w.smem_bytes = vec * w.block_threads * 4
        w.tiles = problem.n * problem.p  # rows of output
        w.blocks = w.c_tiles * t["splits"]
        in_vec = np.maximum(vec // problem.map(_multiplier), 1)
        w.registers = problem.s * (vec + in_vec) + 3 * vec + 30  # an estimate
        w.thread_pixel = problem.s * (vec + in_vec) + 8 * problem.stride[1] + 2 * vec + 12
        return w

    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Estimate seconds as that of `DepthwiseMultiplied`, for the threads with the most rows,
        plus the time of the reduction."""
        registers = np.minimum(w.registers, common.MAX_REGISTERS)
        occupancy = Occupancy.of(device, w.blocks, w.block_threads, registers, w.smem_bytes)
        ideal_rounds = w.tiles / (t["splits"] * w.tiles_at_once)
        rounds = np.ceil(ideal_rounds)
        work = w.blocks * w.block_threads * rounds * problem.q * w.thread_pixel
        seconds = common.largest(
            problem.map(device.roofline_s), common.instructions_s(work, device)
        )
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        return {
            **occupancy.features(),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "run_bytes": w.lanes * t["vec"] * problem.itemsize,
            "log_work": np.log2(work),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds * occupancy.wave_waste
            + common.waves_s(
                occupancy.waves,
                common.WAVE_AND_LAUNCH_S,
                rounds * problem.q / 8,
                common.DEPTHWISE_WGRAD_STEP_S,
            )
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (
    DepthwiseMultiplied(
        "depthwise_multiplied_dgrad", "dgrad", ("in_grad", "out_grad", "filter")
    ),
    DepthwiseMultipliedWgrad(
        "depthwise_multiplied_wgrad", "wgrad", depthwise.WGRAD_OPERANDS
    ),
)  # fmt: skip
