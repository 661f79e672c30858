"""How a model ranks configs, from top to bottom:

    families that may win (`Gate`) --> legal configs --> features
        --> cost by few trees, which keep many --> cost by all trees
        --> time of the best of each family --> PyTorch's operator at its rank (`PytorchModel`)

A family is ranked in `FamilyModel.rank_many`, and all of them in `rank_families`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import cached_property
from confpred.families.batch import ProblemBatch
from confpred.families.protocol import (
    PYTORCH_OPERATOR,
    Batched,
    Candidate,
    Family,
    Rows,
    is_free,
    within,
)
from confpred.model.features import DEVICE, Pool, Registers, bandwidth, operation_features
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import Operation
from confpred.problem.record import Record

#: Stages of ranking: numbers of trees, and of a problem's candidates that stay in the ranking after
#: them. The first trees correct the most, so the choice is nearly that of all trees for all
#: candidates, with about a twentieth of the trees' work (decision 166).
STAGES = ((4, 256), (20, 96), (60, 16), (200, 4))
FINALISTS = STAGES[-1][1]
#: Candidates, fastest first, with their expected seconds.
Options = list[tuple[float, Candidate]]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Problems with their candidates of one family; those of a problem lie together.

    Attributes:
        places: positions of the problems that have candidates.
        bounds: position of the first pair of each of these problems, and after the last pair.
        rows: rows of the family's config table, ascending for each problem.
        features: the trees' input, a row for each pair.
    """

    places: Sequence[int]
    bounds: Sequence[int]
    rows: Rows
    features: NDArray[np.float32]

    @property
    def index(self) -> Rows:
        """Index into `places` of the problem of each pair."""
        return np.repeat(np.arange(len(self.places)), np.diff(self.bounds))


