"""Problems side by side, for formulas that are written for one.

A family's formulas are arithmetic on the numbers of a problem and the columns of its config table.
`ProblemBatch` has arrays in place of these numbers, under the same names, so that a formula
answers for many problems with as few array operations as for one; the answers are the same to the
bit. Decisions, which are no arithmetic, are worked out for each problem by `ProblemBatch.each`. All
that is asked for is kept, as a formula asks for many things again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Mask, Rows
from confpred.problem.record import Record

_Found = TypeVar("_Found")
_Shaped = Callable[[NDArray[Any]], NDArray[Any]]


class Workings(SimpleNamespace):
    """Arrays over some configs, by the names that a family's formulas give them."""


class ProblemBatch:
    """Problems of one operation. Immutable.

    An attribute that the problems have is an array of their values, or the value itself where it is
    the same for all, as of one problem alone; a tuple or a record becomes one of arrays.

    Attributes:
        problems: which.
        index: which of them each element of the arrays belongs to; None where the arrays are
            columns of one element a problem, which meet the rows of a table by broadcasting, and
            where there is but one problem.
    """

    def __init__(self, problems: Sequence[Record]) -> None:
        self.problems = tuple(problems)
        self.index: Rows | None = None
        self._shaped: _Shaped = lambda values: values[:, None]
        self._flat: dict[Hashable, Any] = {}  # what is known, with one element a problem
        self._known: dict[Hashable, Any] = {}  # the same in this view's shape

    def part(self, places: Sequence[int]) -> ProblemBatch:
        """Those of the problems at `places`."""
        if len(places) == len(self.problems):
            return self
        return ProblemBatch([self.problems[i] for i in places])

    def at(self, index: Rows) -> ProblemBatch:
        """Return the same problems, with arrays of an element for each of `index`."""
        found = self._view(lambda values: values[index])
        found.index = index
        return found

    def each(self, function: Callable[[Any], _Found]) -> _Found:
        """Return `function` of each problem."""
        found = self._find(function, lambda: _stacked([function(p) for p in self.problems]))
        return cast("_Found", found)

    def once(self, formula: Callable[[Any], _Found]) -> _Found:
        """Return `formula` of the batch, with one element a problem."""
        found = self._find(formula, lambda: formula(self._view(lambda values: values)))
        return cast("_Found", found)

    def each_row(self, function: Callable[[Any], _Found], at: Rows | None = None) -> _Found:
        """Return `function` of a problem, arrays over the rows of a table, at the rows `at`; where
        there are several problems, at the pairs of them and these rows. By default, at all rows."""
        found = [function(p) for p in self.problems]
        if len(found) == 1:
            return found[0] if at is None else picked(found[0], at)
        # Problems that share their arrays share one row of them.
        distinct = {id(value): value for value in found}
        places = {each: place for place, each in enumerate(distinct)}
        which = np.array([places[id(value)] for value in found])
        chosen: Any = which if at is None else (which[self.index], at)
        return picked(_rows_of([*distinct.values()]), chosen)

    def pairs(self, rows: Rows, kept: Mask) -> tuple[ProblemBatch, Rows]:
        """Return the rows that are `kept`; where there are several problems, the pairs of one of
        them and a row, those of a problem together and in the order of `rows`.

        Args:
            rows: of a table.
            kept: which; of the shape that the problems' arrays and `rows` have together.
        """
        if len(self.problems) == 1:
            return self, rows[kept]
        if self.index is not None:
            return self.at(self.index[kept]), rows[kept]
        index, at = np.nonzero(np.broadcast_to(kept, (len(self.problems), len(rows))))
        return self.at(index), rows[at]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # such as those by which copies and pickles are made
            raise AttributeError(name)
        found = self._find(name, lambda: _stacked([getattr(p, name) for p in self.problems]))
        self.__dict__[name] = found  # so that it is not asked for here again
        return found

    def _view(self, shaped: _Shaped) -> ProblemBatch:
        found = ProblemBatch(self.problems)
        found._flat, found._shaped = self._flat, shaped
        return found

    def _find(self, key: Hashable, find: Callable[[], Any]) -> Any:
        found = self._known.get(key)
        if found is None:
            if key not in self._flat:
                self._flat[key] = find()
            found = self._flat[key]
            if len(self.problems) > 1:
                found = _mapped(found, self._shaped)
            self._known[key] = found
        return found


def picked(record: _Found, kept: Any) -> _Found:
    """Return a record of arrays at the elements `kept`: a mask, or the number of one."""
    return cast("_Found", _mapped(record, lambda values: values[kept]))


def _rows_of(values: Sequence[Any]) -> Any:
    """Return the arrays of several problems, or those of their workings, as rows."""
    if isinstance(values[0], np.ndarray):
        return np.stack(values)
    return Workings(**{n: np.stack([getattr(v, n) for v in values]) for n in vars(values[0])})


def _stacked(values: Sequence[Any]) -> Any:
    """Return the values of several problems as one: an array, or the value that they all have."""
    first = values[0]
    if len(values) == 1 or all(value == first for value in values):
        return first
    if isinstance(first, tuple):
        return tuple(map(_stacked, zip(*values, strict=True)))
    if dataclasses.is_dataclass(first):
        found = [_stacked([getattr(v, name) for v in values]) for name in _fields(first)]
        return cast("Any", type(first))(*found)
    return np.array(values)


def _mapped(found: Any, shaped: _Shaped) -> Any:
    """`found` with each array in another shape."""
    if isinstance(found, np.ndarray):
        return shaped(found)
    if isinstance(found, tuple):
        return tuple(_mapped(value, shaped) for value in found)
    if isinstance(found, dict):
        return {name: _mapped(value, shaped) for name, value in found.items()}
    if isinstance(found, Workings):
        return Workings(**_mapped(vars(found), shaped))
    if dataclasses.is_dataclass(found):
        names = _fields(found)
        return cast("Any", type(found))(*(_mapped(getattr(found, n), shaped) for n in names))
    return found


def _fields(record: Any) -> Sequence[str]:
    """Return the names of a record's fields; `dataclasses.fields` takes a microsecond more."""
    return [*record.__dataclass_fields__]
