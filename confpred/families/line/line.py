"""Depthwise 1-D convolution of contiguous rows: configs, legality, features and launches of
``line.cu``, for the forward direction and for the gradient of the input."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, line
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Array, Mask, Rows
from confpred.families.table import Described, config_columns, config_table
from confpred.problem.activation import activation_macro
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

_FIELDS = ("tile", "lanes", "threads", "turns")
_STAGED_BYTES = 8  # of an access: outputs of narrower ones go through shared memory


class Line(Described):
    """One direction of ``kernels/line.cu``."""

    operation = CONV
    configs = config_table(
        _FIELDS,
        product((4, 8, 16), (line.LEAST_LANES, 32, 64, 128, 256), (128, 256), (1, 2, 4, 8)),
    )

    def __init__(self, name: str, direction: str, operands: tuple[str, ...]) -> None:
        self.name, self.direction, self.operands = name, direction, operands
        self.feature_names = (
            *CONV.feature_names, *_FIELDS,
            "in_vec", "out_vec", "staged", "loads", "used_lanes", "rows_at_once", "block_threads",
            "registers", "smem_bytes", "blocks_per_sm", "warps_per_sm", "log_blocks", "waves",
            "wave_waste", "lane_waste", "row_waste", "log_in_flight", "work", "log_work",
            "log_estimate",
        )  # fmt: skip

    def legal(self, problem: ConvNd, device: Device) -> Mask:
        p = problem
        served = line.handles(p) and (self.direction == "fprop" or p.k == p.c)
        if p.direction != self.direction or not served:
            return np.zeros(len(self.configs), np.bool_)
        t = self._layout(p)
        fits: Mask = (
            line.tiles_fit(p, t["tile"], t["vectors"])
            & (t["registers"] <= common.MOST_ESTIMATED_REGISTERS)
            & (t["lanes"] <= t["threads"])
            & ((t["lanes"] < 2 * t["tiles"]) | (t["lanes"] == line.LEAST_LANES))
            # Twice as many turns as a row has are those of half as many.
            & ((t["turns"] == 1) | (t["turns"] // 2 * t["used_lanes"] < t["tiles"]))
            # Nobody needs the rows of a second block beside those of the first.
            & ((t["threads"] == 128) | (t["used_lanes"] * 2 <= t["threads"]) | (t["lanes"] == 256))
        )
        return fits

    def _layout(self, problem: ConvNd, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, and how they cut the problem, by name."""
        p, t = problem, config_columns(self.configs, rows)
        t |= line.windows(p, t["tile"])
        t["tiles"] = ceil_div(line.axis(p)[4], t["tile"])  # of a row
        t["used_lanes"] = np.minimum(t["lanes"], t["tiles"])
        t["rows_at_once"] = np.maximum(t["threads"] // t["used_lanes"], 1)
        t["block_threads"] = ceil_div(t["used_lanes"] * t["rows_at_once"], 32) * 32
        t["q_blocks"] = ceil_div(t["tiles"], t["used_lanes"] * t["turns"])
        channels = p.c if p.direction == "dgrad" else p.k
        t["blocks"] = ceil_div(p.n * channels, t["rows_at_once"]) * t["q_blocks"]
        t["staged"] = (t["out_vec"] * p.itemsize < _STAGED_BYTES).astype(np.int64)
        t["smem_bytes"] = t["staged"] * t["block_threads"] * t["tile"] * p.itemsize
        words = p.itemsize / 4
        t["registers"] = (  # an estimate
            t["loads"] * t["in_vec"] * words + t["tile"] * (1 + words * p.residual) + p.s + 24
        ).astype(np.int64)
        return t

    def _derived(self, problem: ConvNd, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Estimate seconds as the larger of the times of device memory and of the instructions,
        and a latency for each wave and turn."""
        p, t = problem, self._layout(problem, rows)
        filled = Occupancy.of(
            device, t["blocks"], t["block_threads"], t["registers"], t["smem_bytes"]
        )
        load_bytes = t["loads"] * t["in_vec"] * p.itemsize
        in_flight = filled.resident * t["block_threads"] * np.minimum(load_bytes, 64)
        products = t["tile"] * p.s // line.axis(p)[0]
        # Instructions of a thread a turn: products, conversions, loads, stores and others.
        step = products + t["loads"] * (t["in_vec"] + 4) + 3 * t["tile"] + 30
        own = t["turns"] * step + 3 * p.s + 60
        fullest = filled.sm_blocks * device.sm_count * t["block_threads"]
        seconds = np.maximum(
            common.memory_s(p.minimum_bytes, device, in_flight),
            common.instructions_s(fullest * own, device),
        )
        return {
            **t,
            **filled.features(),
            "lane_waste": t["block_threads"] / (t["used_lanes"] * t["rows_at_once"]),
            "row_waste": t["q_blocks"] * t["used_lanes"] * t["turns"] / t["tiles"],
            "log_in_flight": np.log2(in_flight),
            "work": step / t["tile"],
            "log_work": np.log2(t["blocks"] * t["block_threads"] * own),
            "estimate": seconds
            + common.LAUNCH_S
            + common.waves_s(filled.waves, common.WAVE_S, t["turns"], common.DEPTHWISE_STEP_S),
        }

    def launch(self, problem: ConvNd, row: int) -> Launch:
        p = problem
        t = common.one(self._layout(p, np.array([row])))
        *_, width, result = line.axis(p)
        channels = p.c if p.direction == "dgrad" else p.k
        defines = (
            *line.window_macros(p, t),
            ("FLIP", int(p.direction == "dgrad")),
            dtype_macro(p),
            activation_macro(p.activation),
            *common.macros(HAS_BIAS=int(p.bias), HAS_RESIDUAL=int(p.residual)),
            *common.agreed_macros(
                max_threads=line.MAX_THREADS, vectors=t["vectors"], staged=t["staged"]
            ),
        )
        scalars = {
            "rows": p.n * channels,
            "k": channels,
            "multiplier": channels // p.c,
            "w": width,
            "q": result,
            "first": t["first"],
            "lanes": t["used_lanes"],
            **{name: t[name] for name in ("rows_at_once", "turns", "q_blocks")},
        }
        step = common.kernel_step(
            "line",
            self.operands,
            defines,
            t["blocks"],
            t["block_threads"],
            t["smem_bytes"],
            scalars,
        )
        return Launch((step,))


FAMILIES = (
    Line("line_fprop", "fprop", ("out", "in", "filter", "bias", "residual")),
    Line("line_dgrad", "dgrad", ("in_grad", "out_grad", "filter", "bias", "residual")),
)
