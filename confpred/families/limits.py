"""Which configs of a family keep within a caller's limits."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Family, Rows
from confpred.problem.limits import UNLIMITED, Limits


@runtime_checkable
class Bounded(Protocol):
    """A family that says itself which of its configs keep within limits: one whose launches take
    long to lay out, do not tell, or are less exact than PyTorch's own operator."""

    def allowed(self, problem: Any, rows: Rows, limits: Limits) -> NDArray[np.bool_]:
        """A mask over `rows`, which are legal for `problem`."""
        ...


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
    if isinstance(family, Bounded):
        return rows[family.allowed(problem, rows, limits)]
    if limits == UNLIMITED:
        return rows
    launches = (family.launch(problem, int(row)) for row in rows)
    kept = np.fromiter((limits.allow(problem, launch) for launch in launches), np.bool_, len(rows))
    return rows[kept]
