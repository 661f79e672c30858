"""Norms over groups of channels in two launches a direction, or in one for some samples: configs,
legality, features and launches of ``group_norm.cu`` and ``group_norm_one_pass.cu``.
``group_norm.cuh`` has a drawing of the layout, which is batch norm's with whole groups in a tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from confpred.families import common
from confpred.families.common import ceil_div
from confpred.families.norm import batch_norm
from confpred.families.norm.batch_norm import LEAST_BLOCKS, Passes
from confpred.families.protocol import Array, Mask
from confpred.families.table import config_table
from confpred.problem.device import Device
from confpred.problem.limits import ORDINARY_ERROR
from confpred.problem.norm_of_groups import NORM, Norm, norm_macros
from confpred.problem.operation import SCRATCH, ZEROED, Launch, Step

_MOST_SAMPLES = 65_535  # of a launch: CUDA counts them in 16 bits
_MOST_LAUNCHES = 16
_MOST_LANES = 256
_BACKWARD = ("out_grad", "in", "weight", "bias", "residual", "mean", "invstd", ZEROED, SCRATCH)


def error_of(problem: Norm) -> float | None:
    """Return the error of a launch (`Launch.error`): gradients are differences, and single elements
    of them may be as small as what was rounded."""
    return ORDINARY_ERROR[problem.dtype] if problem.is_backward else None


class _Groups(Passes):
    """Base of both families of a direction. `Passes` has what batch norm has, too."""

    operation = NORM
    stem = "group_norm"
    more_features = ("samples", "launches", "tile_groups")

    def _samples(self, problem: Norm) -> int:
        return problem.n

    def _rows(self, problem: Norm) -> int:
        return problem.p

    def _tiles(self, problem: Norm, t: dict[str, Array]) -> None:
        super()._tiles(problem, t)
        unit = problem.width // np.gcd(problem.width, t["vector"])  # lanes of whole groups
        t["used_lanes"] = ceil_div(t["used_lanes"], unit) * unit
        t["tiles"] = ceil_div(t["columns"], t["used_lanes"])
        t["tile_groups"] = t["used_lanes"] * t["vector"] // problem.width
        most = t.get("launched", np.zeros_like(unit))
        t["samples"] = np.where(most == 0, problem.n, np.minimum(most, problem.n))

    def _of_groups(self, problem: Norm, t: dict[str, Array]) -> Mask:
        """Return the rule that both families have."""
        legal: Mask = (
            self._shared(problem, t)
            & problem.centred
            & (not problem.is_trivial)
            & (not problem.is_of_rows)  # `row_norm` reads such a row once
            & ((t["used_lanes"] <= t["lanes"]) | (t["lanes"] == _MOST_LANES))
            & (t["used_lanes"] <= t["threads"] // 2)  # groups meet where a block's sums do
            & (t["samples"] <= _MOST_SAMPLES)
        )
        return legal

    def _alone(self, t: dict[str, Array]) -> Mask:
        """Return where the blocks asked for say nothing, as a tile of a sample has one anyway."""
        alone: Mask = (t["splits"] == 1) & (t["blocks"] > LEAST_BLOCKS)
        return alone

    def _macros(self, problem: Norm) -> tuple[tuple[str, int | str], ...]:
        return (("FROZEN", 0), *norm_macros(problem)[1:])

    def _sizes(self, problem: Norm, first: int) -> dict[str, int]:
        return {"width": problem.width, "first_sample": first, "samples": problem.n}

    def _launch(self, problem: Norm, steps: tuple[Step, ...], t: dict[str, int]) -> Launch:
        """Return the launch of `steps`, with the workspaces of sums that blocks and samples
        share."""
        p, counters = problem, 2 if "per_sm" in t else 1
        return Launch(
            steps,
            zeroed_bytes=4 * (counters * p.n + 1) * t["tiles"],
            scratch_bytes=8 * p.n * (t["splits"] + 2) * p.c,
            error=error_of(p),
        )


class TwoPass(_Groups):
    """``kernels/group_norm.cu``."""

    fields = batch_norm.TwoPass.fields
    configs = batch_norm.TwoPass.configs

    def legal(self, problem: Norm, device: Device) -> Mask:
        t = self._layout(problem)
        fits = t["sum_bytes"] <= device.smem_per_block
        return self._of_groups(problem, t) & fits & ~self._alone(t)

    def _fixed_s(self, problem: Norm) -> float:
        return 2 * common.LAUNCH_S + batch_norm.TICKET_S

    def launch(self, problem: Norm, row: int) -> Launch:
        p, t = problem, self._one(problem, row)
        plain = replace(p, activation="none", residual=False)
        if not p.is_backward:
            operands: tuple[str, ...] = ("in", "mean", "invstd", "eps", ZEROED, SCRATCH)
            statistics = self._step(plain, t, "statistics", operands)
            operands = ("out", "in", "weight", "bias", "residual", "mean", "invstd")
            return self._launch(p, (statistics, self._step(p, t, "apply", operands)), t)
        sums = self._step(p, t, "sums", ("residual_grad", "weight_grad", "bias_grad", *_BACKWARD))
        gradient = self._step(
            plain if p.residual else p, t, "gradient",
            ("in_grad", "residual_grad" if p.residual else "out_grad", "in", "weight", "bias",
             "mean", "invstd", SCRATCH),
        )  # fmt: skip
        return self._launch(p, (sums, gradient), t)


class OnePass(_Groups, batch_norm.OnePass):
    """``kernels/group_norm_one_pass.cu``; also ``launched``, how many samples are in a launch, 0
    for all of them. A launch of few leaves them in the L2 cache for its second pass."""

    fields = (*batch_norm.OnePass.fields, "launched")
    configs = config_table(
        fields,
        (
            (*config, launched)
            for config in batch_norm.OnePass.configs.tolist()
            for launched in (0, 1, 4)
        ),
    )

    def legal(self, problem: Any, device: Device) -> Mask:
        t = self._layout(problem)
        waits = t["splits"] > 1
        return (
            super().legal(problem, device)
            & ~(self._alone(t) & (t["per_sm"] == 1))
            # Samples whose blocks wait for none may well be in one launch.
            & ((t["launched"] == 0) | (waits & (t["launched"] < problem.n)))
            & (ceil_div(problem.n, t["samples"]) <= _MOST_LAUNCHES)
        )

    def _computes(self, problem: Any, t: dict[str, Array]) -> Mask:
        return self._of_groups(problem, t)

    def _waiting(self, t: dict[str, Array]) -> Array:
        return np.where(t["splits"] > 1, t["grid"], 0)

    def launch(self, problem: Any, row: int) -> Launch:
        p, t, part = problem, self._one(problem, row), "one_pass"
        operands: tuple[str, ...] = ("out", "in", "weight", "bias", "residual", "mean", "invstd")
        operands = (*operands, "eps", ZEROED, SCRATCH)
        if p.is_backward:
            part = "one_pass_backward"
            operands = ("in_grad", "residual_grad", "weight_grad", "bias_grad", *_BACKWARD)
        firsts = range(0, p.n, t["samples"])
        return self._launch(p, tuple(self._step(p, t, part, operands, i) for i in firsts), t)


FAMILIES = (
    TwoPass("group_norm_two_pass", "forward"),
    TwoPass("group_norm_two_pass_backward", "backward"),
    OnePass("group_norm_one_pass", "forward"),
    OnePass("group_norm_one_pass_backward", "backward"),
)
