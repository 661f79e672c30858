"""Which candidates are the best, by few trees for many and many trees for few.

The first trees of an ensemble correct the most, so they tell which candidates are not among the
best; the next ones are added for the others alone, and all trees for the last of these. That is a
fraction of the work and nearly always ends at the same winner: `benchmarks/predict_latency.py`
counts the exceptions, and tells what they cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Rows
from confpred.model.trees import Trees

#: Candidates that the family's own estimate expects to take more than so many times as long as the
#: best by it, to base 2, are left out, and so are those behind the first so many: more than half of
#: them. That is for families whose estimates count what a kernel does, as this package's do; by the
#: rough one of a plug-in it made a regret of 1.02 one of 1.10 (`examples/`).
ESTIMATE, WITHIN, MOST = "log_estimate", np.float32(0.8), 144
#: Then the first so many trees leave so many candidates of a problem. Of layers that the trees had
#: not seen, the best of the finalists is 0.3 % slower than the best of all, both by all trees, and
#: 10 % at worst (decision 144).
STAGES = ((10, 32), (40, 12), (100, 6))
FINALISTS = STAGES[-1][1]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Problems with their candidates of one family.

    Attributes:
        places: which problems have candidates.
        bounds: where the pairs of each of these begin, and where the last one's end.
        rows: which row of the family's config table each pair is of.
        features: of each pair, as the trees take them.
    """

    places: Sequence[int]
    bounds: Sequence[int]
    rows: Rows
    features: NDArray[np.float32]

    @property
    def starts(self) -> Sequence[int]:
        """Where the pairs of each problem begin."""
        return self.bounds[:-1]

    @property
    def index(self) -> Rows:
        """Which of `places` each pair is of."""
        if len(self.places) == 1:
            return np.zeros(len(self.rows), np.intp)
        return np.repeat(np.arange(len(self.places)), np.diff(self.bounds))

    @property
    def longest(self) -> int:
        """The most pairs that a problem has."""
        return max(end - start for start, end in pairwise(self.bounds))

    def parts(self) -> Iterator[slice]:
        """The pairs of each problem."""
        return map(slice, self.bounds, self.bounds[1:])

    def pick(self, kept: Rows) -> Pairs:
        """Some of each problem's pairs: at least one of each, and those of a problem together."""
        if len(self.places) == 1:
            bounds = [0, len(kept)]
        else:
            bounds = [0, *np.cumsum(np.bincount(self.index[kept])).tolist()]
        return Pairs(self.places, bounds, self.rows[kept], self.features[kept])

    def sorted(self, *keys: NDArray[Any]) -> Rows:
        """The pairs with those of each problem in the order of `keys`, of which the last one is the
        first to count; what is equal keeps its order."""
        found: Rows = np.lexsort(keys if len(self.places) == 1 else (*keys, self.index))
        return found

    def first(self, cost: NDArray[np.float64], most: int) -> Rows:
        """The `most` pairs of each problem that have the least `cost`, best first."""
        at = self.sorted(cost)
        if len(self.places) == 1:
            return at[:most]
        ranks = np.arange(len(at)) - np.repeat(self.starts, np.diff(self.bounds))
        found: Rows = at[ranks < most]
        return found


def near_best(estimate: NDArray[np.float32]) -> Rows:
    """The candidates of a problem that are among the best by `estimate`, a logarithm to base 2."""
    most = estimate.min() + WITHIN
    if len(estimate) > MOST:
        most = min(most, np.partition(estimate, MOST - 1)[MOST - 1])
    return np.flatnonzero(estimate <= most)


def best_first(
    order: Trees, pairs: Pairs, *, runners_up: bool = False
) -> tuple[Pairs, NDArray[np.float64]]:
    """The best candidates of each problem, best first, and the logarithms of their costs.

    Args:
        order: regressor of the logarithm of a candidate's cost.
        pairs: the candidates.
        runners_up: whether those that the first stage does not leave out follow the finalists. They
            count as no better than the last of these, though all trees may say so.

    Returns:
        The candidates, and costs that never fall from one of a problem to the next.
    """
    if not pairs.places:
        return pairs, np.empty(0)
    cost, done, late = np.zeros(len(pairs.rows)), 0, None
    for number, (trees, most) in enumerate(STAGES):
        # Part by part even where nobody is left out, so that a candidate's cost, a sum over the
        # parts, depends on no other candidate or problem.
        cost += order.predict(pairs.features, done, trees)
        done = trees
        if pairs.longest <= most:
            continue
        if runners_up and number:
            at = pairs.first(cost if late is None else np.where(late, np.inf, cost), most)
            late = np.ones(len(cost), np.bool_)
            late[at] = False
        else:
            at = pairs.first(cost, most)
            pairs, cost = pairs.pick(at), cost[at]
    cost += order.predict(pairs.features, done)
    at = pairs.sorted(pairs.rows, cost) if late is None else pairs.sorted(pairs.rows, cost, late)
    pairs, cost = pairs.pick(at), cost[at]
    if late is not None:
        for part in pairs.parts():
            cost[part] = np.maximum.accumulate(cost[part])
    return pairs, cost
