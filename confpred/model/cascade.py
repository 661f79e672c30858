"""Which candidates are the best, by few trees for many and many trees for few.

The first trees of an ensemble correct the most, so they tell which candidates are not among the
best; the whole ensemble orders the others. That is a fraction of the work and nearly always ends at
the same winner: `benchmarks/predict_latency.py` counts the exceptions, and tells what they cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Rows
from confpred.model.trees import Trees

#: Candidates that the family's own estimate expects to take more than so many times as long as the
#: best by it, to base 2, are left out: nearly half of them.
ESTIMATE, WITHIN = "log_estimate", 0.8
#: Then the first so many trees leave so many candidates of a problem. Measured on networks that the
#: trees had not seen, with 200 candidates a problem: the best of the finalists is 0.06 % slower
#: than the best of all, both by the whole ensemble, and 2 % at worst. The first 20 trees alone,
#: with 16 finalists, lose as much and take twice as many evaluations of a tree.
STAGES = ((10, 32), (50, 6))


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Problems with their candidates of one family.

    Attributes:
        index: which problem each pair is of, rising.
        rows: which row of the family's config table.
        features: of each pair, as the trees take them.
    """

    index: Rows
    rows: Rows
    features: NDArray[np.float32]

    def at(self, places: Rows | NDArray[np.bool_]) -> Pairs:
        """Some of the pairs; `places` keeps each problem's together."""
        return Pairs(self.index[places], self.rows[places], self.features[places])

    def first(self) -> Rows:
        """The place of the first pair of each problem that has one."""
        return np.flatnonzero(np.diff(self.index, prepend=-1))


def best_first(
    order: Trees, pairs: Pairs, *, runners_up: bool = False
) -> tuple[Pairs, NDArray[np.float64]]:
    """The best candidates of each problem, best first, and the logarithms of their costs.

    Args:
        order: regressor of the logarithm of a candidate's cost.
        pairs: the candidates.
        runners_up: whether those that only the last stage leaves out follow the finalists. They
            count as no better than the last of these, though the whole ensemble may say so.

    Returns:
        The candidates, and costs that never fall from one of a problem to the next.
    """
    pairs = _near(order, pairs)
    *early, (trees, most) = STAGES
    for few, many in early:
        pairs = pairs.at(_fewest(order, pairs, few, many))
    finalists = _fewest(order, pairs, trees, most)
    if not runners_up:
        pairs, finalists = pairs.at(finalists), finalists[finalists]
    cost = order.predict(pairs.features)
    ranked = np.lexsort((pairs.rows, cost, ~finalists, pairs.index))
    pairs, cost = pairs.at(ranked), cost[ranked]
    if runners_up:
        for part in np.split(cost, pairs.first()[1:]):
            np.maximum.accumulate(part, out=part)
    return pairs, cost


def _near(order: Trees, pairs: Pairs) -> Pairs:
    """The candidates that the family's own estimate does not rule out."""
    first = pairs.first()
    if ESTIMATE not in order.features or not len(first):
        return pairs
    estimate = pairs.features[:, order.features.index(ESTIMATE)]
    least = np.minimum.reduceat(estimate, first)
    counts = np.diff(first, append=len(estimate))
    return pairs.at(estimate <= np.repeat(least + np.float32(WITHIN), counts))


def _fewest(order: Trees, pairs: Pairs, trees: int, most: int) -> NDArray[np.bool_]:
    """The `most` candidates of each problem to which the first `trees` trees give the least cost."""
    first = pairs.first()
    counts = np.diff(first, append=len(pairs.rows))
    if counts.max(initial=0) <= most:
        return np.ones(len(pairs.rows), np.bool_)
    cost = order.predict(pairs.features, trees)
    kept = np.zeros(len(cost), np.bool_)
    for start, count in zip(first.tolist(), counts.tolist(), strict=True):
        kept[start + np.argsort(cost[start : start + count], kind="stable")[:most]] = True
    return kept