@dataclass(frozen=True)
class FamilyModel:
    """A model of one kernel family.

    Attributes:
        family: the kernel family.
        pool: the families that it shares `order` and `time` with.
        order: regressor of log(time / time of the problem's best config), from the pool's
            features. It orders configs better than `time` does.
        time: regressor of log(time / roofline time), from the same features.
        registers: registers of the family's compiled kernels, or None.
        groupings: groupings of the problems that it was measured on and serves; None for any.
        taught: regressor of the same value as `order`, trained later with uploads. It orders
            configs in place of `order`. The family's time is still that of the first config by
            `order`, so that the same family is chosen as before.
    """

    family: Family
    pool: Pool
    order: Trees
    time: Trees
    registers: Registers | None = None
    groupings: frozenset[str] | None = None
    taught: Trees | None = None

    @cached_property  # isinstance of a protocol is slow
    def batched(self) -> Batched | None:
        """The family, if it computes several problems at once; else None."""
        return self.family if isinstance(self.family, Batched) else None

    @property
    def ordering(self) -> Trees:
        """The regressor that orders configs."""
        return self.taught or self.order

    @cached_property
    def is_free(self) -> bool:
        """Whether all configs may run where there are no limits, so that none needs a test."""
        return is_free(self.family)

    def serves(self, problem: Record) -> bool:
        """Return whether the family may have configs for `problem`, and was measured on its
        grouping."""
        if self.groupings is not None and problem.grouping not in self.groupings:
            return False
        return self.batched is None or self.batched.serves(problem)

    def legal(self, problem: Record, device: Device, limits: Limits = UNLIMITED) -> Rows:
        """Return the rows of the config table that are legal, and keep within `limits`."""
        rows = np.flatnonzero(self.family.legal(problem, device))
        return within(self.family, problem, rows, limits)

    def features(self, problem: Record, device: Device, rows: Rows) -> NDArray[np.float32]:
        """Return the matrix that `order` and `time` take."""
        return self.pool.features(self.family, problem, device, rows, self.registers)

    def rank(
        self, problem: Record, device: Device, rows: Rows, wanted: int = 1
    ) -> tuple[Rows, NDArray[np.float64]]:
        """Rank `rows` of the config table, at least one, which are ascending and legal for
        `problem`.

        Returns:
            Rows, fastest first, and their expected seconds, ascending: at least `wanted` and
            `FINALISTS`, if there are as many.
        """
        pairs = Pairs([0], [0, len(rows)], rows, self.features(problem, device, rows))
        return self.rank_pairs(pairs, [problem], device, wanted)[0]

    def rank_many(
        self, problems: ProblemBatch, device: Device, wanted: int = 1, limits: Limits = UNLIMITED
    ) -> dict[int, tuple[Rows, NDArray[np.float64]]]:
        """Return `rank` of all legal configs within `limits`, by the position of each of `problems`
        that has any."""
        if self.batched is not None and self.is_free and limits == UNLIMITED:
            pairs = self._together(self.batched, problems, device)
        else:
            pairs = self._one_by_one(problems.problems, device, limits)
        return self.rank_pairs(pairs, problems.problems, device, wanted)

    def _together(self, family: Batched, problems: ProblemBatch, device: Device) -> Pairs:
        """Return all legal pairs, by a few operations on arrays of all problems."""
        paired, rows, workings = family.offered(problems, device, family.whole)
        # One problem alone needs no index.
        index = np.zeros(len(rows), np.intp) if paired.index is None else paired.index
        counts = np.bincount(index, minlength=len(problems.problems)).tolist()
        places = [place for place, count in enumerate(counts) if count]
        bounds = [0, *accumulate(counts[place] for place in places)]
        if not places:
            return Pairs(places, bounds, rows, np.empty((0, 0), np.float32))
        columns = family.described(paired, device, family.whole, rows, workings)
        if self.registers is not None:
            parts = zip(places, pairwise(bounds), strict=True)
            registers = [
                self.registers.of(problems.problems[place], rows[start:end])
                for place, (start, end) in parts
            ]
            self.registers.correct(columns, np.concatenate(registers), device)
        return Pairs(places, bounds, rows, self.pool.spread(self.family, columns, device))

    def _one_by_one(self, problems: Sequence[Record], device: Device, limits: Limits) -> Pairs:
        """Return all pairs that are legal and within `limits`."""
        legal = {place: self.legal(p, device, limits) for place, p in enumerate(problems)}
        legal = {place: rows for place, rows in legal.items() if len(rows)}
        if not legal:
            return Pairs([], [0], np.empty(0, np.intp), np.empty((0, 0), np.float32))
        features = [self.features(problems[place], device, rows) for place, rows in legal.items()]
        bounds = [0, *accumulate(map(len, legal.values()))]
        return Pairs([*legal], bounds, np.concatenate([*legal.values()]), np.concatenate(features))

    def rank_pairs(
        self, pairs: Pairs, problems: Sequence[Record], device: Device, wanted: int = 1
    ) -> dict[int, tuple[Rows, NDArray[np.float64]]]:
        """Return `rank` of the candidates of each problem, by the problem's position. The first one
        has the time that `time` predicts for the first one by `order`; the others follow by their
        ratios to it from `ordering`."""
        rankings: dict[int, tuple[Rows, NDArray[np.float64]]] = {}
        if not pairs.places:
            return rankings
        ranked = list(order_candidates(self.ordering, pairs, wanted))
        timed = order_candidates(self.order, pairs) if self.taught else ranked
        firsts = np.array([at[0] for at, _ in timed])
        best = self.time.predict(pairs.features[firsts]).tolist()
        for place, (at, cost), log_best in zip(pairs.places, ranked, best, strict=True):
            roofline = device.roofline_s(problems[place])
            rankings[place] = pairs.rows[at], np.exp(log_best + (cost - cost[0])) * roofline
        return rankings


