"""Shared parts of families with formulas over a config table: answers for a part of the table,
and for several problems at once."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import Recent
from confpred.families.batch import narrowed, picked
from confpred.families.common import feature_columns
from confpred.families.protocol import Array, Rows
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device

_Found = TypeVar("_Found")
#: How much a table keeps of what was worked out of it, or up to twice as much.
_KEPT = 256


def crossed(*parts: Sequence[int] | Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the rows of ``itertools.product(*parts)``, those of tuples as their numbers; every
    process that loads the families makes their tables, and this takes a tenth of the time."""
    columns = [np.array(part, np.int32).reshape(len(part), -1) for part in parts]
    places = np.indices([len(part) for part in parts]).reshape(len(parts), -1)
    return np.hstack([part[place] for part, place in zip(columns, places, strict=True)])


def config_table(
    fields: Sequence[str], rows: Iterable[Iterable[int]] | NDArray[np.int32]
) -> NDArray[np.void]:
    """Return a read-only config table; the values of `rows` are in the order of `fields`."""
    if not isinstance(rows, np.ndarray):
        # Number by number takes a quarter of the time that a record by record takes.
        rows = np.fromiter(itertools.chain.from_iterable(rows), np.int32)
    numbers = rows.reshape(-1, len(fields))
    configs = numbers.view([(name, np.int32) for name in fields]).reshape(-1)
    configs.setflags(write=False)
    return configs


def config_columns(configs: NDArray[np.void], rows: Rows | slice = slice(None)) -> dict[str, Array]:
    """Return the fields of some rows by name, contiguous and wide enough for products of sizes."""
    names: Any = configs.dtype.names
    return {name: configs[name][rows].astype(np.int64) for name in names}


