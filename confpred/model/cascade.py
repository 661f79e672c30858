"""Which candidates are the best, by few trees for many and many trees for few.

The first trees of an ensemble correct the most, so they tell which candidates are not among the
best; the whole ensemble orders the others. That is a fraction of the work and nearly always ends at
the same winner: `benchmarks/predict_latency.py` counts the exceptions, and tells what they cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Rows
from confpred.model.trees import Trees

#: Candidates that the family's own estimate expects to take more than so many times as long as the
#: best by it, to base 2, are left out: nearly half of them. That is for families whose estimates
#: count what a kernel does, as this package's do; by the rough one of a plug-in it made a regret of
#: 1.02 one of 1.10 (`examples/`).
ESTIMATE, WITHIN = "log_estimate", np.float32(0.8)
#: Then the first so many trees leave so many candidates of a problem. Measured on networks that the
#: trees had not seen, with 200 candidates a problem: the best of the finalists is 0.06 % slower
#: than the best of all, both by the whole ensemble, and 2 % at worst. The first 20 trees alone,
#: with 16 finalists, lose as much and take twice as many evaluations of a tree.
STAGES = ((10, 32), (50, 6))
FINALISTS = STAGES[-1][1]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Problems with their candidates of one family.

    Attributes:
        places: which problems have candidates, rising.
        bounds: where the pairs of each of these begin, and where the last one's end.
        rows: which row of the family's config table each pair is of.
        features: of each pair, as the trees take them.
    """

    places: Sequence[int]
    bounds: Sequence[int]
    rows: Rows
    features: NDArray[np.float32]

    @classmethod
    def of_one(cls, rows: Rows, features: NDArray[np.float32], place: int = 0) -> Pairs:
        """Those of one problem; of none if there are no `rows`."""
        found = bool(len(rows))
        return cls([place][:found], [0, len(rows)][: 1 + found], rows, features)

    def parts(self) -> Iterator[slice]:
        """The pairs of each problem."""
        return map(slice, self.bounds, self.bounds[1:])

    def pick(self, kept: Sequence[Rows]) -> Pairs:
        """Some of each problem's pairs, which are counted from 0 for each."""
        if len(kept) == 1:
            return Pairs(self.places, [0, len(kept[0])], self.rows[kept[0]], self.features[kept[0]])
        at = np.concatenate([start + each for start, each in zip(self.bounds, kept, strict=False)])
        bounds = [0, *np.cumsum([len(each) for each in kept]).tolist()]
        return Pairs(self.places, bounds, self.rows[at], self.features[at])


def best_first(
    order: Trees, pairs: Pairs, *, runners_up: bool = False, by_estimate: bool = True
) -> tuple[Pairs, NDArray[np.float64]]:
    """The best candidates of each problem, best first, and the logarithms of their costs.

    Args:
        order: regressor of the logarithm of a candidate's cost.
        pairs: the candidates.
        runners_up: whether those that only the last stage leaves out follow the finalists. They
            count as no better than the last of these, though the whole ensemble may say so.
        by_estimate: whether the family's estimate leaves candidates out.

    Returns:
        The candidates, and costs that never fall from one of a problem to the next.
    """
    if not pairs.places:
        return pairs, np.empty(0)
    if by_estimate and ESTIMATE in order.features:
        estimate = pairs.features[:, order.features.index(ESTIMATE)]
        parts = [estimate[part] for part in pairs.parts()]
        pairs = pairs.pick([np.flatnonzero(part <= part.min() + WITHIN) for part in parts])
    *early, (trees, most) = STAGES
    for few, many in early:
        if _longest(pairs) > many:
            pairs = pairs.pick([ranks[:many] for ranks in _ranks(order, pairs, few)])
    ranks = _ranks(order, pairs, trees) if _longest(pairs) > most else None
    if ranks is not None and not runners_up:
        pairs, ranks = pairs.pick([each[:most] for each in ranks]), None
    cost = order.predict(pairs.features)
    ranked = []
    for i, part in enumerate(pairs.parts()):
        rows, mine = pairs.rows[part], cost[part]
        late = np.zeros(len(rows), np.bool_)
        if ranks is not None:
            late[ranks[i][most:]] = True
        ranked.append(np.lexsort((rows, mine, late)))
        cost[part] = np.maximum.accumulate(mine[ranked[-1]])
    return pairs.pick(ranked), cost


def _longest(pairs: Pairs) -> int:
    """The most candidates that a problem has."""
    return max(b - a for a, b in zip(pairs.bounds, pairs.bounds[1:], strict=False))


def _ranks(order: Trees, pairs: Pairs, trees: int) -> list[Rows]:
    """The candidates of each problem by the cost that the first `trees` trees expect of them."""
    cost = order.predict(pairs.features, trees)
    return [np.argsort(cost[part], kind="stable") for part in pairs.parts()]
