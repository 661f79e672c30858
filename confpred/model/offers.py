"""The candidates of problems: the portfolio's legal configs, with their features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Batched, Family
from confpred.families.several import Several
from confpred.model.cascade import Pairs
from confpred.model.pools import Pool
from confpred.problem.device import Device
from confpred.problem.record import Record


class Offer:
    """A family's portfolio, prepared so that a prediction looks at no other config. Immutable."""

    def __init__(self, family: Family, pool: Pool, portfolio: NDArray[np.bool_]) -> None:
        """Of the configs in the mask `portfolio`, described in the columns of `pool`."""
        self._family, self._pool, self._portfolio = family, pool, portfolio
        self._rows = np.flatnonzero(portfolio)
        self._batched = family if isinstance(family, Batched) else None
        self._table = None if self._batched is None else self._batched.table(self._rows)

    def serves(self, problem: Record) -> bool:
        """Whether the family may compute `problem`, which can be told in a microsecond; its
        candidates may turn out to be none."""
        return self._batched is None or self._batched.serves(problem)

    def pairs(self, problems: Sequence[Record], device: Device) -> Pairs:
        """Each problem with its candidates: the portfolio's legal configs, or all legal ones where
        the portfolio has none."""
        found: list[Pairs] = []
        served = [i for i, problem in enumerate(problems) if self.serves(problem)]
        left = dict.fromkeys(served)
        if self._batched is not None and served:
            pairs = self._together([problems[i] for i in served], device)
            found.append(Pairs(np.array(served)[pairs.index], pairs.rows, pairs.features))
            for i in np.unique(found[0].index).tolist():
                del left[i]
        found += [self._alone(i, problems[i], device) for i in left]
        if len(found) == 1:
            return found[0]
        if not found:
            found = [self._alone(0, problems[0], device)]
        pairs = Pairs(
            np.concatenate([each.index for each in found]),
            np.concatenate([each.rows for each in found]),
            np.concatenate([each.features for each in found]),
        )
        return pairs.at(np.argsort(pairs.index, kind="stable"))

    def _together(self, problems: Sequence[Record], device: Device) -> Pairs:
        """The candidates in the portfolio; all `problems` are served."""
        assert self._batched is not None
        problem = problems[0] if len(problems) == 1 else Several(problems)
        problem, at = self._batched.offered(problem, device, self._table)
        own = self._batched.described(problem, device, self._table, at)
        index = problem.index if isinstance(problem, Several) else np.zeros(len(at), np.intp)
        return Pairs(index, self._rows[at], self._pool.spread(self._family, own))

    def _alone(self, index: int, problem: Record, device: Device) -> Pairs:
        """The candidates of one problem, found in the whole table."""
        legal = self._family.legal(problem, device)
        rows = np.flatnonzero(legal & self._portfolio)
        rows = rows if len(rows) else np.flatnonzero(legal)
        features = self._pool.features(self._family, problem, device, rows)
        return Pairs(np.full(len(rows), index), rows, features)
