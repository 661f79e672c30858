"""One family's part of a choice: candidates -> features -> cost -> compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from confpred.families.limits import is_free, within
from confpred.families.protocol import Family, Rows
from confpred.families.several import Several
from confpred.model.cascade import Pairs, best_first
from confpred.model.features import operation_features
from confpred.model.offers import Offer
from confpred.model.pools import DEVICE, Pool, bandwidth
from confpred.model.registers import Registers
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.limits import Limits
from confpred.problem.operation import Operation
from confpred.problem.record import Record


@dataclass(frozen=True, slots=True)
class FamilyModel:
    """What a model has learned of one kernel family.

    Attributes:
        family: the kernel family.
        pool: the families that it shares `order` and `time` with.
        order: regressor of log(time / time of the problem's best config), from the pool's
            features. It need not know how fast a layer is, only what makes one config slower than
            another, and orders them better than `time` does.
        time: regressor of log(time / roofline time), from the same features.
        portfolio: mask over the family's config table: the configs worth offering.
        registers: what is known of the family's compiled kernels, or None.
        groupings: of the problems that it was measured on, and serves; None for any.
        offer: the portfolio, prepared for predictions.
        is_free: whether its configs need not be looked into where nothing is limited.
    """

    family: Family
    pool: Pool
    order: Trees
    time: Trees
    portfolio: NDArray[np.bool_]
    registers: Registers | None = None
    groupings: frozenset[str] | None = None
    offer: Offer = field(init=False, repr=False, compare=False)
    is_free: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        offer = Offer(self.family, self.pool, self.portfolio, self.registers)
        object.__setattr__(self, "offer", offer)
        object.__setattr__(self, "is_free", is_free(self.family))

    def serves(self, problem: Record) -> bool:
        """Whether it may have configs for `problem`, and was measured on problems like it."""
        known = self.groupings is None or problem.grouping in self.groupings
        return known and self.offer.serves(problem)

    def candidates(self, problem: Record, device: Device) -> Rows:
        """Configs worth comparing: the portfolio's legal ones, or all legal ones if it has none."""
        legal = self.family.legal(problem, device)
        offered = np.flatnonzero(legal & self.portfolio)
        return offered if len(offered) else np.flatnonzero(legal)

    def features(self, problem: Record, device: Device, rows: Rows) -> NDArray[np.float32]:
        """What `order` and `time` are fed."""
        return self.pool.features(self.family, problem, device, rows, self.registers)

    def rank(self, problem: Record, device: Device, rows: Rows) -> tuple[Rows, NDArray[np.float64]]:
        """The best of `rows`, as many as `confpred.model.cascade` orders, and their predicted
        seconds, rising."""
        pairs = self.offer.of_rows(rows, problem, device)
        return self._ranked(pairs, [problem], device, runners_up=True)[0]

    def rank_all(
        self, problems: Several, device: Device, *, runners_up: bool
    ) -> dict[int, tuple[Rows, NDArray[np.float64]]]:
        """`rank` of the candidates of each of `problems` that has any, by its place.

        Args:
            problems: which.
            device: the device to compute them on.
            runners_up: whether to order more than the finalists, after them.
        """
        pairs = self.offer.pairs(problems, device)
        return self._ranked(pairs, problems.problems, device, runners_up)

    def rank_within(
        self, problems: Sequence[Record], device: Device, limits: Limits
    ) -> dict[int, tuple[Rows, NDArray[np.float64]]]:
        """`rank` of what keeps within `limits`, of each of `problems` that has any, by its place:
        of the candidates, or, as these were chosen without limits, else of all legal configs."""
        found = {}
        for place, problem in enumerate(problems):
            offered = self.candidates(problem, device)
            rows = within(self.family, problem, offered, limits)
            if len(offered) and not len(rows):
                legal = np.flatnonzero(self.family.legal(problem, device))
                rows = within(self.family, problem, legal, limits)
            if len(rows):
                found[place] = self.rank(problem, device, rows)
        return found

    def _ranked(
        self, pairs: Pairs, problems: Sequence[Record], device: Device, runners_up: bool
    ) -> dict[int, tuple[Rows, NDArray[np.float64]]]:
        """The best one's time is what `time` says; the others' follow by the ratios of `order`."""
        pairs, cost = best_first(self.order, pairs, runners_up=runners_up)
        if not pairs.places:
            return {}
        index, firsts = pairs.index, pairs.starts
        best = self.time.predict(pairs.features[firsts])
        roofline = np.array([device.roofline_s(problems[place]) for place in pairs.places])
        seconds = np.exp(best[index] + (cost - cost[firsts][index])) * roofline[index]
        return {
            place: (pairs.rows[part], seconds[part])
            for place, part in zip(pairs.places, pairs.parts(), strict=True)
        }


@dataclass(frozen=True, slots=True)
class PytorchModel:
    """What a model has learned of PyTorch's own operator, which has no configs.

    Attributes:
        operation: what it computes.
        ratio: regressor of log(its time / time of our fastest config), from `pytorch_features`; it
            does not tell large ratios apart, as nothing depends on that
            (`confpred.training.pytorch`).
        margins: how large that logarithm must be for ours to be preferred, by the problem's kind:
            what cost least on layers that the regressor was not trained on. Where nothing is known
            of a kind, none of ours is.
    """

    operation: Operation
    ratio: Trees
    margins: Mapping[str, float]

    def slowdown(self, problem: Record, device: Device) -> tuple[float, float]:
        """How many times as long as our fastest config it takes: expected, and at least."""
        return self.slowdowns([problem], device)[0]

    def log_ratios(self, problems: Sequence[Record], device: Device) -> NDArray[np.float64]:
        """What is expected of `ratio` for each problem."""
        return self.ratio.predict(pytorch_features(self.operation, problems, device))

    def slowdowns(self, problems: Sequence[Record], device: Device) -> list[tuple[float, float]]:
        """`slowdown` of each problem."""
        ratios = self.log_ratios(problems, device).tolist()
        margins = [self.margins.get(problem.kind, inf) for problem in problems]
        return [(exp(r), exp(r - margin)) for r, margin in zip(ratios, margins, strict=True)]


def pytorch_feature_names(operation: Operation) -> tuple[str, ...]:
    """The columns of `pytorch_features`."""
    return (*operation.feature_names, DEVICE)


def pytorch_features(
    operation: Operation, problems: Sequence[Record], device: Device
) -> NDArray[np.float32]:
    """The features of each of `problems` alone, and the device's: a row each."""
    own = operation_features(operation, problems, device)
    matrix = np.empty((len(own), own.shape[1] + 1), np.float32)
    matrix[:, :-1] = own
    matrix[:, -1] = bandwidth(device)
    return matrix


def rank_by_estimate(
    family: Family, problem: Record, device: Device
) -> tuple[Rows, NDArray[np.float64]]:
    """All legal configs and their seconds by the family's analytic estimate, rising."""
    rows = np.flatnonzero(family.legal(problem, device))
    seconds = family.estimate_s(problem, device, rows)
    order = np.argsort(seconds, kind="stable")
    return rows[order], seconds[order]