def order_candidates(
    order: Trees, pairs: Pairs, wanted: int = 1
) -> Iterator[tuple[Rows, NDArray[np.float64]]]:
    """Order the candidates of each problem by predicted cost.

    Args:
        order: regressor of the logarithm of a candidate's cost.
        pairs: the candidates; every problem has some.
        wanted: how many to return, if there are as many; candidates that a stage drops follow the
            others, with the cost of the last of these or more.

    Yields:
        For each problem the positions of its candidates in `pairs`, best first, and the logarithms
        of their costs, ascending.
    """
    cost, index, done = np.zeros(len(pairs.rows)), pairs.index, 0  # trees so far
    stages = np.zeros(len(pairs.rows), np.intp)  # that each candidate was kept in
    ranked: Rows = np.arange(len(pairs.rows))  # candidates to return, as far as is decided
    kept = ranked
    for trees, most in (*STAGES, (None, FINALISTS)):
        # Part by part, so that a candidate's cost, a sum of parts, depends on no other candidate.
        some = pairs.features[ranked] if done else pairs.features
        cost[ranked] += order.predict(some, done, trees)
        done = trees or done
        kept = _keep_cheapest(pairs, index, kept, cost, most)
        stages[kept] += 1
        if wanted <= most:
            ranked = kept
    ranked = ranked[np.lexsort((pairs.rows[ranked], cost[ranked], -stages[ranked], index[ranked]))]
    ends = np.searchsorted(index[ranked], np.arange(1, len(pairs.places)))
    for at in np.split(ranked, ends):
        yield at, np.maximum.accumulate(cost[at])


def _keep_cheapest(
    pairs: Pairs, index: Rows, kept: Rows, cost: NDArray[np.floating[Any]], most: int
) -> Rows:
    """Return those of the pairs `kept` that have the least `cost`: at most `most` of each problem,
    whose number `index` has for every pair."""
    kept = kept[np.lexsort((pairs.rows[kept], cost[kept], index[kept]))]
    starts = np.searchsorted(index[kept], np.arange(len(pairs.places)))
    return kept[np.arange(len(kept)) - starts[index[kept]] < most]


def rank_families(
    families: Mapping[str, FamilyModel],
    gate: Gate | None,
    problems: Sequence[Record],
    device: Device,
    wanted: int = 1,
    limits: Limits = UNLIMITED,
) -> list[Options]:
    """Return the best configs for each of `problems`, of the families that can win. If these have
    too few, configs of the others follow, as no faster than the last of these.

    Args:
        families: models of the families by name.
        gate: model of which families can win; None if all can. It was trained without limits, so
            all families compete if there are limits.
        problems: problems of one operation; together they take a fraction of the time.
        device: the device to compute them on.
        wanted: how many configs; there may be more or fewer. The first ones do not depend on it.
        limits: every config keeps within them.
    """
    serving = [[name for name, model in families.items() if model.serves(p)] for p in problems]
    opened = serving
    if gate is not None and limits == UNLIMITED:
        opened = gate.open(problems, device, serving)
    together, most = ProblemBatch(problems), max(wanted, FINALISTS)

    def ranked(named: Sequence[Sequence[str]]) -> list[Options]:
        """Return the best configs of the families `named` for each problem."""
        by_problem: list[Options] = [[] for _ in named]
        for name, model in families.items():
            asked = [place for place, names in enumerate(named) if name in names]
            if not asked:
                continue
            best = model.rank_many(together.part(asked), device, wanted, limits)
            for place, (rows, seconds) in best.items():
                first = zip(seconds[:most].tolist(), rows[:most].tolist(), strict=True)
                by_problem[asked[place]] += [(value, Candidate(name, row)) for value, row in first]
        for options in by_problem:
            # Stable: a family's candidates of equal seconds keep their order.
            options.sort(key=lambda option: (option[0], option[1].provider))
        return by_problem

    answers = ranked(opened)
    closed = [
        [name for name in served if name not in mine] if len(options) < wanted else []
        for served, mine, options in zip(serving, opened, answers, strict=True)
    ]
    for options, more in zip(answers, ranked(closed), strict=True):
        last = options[-1][0] if options else 0.0
        options += [(max(last, seconds), candidate) for seconds, candidate in more]
    return answers


def rank_by_estimate(
    family: Family, problem: Record, device: Device
) -> tuple[Rows, NDArray[np.float64]]:
    """Return all legal configs and their seconds by the family's analytic estimate, ascending."""
    rows = np.flatnonzero(family.legal(problem, device))
    seconds = family.estimate_s(problem, device, rows)
    order = np.argsort(seconds, kind="stable")
    return rows[order], seconds[order]


