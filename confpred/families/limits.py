"""Which configs of a family keep within a caller's limits."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Family, Lister, Rows
from confpred.problem.limits import UNLIMITED, Limits


@runtime_checkable
class Bounded(Protocol):
    """A family that says itself which of its configs keep within limits: one whose launches take
    long to lay out, do not tell, or are less exact than PyTorch's own operator."""

    def allowed(self, problem: Any, rows: Rows, limits: Limits) -> NDArray[np.bool_]:
        """A mask over `rows`, which are legal for `problem`."""
        ...


def is_free(family: Family) -> bool:
    """Whether all of its configs may run where nothing is limited, which need not be looked into:
    it is not `Bounded`, or a library's, whose plans are as exact as PyTorch's operator."""
    return isinstance(family, Lister) or not isinstance(family, Bounded)


#: How many launches are laid out at a time where only the first that keep within are asked for.
_SOME = 64


def first_within(family: Family, problem: Any, rows: Rows, limits: Limits, count: int) -> Rows:
    """The first `count` of `within`."""
    if limits == UNLIMITED or isinstance(family, Bounded):
        return within(family, problem, rows, limits)[:count]
    found = rows[:0]
    for start in range(0, len(rows), _SOME):
        some = within(family, problem, rows[start : start + _SOME], limits)
        found = np.concatenate([found, some])
        if len(found) >= count:
            break
    return found[:count]


def within(family: Family, problem: Any, rows: Rows, limits: Limits) -> Rows:
    """Those of `rows` that keep within `limits`."""
    if limits == UNLIMITED and is_free(family):
        return rows
    if isinstance(family, Bounded):
        return rows[family.allowed(problem, rows, limits)]
    launches = (family.launch(problem, int(row)) for row in rows)
    kept = np.fromiter((limits.allow(problem, launch) for launch in launches), np.bool_, len(rows))
    return rows[kept]
