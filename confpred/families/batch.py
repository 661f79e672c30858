"""Batches of problems, so that formulas written for one problem compute many at once.

A family's formulas are arithmetic on the numbers of a problem and the columns of its config table.
`ProblemBatch` has arrays under the same names in place of these numbers, so a formula takes as few
array operations for many problems as for one, with the same results to the bit. A function that
branches is called for each problem, by `ProblemBatch.map`. Results are cached, because formulas ask
for the same values again.
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

_Value = TypeVar("_Value")
_Shaped = Callable[[NDArray[Any]], NDArray[Any]]


class Workings(SimpleNamespace):
    """Arrays over some configs, under the names that a family's formulas give them."""


class ProblemBatch:
    """Problems of one operation. Immutable.

    An attribute that the problems have is an array of their values, or the value itself where it is
    the same for all, as of one problem alone; a tuple or a record becomes one of arrays.

    Attributes:
        problems: the problems of the batch.
        index: position in `problems` of the problem of each array element; None in a batch of one
            problem, and where arrays are columns of one element a problem, which broadcast against
            the rows of a table.
    """

    def __init__(self, problems: Sequence[Record]) -> None:
        self.problems = tuple(problems)
        self.index: Rows | None = None
        self._shaped: _Shaped = lambda values: values[:, None]
        self._flat: dict[Hashable, Any] = {}  # cached values, with one element a problem
        self._values: dict[Hashable, Any] = {}  # cached values in this view's shape

    def part(self, places: Sequence[int]) -> ProblemBatch:
        """Return the batch of the problems at `places`."""
        if len(places) == len(self.problems):
            return self
        return ProblemBatch([self.problems[i] for i in places])

    def at(self, index: Rows) -> ProblemBatch:
        """Return the same problems, with arrays of an element for each of `index`."""
        view = self._view(lambda values: values[index])
        view.index = index
        return view

    def map(self, function: Callable[[Any], _Value]) -> _Value:
        """Return the values of `function`, which is called for each problem."""
        value = self._cache(function, lambda: _stacked([function(p) for p in self.problems]))
        return cast("_Value", value)

    each = map  # its former name, for families of plug-ins

    def once(self, formula: Callable[[Any], _Value]) -> _Value:
        """Return the value of `formula` for the whole batch, with one element a problem."""
        value = self._cache(formula, lambda: formula(self._view(lambda values: values)))
        return cast("_Value", value)

    def each_row(self, function: Callable[[Any], _Value], at: Rows | None = None) -> _Value:
        """Return the arrays that `function` computes of a problem over the rows of a table, at the
        rows `at` (default: all); of several problems, at the pairs of `index` and `at`."""
        arrays = [function(p) for p in self.problems]
        if len(arrays) == 1:
            return arrays[0] if at is None else picked(arrays[0], at)
        # Problems that share their arrays share one row of them.
        distinct = {id(value): value for value in arrays}
        places = {array: place for place, array in enumerate(distinct)}
        which = np.array([places[id(value)] for value in arrays])
        chosen: Any = which if at is None else (which[self.index], at)
        return picked(_rows_of([*distinct.values()]), chosen)

    def pairs(self, rows: Rows, kept: Mask) -> tuple[ProblemBatch, Rows]:
        """Return the `kept` rows; of several problems, the pairs of a problem and a kept row,
        problem by problem and in the order of `rows`.

        Args:
            rows: row numbers of a table.
            kept: mask of the shape to which the problems' arrays and `rows` broadcast.
        """
        if len(self.problems) == 1:
            return self, rows[kept]
        if self.index is not None:
            return self.at(self.index[kept]), rows[kept]
        index, at = np.nonzero(np.broadcast_to(kept, (len(self.problems), len(rows))))
        return self.at(index), rows[at]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look for such names
            raise AttributeError(name)
        value = self._cache(name, lambda: _stacked([getattr(p, name) for p in self.problems]))
        self.__dict__[name] = value  # the next access does not come here
        return value

    def _view(self, shaped: _Shaped) -> ProblemBatch:
        view = ProblemBatch(self.problems)
        view._flat, view._shaped = self._flat, shaped
        return view

    def _cache(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        value = self._values.get(key)
        if value is None:
            if key not in self._flat:
                self._flat[key] = compute()
            value = self._flat[key]
            if len(self.problems) > 1:
                value = _mapped(value, self._shaped)
            self._values[key] = value
        return value


def picked(record: _Value, kept: Any) -> _Value:
    """Return a record of arrays at the elements `kept`: a mask, or the number of one."""
    return cast("_Value", _mapped(record, lambda values: values[kept]))


def _rows_of(values: Sequence[Any]) -> Any:
    """Return the arrays of several problems stacked as rows, of one array or of one `Workings`."""
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
        fields = [_stacked([getattr(v, name) for v in values]) for name in _fields(first)]
        return cast("Any", type(first))(*fields)
    return np.array(values)


def _mapped(value: Any, shaped: _Shaped) -> Any:
    """Return `value` with `shaped` applied to each of its arrays."""
    if isinstance(value, np.ndarray):
        return shaped(value)
    if isinstance(value, tuple):
        return tuple(_mapped(part, shaped) for part in value)
    if isinstance(value, dict):
        return {name: _mapped(part, shaped) for name, part in value.items()}
    if isinstance(value, Workings):
        return Workings(**_mapped(vars(value), shaped))
    if dataclasses.is_dataclass(value):
        names = _fields(value)
        return cast("Any", type(value))(*(_mapped(getattr(value, n), shaped) for n in names))
    return value


def _fields(record: Any) -> Sequence[str]:
    """Return the names of a record's fields; `dataclasses.fields` takes a microsecond more."""
    return [*record.__dataclass_fields__]