#: The last column of the gate's features: the family's number among those of the gate.
FAMILY = "family"
#: A family that lags behind the first one by more than this logarithm is left out (decision 166).
MARGIN = 0.10


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of a model, learned from problems that several `families` compute.

    Attributes:
        lag: regressor of log(time of a family's best config / time of the best of all families'),
            from the operation's features and the family.
    """

    operation: Operation
    families: tuple[str, ...]
    lag: Trees

    def open(
        self, problems: Sequence[Record], device: Device, serving: Sequence[Sequence[str]]
    ) -> list[list[str]]:
        """Return the families to compare for each problem, of those `serving` it. Families that the
        gate was not trained on are always kept."""
        opened = [list(names) for names in serving]
        gated = [[name for name in names if name in self.families] for names in serving]
        asked = {i: names for i, names in enumerate(gated) if len(names) > 1}
        if not asked:
            return opened
        some, groups = [problems[i] for i in asked], [*asked.values()]
        matrix = gate_features(self.operation, some, device, self.families, groups)
        lags = self.lag.predict(matrix).tolist()
        for i, names in asked.items():
            mine, lags = lags[: len(names)], lags[len(names) :]
            behind = min(mine) + MARGIN
            closed = {name for name, lag in zip(names, mine, strict=True) if lag > behind}
            opened[i] = [name for name in opened[i] if name not in closed]
        return opened


def gate_features(
    operation: Operation,
    problems: Sequence[Record],
    device: Device,
    families: Sequence[str],
    asked: Sequence[Sequence[str]],
) -> NDArray[np.float32]:
    """Return the input of a gate's trees: for each of `problems`, a row for each family `asked` for
    it."""
    own = operation_features(operation, problems, device)
    places = [families.index(name) for names in asked for name in names]
    matrix = np.empty((len(places), own.shape[1] + 1), np.float32)
    matrix[:, :-1] = np.repeat(own, [len(names) for names in asked], axis=0)
    matrix[:, -1] = places
    return matrix


@dataclass(frozen=True, slots=True)
class PytorchModel:
    """A model of PyTorch's own operator, which has no configs.

    Attributes:
        ratio: regressor of log(its time / time of the fastest config), from `pytorch_features`;
            large ratios are clipped in training (`confpred.training.calibrate`).
        margins: least value of that logarithm at which the config is preferred, by the problem's
            kind; PyTorch's operator is preferred for a kind that is missing.
    """

    operation: Operation
    ratio: Trees
    margins: Mapping[str, float]

    def log_ratios(self, problems: Sequence[Record], device: Device) -> NDArray[np.float64]:
        """Return the expected log(its time / time of the fastest config), for each problem."""
        return self.ratio.predict(pytorch_features(self.operation, problems, device))

    def slowdowns(self, problems: Sequence[Record], device: Device) -> list[tuple[float, float]]:
        """Return how many times as long as the fastest config it takes, expected and at least."""
        ratios = self.log_ratios(problems, device).tolist()
        margins = [self.margins.get(problem.kind, inf) for problem in problems]
        return [(exp(r), exp(r - margin)) for r, margin in zip(ratios, margins, strict=True)]


def pytorch_feature_names(operation: Operation) -> tuple[str, ...]:
    """Return the columns of `pytorch_features`."""
    return (*operation.feature_names, DEVICE)


def pytorch_features(
    operation: Operation, problems: Sequence[Record], device: Device
) -> NDArray[np.float32]:
    """Return the features of each of `problems` alone, and the device's: a row each."""
    own = operation_features(operation, problems, device)
    matrix = np.empty((len(own), own.shape[1] + 1), np.float32)
    matrix[:, :-1] = own
    matrix[:, -1] = bandwidth(device)
    return matrix


def with_pytorch(
    options: Options, slowdown: tuple[float, float] | None, fastest_s: float | None = None
) -> Options:
    """Put PyTorch's operator among `options`, before those that do not beat it even if its time is
    overestimated.

    Args:
        options: configs, fastest first.
        slowdown: see `PytorchModel.slowdowns`; None without such a model.
        fastest_s: seconds of the fastest config, if it is not among `options`.
    """
    if not options or slowdown is None:
        return options
    best = options[0][0] if fastest_s is None else fastest_s
    expected, least = (best * times for times in slowdown)
    place = sum(seconds <= least for seconds, _ in options)
    return [*options[:place], (expected, PYTORCH_OPERATOR), *options[place:]]
