"""The candidates of problems: the portfolio's legal configs, with their features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Batched, Family, Rows
from confpred.families.several import Several
from confpred.model.cascade import Pairs
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

    @property
    def is_batched(self) -> bool:
        """Whether the family is one of formulas (`confpred.families.protocol.Batched`)."""
        return self._batched is not None

    def serves(self, problem: Record) -> bool:
        """Whether the family may compute `problem`, which can be told in a microsecond; its
        candidates may turn out to be none."""
        return self._batched is None or self._batched.serves(problem)

    def pairs(self, problems: Several, device: Device) -> Pairs:
        """Each problem with its candidates: the portfolio's legal configs, or all legal ones where
        the portfolio has none."""
        served = [i for i, problem in enumerate(problems.problems) if self.serves(problem)]
        if self._batched is None or not served:
            return _joined([self._alone(i, problems.problems[i], device) for i in served])
        part = problems.part(served)
        found, at, workings = self._batched.offered(part, device, self._table)
        features = self._batched.described(found, device, self._table, at, workings)
        rows = self._rows[at]
        counts = np.bincount(_index(found, at), minlength=len(served))
        bounds = [0, *np.cumsum(counts).tolist()]
        if self._registers is not None:
            known = [
                self._registers.of(problems.problems[i], rows[start:end])
                for i, start, end in zip(served, bounds, bounds[1:], strict=False)
            ]
            self._registers.correct(features, np.concatenate(known), device)
        features = self._pool.spread(self._family, features, device)
        if len(served) == 1 and len(rows):
            return Pairs.of_one(rows, features, served[0])
        if counts.all():
            return Pairs(served, bounds, rows, features)
        return _joined(
            [
                Pairs.of_one(rows[of_one], features[of_one], i)
                if of_one.start < of_one.stop
                else self._alone(i, problems.problems[i], device)
                for i, of_one in zip(served, map(slice, bounds, bounds[1:]), strict=False)
            ]
        )

    def _alone(self, place: int, problem: Record, device: Device) -> Pairs:
        """The candidates of one problem, found in the whole table."""
        legal = self._family.legal(problem, device)
        rows = np.flatnonzero(legal & self._portfolio)
        rows = rows if len(rows) else np.flatnonzero(legal)
        features = self._pool.features(self._family, problem, device, rows, self._registers)
        return Pairs.of_one(rows, features, place)


def _index(found: Several, at: Rows) -> Rows:
    """Which problem each pair is of."""
    return np.zeros(len(at), np.intp) if found.index is None else found.index


def _joined(each: Sequence[Pairs]) -> Pairs:
    """The pairs of several problems in one."""
    each = [pairs for pairs in each if pairs.places]
    if not each:
        return Pairs([], [0], np.empty(0, np.intp), np.empty((0, 0), np.float32))
    return Pairs(
        [pairs.places[0] for pairs in each],
        [0, *np.cumsum([len(pairs.rows) for pairs in each]).tolist()],
        np.concatenate([pairs.rows for pairs in each]),
        np.concatenate([pairs.features for pairs in each]),
    )
