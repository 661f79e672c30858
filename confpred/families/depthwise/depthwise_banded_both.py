"""Depthwise convolution on tensor cores, gradients of the input and of the filter in one pass:
configs, legality, features and launches of ``depthwise_banded_both.cu``.

The layers are those of ``depthwise_banded.py`` with windows 2 to 9 wide. An input pixel takes 32 R
multiply-adds of the tensor cores, but of the six passes over planes of pixels that the two
directions take apart (two of the output's gradient, and one of each other image), four are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise
from confpred.families.batch import Workings
from confpred.families.common import Occupancy, ceil_div
from confpred.families.depthwise import depthwise_banded as banded
from confpred.families.depthwise.depthwise_banded_wgrad import DepthwiseBandedWgrad
from confpred.families.protocol import Array
from confpred.families.table import Table, config_table, crossed
from confpred.problem.conv2d import Problem, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.gradients import GRADIENTS

_FIELDS = (*banded.COMPILED, "bands", "splits", "reduction")
_VARYING_FIELDS = tuple(name for name in _FIELDS if name != "stages")
_WIDTHS = range(2, 10)  # of a window: a diagonal has eight elements
_STAGES = 2

# Decided by the launch, not the kernel: bands, splits and the reduction.
_LAUNCHES = tuple(
    (bands, *reduction)
    for bands in (1, 4)
    for reduction in depthwise.reductions((8, 16, 32, 64, 128))
)


def _config_table() -> NDArray[np.void]:
    rows = crossed(banded.TILES, (1, 2), (_STAGES,), (1, 2), _LAUNCHES)
    return config_table(_FIELDS, rows)


_CONFIGS = _config_table()


def _padding(problem: Problem) -> tuple[int, int]:
    """Return the padding of the output's gradient; negative where its border is unread."""
    p = problem
    return p.r - 1 - p.padding[0], p.s - 1 - p.padding[1]


def _computed_rows(problem: Problem) -> int:
    """Return the rows of the output's gradient that one band multiplies."""
    above = max(_padding(problem)[0], 0)
    return min(max(problem.p + _padding(problem)[0], above), problem.h + problem.r - 1) - above


class DepthwiseBandedBoth(DepthwiseBandedWgrad):
    """``kernels/depthwise_banded_both.cu``: blocks walk over the input, not the output."""

    operation = GRADIENTS
    configs = _CONFIGS
    whole = Table.of(_CONFIGS)
    kernel = "depthwise_banded_both"
    shared_features = (
        "log_n", "log_c", "log_p", "log_q", "r", "s", "bfloat16", "bias", "log_bytes",
        "log_intensity",
        *_VARYING_FIELDS,
        "threads", "registers", "smem_bytes", "in_items", "out_items", "products",
        "blocks_per_sm", "warps_per_sm", "log_blocks", "waves", "wave_waste", "q_waste",
        "c_waste", "strip_waste", "band_rows", "bands_cut", "halo_rows", "halo_columns",
        "rounds", "round_waste", "steps", "run_bytes", "pixel_alignment", "bytes_in_flight",
        "log_work", "log_load_bytes", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def _handles(self, problem: Problem) -> bool:
        p = problem
        return (
            banded.handles(p)
            and p.s in _WIDTHS
            and p.filter_elements + p.c <= common.MAX_INT
            # The bias adds up pixels of the output's gradient where the input has the same ones.
            and (not p.bias or (p.p <= p.h and p.q <= p.w and min(_padding(p)) >= 0))
        )

    def _walked(self, problem: Any) -> tuple[Any, Any]:
        return problem.h, problem.w

    def _sizes(self, problem: Problem, w: Any) -> dict[str, int]:
        pad_h, pad_w = _padding(problem)
        return {
            **kernel_sizes(problem, "n c h w p q"),
            "pad_h": pad_h,
            "pad_w": pad_w,
            **common.named(w, "band_rows bands"),
            "w_tiles": w.q_tiles,
            **common.named(w, "c_tiles tiles"),
        }

    @staticmethod
    def _block(table: Table, r: int, s: int, bias: bool, residual: bool) -> Workings:
        t = table.columns
        w, run, warp_c = banded.block(t, s), t["run"], t["warp_c"]
        planes = 2 * (banded.buffer_bytes(t, run + 1, 1) + 2 * banded.buffer_bytes(t, run, 0))
        planes += banded.stage_bytes(t, w.in_items + w.out_items)
        planes += t["block_c"] * r * s * 2
        sums = t["strips"] // t["warp_strips"] * t["block_c"] * (r * s + bias)
        w.smem_bytes = np.maximum(planes, w.threads // 32 * 16 * 9 * 4 + 4 * sums)
        warp_tiles = t["warp_strips"] // 16
        fragments = warp_c * warp_tiles * t["rows"]
        w.products = fragments * (2 * r + bias)  # tensor-core instructions of a warp and step
        w.registers = (  # fitted to what the assembler reports of 50 kernels
            warp_c * (r * (6 + 6 * warp_tiles) + warp_tiles + 4 * bias + 12)
            + 4 * w.in_items
            + 16 * w.out_items
            + 30
        )
        # Instructions that a warp issues in a step: products, fragments with the window's slide,
        # copies, and the rest.
        copies = 28 * (w.in_items + 2 * w.out_items)
        w.work = w.products + fragments * (14 + 2 * r) + copies + 30
        return w

    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], w: Any
    ) -> dict[str, NDArray[np.float64]]:
        """Estimate seconds as that of `DepthwiseBandedWgrad`."""
        registers = np.minimum(w.registers, banded.most_registers(t))
        occupancy = Occupancy.of(device, w.blocks, w.threads, registers, w.smem_bytes)
        ideal_rounds = w.tiles / t["splits"]
        rounds = np.ceil(ideal_rounds)
        walked = w.band_rows + problem.r - 1
        steps = ceil_div(walked, t["rows"])
        inside = np.where(w.bands == 1, problem.each(_computed_rows), walked)
        computed = np.minimum(ceil_div(inside, t["rows"]), steps)
        pixels = w.in_x + 8 * t["run"]
        step_bytes = t["rows"] * w.runs * pixels * t["block_c"] * problem.itemsize
        in_flight = occupancy.resident * step_bytes
        fullest = occupancy.sm_blocks * device.sm_count * w.threads / 32 * rounds
        block_work = computed * w.work + (steps - computed) * 0.5 * w.work
        seconds = common.largest(
            common.memory_s(problem.minimum_bytes, device, in_flight),
            common.products_s(fullest * computed * w.products, device),
            common.instructions_s(fullest * block_work * 32, device),
        )
        sum_bytes = 4.0 * problem.filter_elements * t["splits"]
        loaded = w.blocks * rounds * steps * step_bytes
        return {
            **occupancy.features(),
            **banded.features(problem, t, w, problem.w, walked),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "steps": steps,
            "bytes_in_flight": in_flight,
            "log_work": np.log2(w.blocks * (w.threads / 32) * rounds * block_work),
            "log_load_bytes": np.log2(loaded / problem.minimum_bytes),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(occupancy.waves, common.WAVE_S, rounds * steps, common.STEP_S)
            + common.depthwise_adding_s(t["reduction"], sum_bytes, device),
        }


FAMILIES = (DepthwiseBandedBoth("depthwise_banded_both", "both", depthwise.BOTH_OPERANDS),)
