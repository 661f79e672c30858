"""Depthwise 1-D convolution of contiguous rows, gradient of the filter and of the bias: configs,
legality, features and launches of ``line_wgrad.cu``."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise, line
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Array, Mask, Rows
from confpred.families.table import Described, config_columns, config_table
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_FIELDS = ("tile", "threads", "splits")
_WARP = 32


class LineWgrad(Described):
    """``kernels/line_wgrad.cu``."""

    name, direction = "line_wgrad", "wgrad"
    operation = CONV
    configs = config_table(_FIELDS, product((4, 8, 16), (64, 128, 256), (1, 2, 4, 8, 16, 32, 64)))
    feature_names = (
        *CONV.feature_names, *_FIELDS,
        "in_vec", "out_vec", "loads", "registers", "smem_bytes", "blocks_per_sm", "warps_per_sm",
        "log_blocks", "waves", "wave_waste", "rounds", "round_waste", "log_in_flight", "work",
        "log_work", "log_sum_bytes", "log_estimate",
    )  # fmt: skip

    def legal(self, problem: ConvNd, device: Device) -> Mask:
        p = problem
        if not line.handles(p) or p.direction != self.direction:
            return np.zeros(len(self.configs), np.bool_)
        t = self._layout(p)
        blocks, threads = t["blocks"], t["threads"] * t["splits"]
        fits: Mask = (
            line.tiles_fit(p, t["tile"], t["vectors"])
            & (t["registers"] <= common.MOST_ESTIMATED_REGISTERS)
            & ((t["threads"] < 2 * t["tiles"]) | (t["threads"] == 64))
            # Several blocks share a channel only where that gives none of them nothing to do, and
            # where there are too few channels to fill the device many times over.
            & ((t["splits"] == 1) | ((threads < 2 * t["tiles"]) & (blocks <= 32 * device.sm_count)))
            & (p.n * t["tiles_of_row"] + threads <= common.MAX_INT)
        )
        return fits

    def _layout(self, problem: ConvNd, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, and how they cut the problem, by name."""
        p, t = problem, config_columns(self.configs, rows)
        t |= line.windows(p, t["tile"])
        t["tiles_of_row"] = ceil_div(p.q, t["tile"])
        t["tiles"] = p.n * t["tiles_of_row"]  # of a channel
        t["blocks"] = p.k * t["splits"]
        sums, words = p.s + p.bias, p.itemsize / 4
        t["smem_bytes"] = 4 * sums * (t["threads"] // _WARP)
        t["registers"] = (  # an estimate
            t["loads"] * t["in_vec"] * words + t["tile"] * (1 + words) + sums + 28
        ).astype(np.int64)
        return t

    def _derived(self, problem: ConvNd, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Estimate seconds as the larger of the times of device memory and of the instructions, a
        latency for each wave and round, and the time of the sums."""
        p, t = problem, self._layout(problem, rows)
        filled = Occupancy.of(device, t["blocks"], t["threads"], t["registers"], t["smem_bytes"])
        ideal_rounds = t["tiles"] / (t["threads"] * t["splits"])
        rounds = np.ceil(ideal_rounds)
        load_bytes = t["loads"] * t["in_vec"] * p.itemsize + t["tile"] * p.itemsize
        in_flight = filled.resident * t["threads"] * np.minimum(load_bytes, 64)
        # Instructions of a thread a round: products, conversions, loads and others.
        step = t["tile"] * p.s + t["loads"] * (t["in_vec"] + 4) + 2 * t["tile"] + 30
        own = rounds * step + 12 * (p.s + p.bias) + 60  # and its part of the sums
        fullest = filled.sm_blocks * device.sm_count * t["threads"]
        seconds = np.maximum(
            common.memory_s(p.minimum_bytes, device, in_flight),
            common.instructions_s(fullest * own, device),
        )
        sum_bytes = 4.0 * p.filter_elements * t["splits"]
        second = common.DEPTHWISE_SECOND_KERNEL_S + 2 * sum_bytes / device.dram_bytes_per_s
        return {
            **t,
            **filled.features(),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "log_in_flight": np.log2(in_flight),
            "work": step / t["tile"],
            "log_work": np.log2(t["blocks"] * t["threads"] * own),
            "log_sum_bytes": np.log2(sum_bytes),
            "estimate": seconds
            + np.where(t["splits"] > 1, second, 0.0)
            + common.waves_s(
                filled.waves, common.WAVE_AND_LAUNCH_S, rounds, common.DEPTHWISE_STEP_S
            ),
        }

    def launch(self, problem: ConvNd, row: int) -> Launch:
        p = problem
        t = common.one(self._layout(p, np.array([row])))
        defines = (
            *line.window_macros(p, t),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.agreed_macros(
                max_threads=line.MAX_THREADS, vectors=t["vectors"], sums=p.s + p.bias
            ),
        )
        scalars = {
            "n": p.n,
            "k": p.k,
            "multiplier": p.k // p.c,
            "w": p.w,
            "q": p.q,
            "first": t["first"],
            "q_tiles": t["tiles_of_row"],
            "splits": t["splits"],
        }
        return depthwise.wgrad_launch(self.name, p, defines, t["threads"], t, scalars)


FAMILY = LineWgrad()