def columns_at(columns: Mapping[str, Array], rows: Rows | slice) -> dict[str, Array]:
    """Return some rows of the columns of a config table."""
    return {name: column[rows] for name, column in columns.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A part of a family's config table, or all of it.

    Attributes:
        rows: which rows of the config table, rising.
        columns: their fields by name.
        kinds: some of the fields as they differ, and which of these each row has (`by`).
        known: what was worked out of it lately (`kept`).
    """

    rows: Rows
    columns: Mapping[str, Array]
    kinds: dict[tuple[str, ...], tuple[dict[str, Array], Rows]] = field(default_factory=dict)
    known: Recent[tuple[Any, ...], Any] = field(default_factory=lambda: Recent(_KEPT))

    @classmethod
    def of(cls, configs: NDArray[np.void], rows: Rows | None = None) -> Table:
        """Those `rows` of `configs`; by default, all."""
        rows = np.arange(len(configs)) if rows is None else rows
        return cls(rows, config_columns(configs, rows))

    def at(self, places: Rows) -> dict[str, Array]:
        """Return the fields of some of its rows, which are counted from 0."""
        return columns_at(self.columns, places)

    def by(
        self, names: tuple[str, ...], rule: Callable[[Mapping[str, Array]], NDArray[np.bool_]]
    ) -> NDArray[np.bool_]:
        """Return a `rule` of the fields `names` for each row. It is asked once for
        all rows that have the same, of which there are few kinds."""
        if names not in self.kinds:
            values = np.stack([self.columns[name] for name in names])
            kinds, of_row = np.unique(values, axis=1, return_inverse=True)
            self.kinds[names] = (dict(zip(names, kinds, strict=True)), of_row.reshape(-1))
        t, of_row = self.kinds[names]
        found: NDArray[np.bool_] = rule(t)[..., of_row]
        return found

    def kept(self, find: Callable[..., _Found], **asked: Hashable) -> _Found:
        """Return `find(self, **asked)`, and keep it as long as this table: what a model needs goes
        with the model."""
        key = (find, *asked.values())
        found: _Found | None = self.known.get(key)
        if found is None:
            found = find(self, **asked)
            self.known.put(key, found)
        return found


class Tabled(ABC):
    """Base of a `Family` of formulas, which is a `confpred.families.protocol.Batched`.

    A formula takes one problem, whose numbers are scalars, or a `ProblemBatch`, whose numbers are
    arrays. It also takes the fields `t` of some rows of the table, by name.

    Attributes:
        name, configs, feature_names: as of a `Family`.
        whole: its whole config table.
        direction: of its problems.
        operands: the kernel's pointers, in its order.
        shared_features: the columns that all directions of the kernel have.
    """

    operation = CONVOLUTION
    configs: NDArray[np.void]
    whole: Table
    shared_features: tuple[str, ...]

    def __init__(
        self,
        name: str,
        direction: str,
        operands: tuple[str, ...],
        own_features: tuple[str, ...] = (),
    ) -> None:
        self.name, self.direction, self.operands = name, direction, operands
        self.feature_names: tuple[str, ...] = (*self.shared_features, *own_features)

    def serves(self, problem: Problem) -> bool:
        """Return whether some config may compute `problem`, by the rules that need no config."""
        return problem.direction == self.direction and self._handles(problem)

    @abstractmethod
    def _handles(self, problem: Problem) -> bool:
        """Return whether the kernel computes layers such as `problem`, of its direction."""

    @abstractmethod
    def _first(self, problem: Any, device: Device, table: Table) -> NDArray[np.bool_]:
        """Return the rows of `table` that keep the cheap rules, so that most need no others."""

    def _rules(self, problem: Any, device: Device, t: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which of the rows left by `_first` are legal."""
        raise NotImplementedError

    @abstractmethod
    def _workings(self, problem: Any, table: Table, at: Rows) -> Any:
        """Return a record of arrays over the rows `at`, which rules and features both need."""

    @abstractmethod
    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], workings: Any
    ) -> dict[str, NDArray[np.float64]]:
        """Return the derived features of some rows, and ``estimate`` in seconds."""

    def offered(self, problem: Any, device: Device, table: Table) -> tuple[Any, Rows, Any]:
        """Return the legal pairs; see `confpred.families.protocol.Batched`."""
        first = self._first(problem, device, table)
        problem, at = narrowed(problem, np.arange(len(table.rows)), first)
        problem, at = narrowed(problem, at, self._rules(problem, device, table.at(at)))
        return problem, at, self._workings(problem, table, at)

    def legal(self, problem: Problem, device: Device) -> NDArray[np.bool_]:
        legal = np.zeros(len(self.configs), np.bool_)
        if self.serves(problem):
            legal[self.offered(problem, device, self.whole)[1]] = True
        return legal

    def estimate_s(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float64]:
        workings = self._workings(problem, self.whole, rows)
        return self._derived(problem, device, self.whole.at(rows), workings)["estimate"]

    def features(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float32]:
        workings = self._workings(problem, self.whole, rows)
        columns = self.described(problem, device, self.whole, rows, workings)
        return np.ascontiguousarray(columns.T)

    def table(self, rows: Rows) -> Table:
        """Return a part of the config table."""
        return Table.of(self.configs, rows)

    def described(
        self, problem: Any, device: Device, table: Table, at: Rows, workings: Any
    ) -> NDArray[np.float32]:
        """Return the features; see `confpred.families.protocol.Batched`."""
        t = table.at(at)
        derived = self._derived(problem, device, t, workings)
        return feature_columns(self.feature_names, problem, device, t, derived)


class Tiled(Tabled):
    """Base of families whose rules and features need the tiles that a config cuts a problem into:
    a record of arrays over configs."""

    @abstractmethod
    def _tiling(self, problem: Any, t: Mapping[str, Array]) -> Any:
        """Return the tiles, resources and work of configs on `problem`. The kernel works some of
        this out from its macros too, and asserts that both agree (see `launch`)."""

    @abstractmethod
    def _tiled_rules(
        self, problem: Any, device: Device, t: Mapping[str, Array], tiling: Any
    ) -> NDArray[np.bool_]:
        """Return which of the rows left by `_first` are legal."""

    def offered(self, problem: Any, device: Device, table: Table) -> tuple[Any, Rows, Any]:
        first = self._first(problem, device, table)
        problem, at = narrowed(problem, np.arange(len(table.rows)), first)
        t = table.at(at)
        tiling = self._tiling(problem, t)
        legal = self._tiled_rules(problem, device, t, tiling)
        problem, at = narrowed(problem, at, legal)
        return problem, at, picked(tiling, legal)

    def _workings(self, problem: Any, table: Table, at: Rows) -> Any:
        return self._tiling(problem, table.at(at))

    def _cut_for(self, problem: Problem, row: int) -> Any:
        """Return the tiling of config `row` alone, arrays of one element."""
        return self._tiling(problem, self.whole.at(np.array([row])))
