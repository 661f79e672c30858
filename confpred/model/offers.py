"""The candidates of problems: the portfolio's legal configs, with their features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Batched, Family, Rows
from confpred.families.several import Several
from confpred.model.cascade import ESTIMATE, Pairs, near_best
from confpred.model.pools import Pool
from confpred.model.registers import Registers
from confpred.problem.device import Device
from confpred.problem.record import Record


class Offer:
    """A family's portfolio, prepared so that a prediction looks at no other config. Immutable."""

    def __init__(
        self,
        family: Family,
        pool: Pool,
        portfolio: NDArray[np.bool_],
        registers: Registers | None = None,
    ) -> None:
        """Of the configs in the mask `portfolio`, described in the columns of `pool`, with what is
        known of their `registers`."""
        self._family, self._pool, self._portfolio = family, pool, portfolio
        self._registers = registers
        self._rows = np.flatnonzero(portfolio)
        self._batched = family if isinstance(family, Batched) else None
        self._table = None if self._batched is None else self._batched.table(self._rows)
        by_estimate = self._batched is not None and ESTIMATE in family.feature_names
        self._estimate = family.feature_names.index(ESTIMATE) if by_estimate else None

    def serves(self, problem: Record) -> bool:
        """Whether the family may compute `problem`, which can be told in a microsecond; its
        candidates may turn out to be none."""
        return self._batched is None or self._batched.serves(problem)

    def pairs(self, problems: Several, device: Device) -> Pairs:
        """Each problem with its candidates: the portfolio's legal configs, or all legal ones where
        the portfolio has none; less those that the family's own estimate leaves out."""
        served = [i for i, problem in enumerate(problems.problems) if self.serves(problem)]
        if self._batched is None or not served:
            return _joined([self._alone(i, problems.problems[i], device) for i in served])
        part = problems.part(served)
        found, at, workings = self._batched.offered(part, device, self._table)
        columns = self._batched.described(found, device, self._table, at, workings)
        counts = np.bincount(_index(found, at), minlength=len(served)).tolist()
        places = [i for i, count in zip(served, counts, strict=True) if count]
        some = [problems.problems[i] for i in places]
        counts = [count for count in counts if count]
        pairs = self._described(places, counts, self._rows[at], columns, some, device)
        rest = [i for i in served if i not in places]
        alone = [self._alone(i, problems.problems[i], device) for i in rest]
        return _joined([pairs, *alone]) if alone else pairs

    def of_rows(self, rows: Rows, problem: Record, device: Device, place: int = 0) -> Pairs:
        """Some configs for one problem, less those that the family's own estimate leaves out."""
        columns = self._family.features(problem, device, rows).T
        return self._described([place], [len(rows)], rows, columns, [problem], device)

    def _described(
        self,
        places: Sequence[int],
        counts: Sequence[int],
        rows: Rows,
        columns: NDArray[np.float32],
        problems: Sequence[Record],
        device: Device,
    ) -> Pairs:
        """The pairs of the problems at some places, which have so many of `rows` each: what is near
        the best by the estimate in `columns`, the family's own features, described to the trees."""
        if not len(rows):
            return _joined([])
        bounds = _bounds(counts)
        if self._estimate is not None:
            estimate = columns[self._estimate]
            kept = [start + near_best(estimate[start:end]) for start, end in pairwise(bounds)]
            at, bounds = np.concatenate(kept), _bounds(map(len, kept))
            rows, columns = rows[at], columns[:, at]
        if self._registers is not None:
            each = zip(problems, pairwise(bounds), strict=True)
            known = [self._registers.of(p, rows[start:end]) for p, (start, end) in each]
            self._registers.correct(columns, np.concatenate(known), device)
        return Pairs(places, bounds, rows, self._pool.spread(self._family, columns, device))

    def _alone(self, place: int, problem: Record, device: Device) -> Pairs:
        """The candidates of one problem, found in the whole table."""
        legal = self._family.legal(problem, device)
        rows = np.flatnonzero(legal & self._portfolio)
        rows = rows if len(rows) else np.flatnonzero(legal)
        return self.of_rows(rows, problem, device, place)


def _index(found: Several, at: Rows) -> Rows:
    """Which problem each pair is of."""
    return np.zeros(len(at), np.intp) if found.index is None else found.index


def _bounds(counts: Iterable[int]) -> list[int]:
    """Where the pairs of each problem begin that has so many, and where the last one's end."""
    return [0, *accumulate(counts)]


def _joined(each: Sequence[Pairs]) -> Pairs:
    """The pairs of several problems in one."""
    each = [pairs for pairs in each if pairs.places]
    if not each:
        return Pairs([], [0], np.empty(0, np.intp), np.empty((0, 0), np.float32))
    return Pairs(
        [place for pairs in each for place in pairs.places],
        _bounds(part.stop - part.start for pairs in each for part in pairs.parts()),
        np.concatenate([pairs.rows for pairs in each]),
        np.concatenate([pairs.features for pairs in each]),
    )
