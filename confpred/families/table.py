"""Base classes of families whose legality, estimate and features are formulas over a config table;
the formulas compute parts of the table, and several problems at once."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from confpred.concurrency import Recent
from confpred.families.batch import ProblemBatch, Workings, picked
from confpred.families.common import kernel_step, problem_features
from confpred.families.protocol import Array, Columns, Family, Floats, Mask, Rows
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device
from confpred.problem.operation import Launch, Operation

_Value = TypeVar("_Value")
#: Results that a table caches: so many of the latest, or up to twice as many.
_KEPT = 256
#: Most problems that `legal_among` computes at a time, and the rows of all of them, about.
_PROBLEMS, _ROWS = 16, 640


def crossed(*parts: Sequence[int] | Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the rows of ``itertools.product(*parts)``, with tuples flattened, in a tenth of the
    time; every process that loads the families makes their tables."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A part of a family's config table, or all of it.

    Attributes:
        rows: row numbers in the config table, ascending.
        columns: fields of these rows by name.
        kinds: by names of fields: their distinct combinations of values, and the number of the
            combination that each row has (`by`).
        recent: the results computed last from this table (`kept`).
    """

    rows: Rows
    columns: Columns
    kinds: dict[tuple[str, ...], tuple[dict[str, Array], Rows]] = field(default_factory=dict)
    recent: Recent[tuple[Any, ...], Any] = field(default_factory=lambda: Recent(_KEPT))

    @classmethod
    def of(cls, configs: NDArray[np.void], rows: Rows | None = None) -> Table:
        """Return the table of some `rows` of `configs` (default: all)."""
        rows = np.arange(len(configs)) if rows is None else rows
        return cls(rows, config_columns(configs, rows))

    def at(self, places: Rows) -> dict[str, Array]:
        """Return the fields of some of this table's rows, numbered from 0."""
        return {name: column[places] for name, column in self.columns.items()}

    def by(self, names: tuple[str, ...], rule: Callable[[Columns], Mask]) -> Mask:
        """Return the mask of `rule`, which depends on the fields `names` alone, over all rows. The
        rule is computed once for each distinct combination of these fields, of which there are few.
        """
        if names not in self.kinds:
            values = np.stack([self.columns[name] for name in names])
            kinds, of_row = np.unique(values, axis=1, return_inverse=True)
            self.kinds[names] = (dict(zip(names, kinds, strict=True)), of_row.reshape(-1))
        t, of_row = self.kinds[names]
        mask: Mask = rule(t)[..., of_row]
        return mask

    def kept(self, find: Callable[..., _Value], *asked: Hashable) -> _Value:
        """Return `find(self, *asked)`, cached in this table, so that a model's results are freed
        with the model."""
        value: _Value | None = self.recent.get((find, *asked))
        if value is None:
            value = find(self, *asked)
            self.recent.put((find, *asked), value)
        return value


class Described(ABC):
    """Base of families whose features are the operation's, followed by some of `_derived`."""

    operation: Operation
    feature_names: tuple[str, ...]

    @abstractmethod
    def launch(self, problem: Any, row: int) -> Launch: ...

    @abstractmethod
    def _derived(self, problem: Any, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return features by name, and ``estimate`` in seconds."""

    def estimate_s(self, problem: Any, device: Device, rows: Rows) -> Floats:
        return self._derived(problem, device, rows)["estimate"]

    def features(self, problem: Any, device: Device, rows: Rows) -> NDArray[np.float32]:
        derived = self._derived(problem, device, rows)
        derived["log_estimate"] = np.log2(derived["estimate"] / device.roofline_s(problem))
        shared = np.repeat(self.operation.features(problem, device), len(rows), axis=0)
        own = [derived[name] for name in self.feature_names[shared.shape[1] :]]
        return np.column_stack([shared, *own]).astype(np.float32)


class Tabled(ABC):
    """Base of a `Family` of formulas, which is a `confpred.families.protocol.Batched`.

    A formula takes a `ProblemBatch`, whose numbers are scalars where they are the same for all
    problems and arrays where not, and the fields `t` of some rows of the table, by name.

    Attributes:
        name, configs, feature_names: see `Family`.
        whole: the whole config table, which all directions of the kernel share.
        kernel: the name of the kernel, and of its file without ``.cu``.
        direction: direction of the family's problems.
        operands: names of the kernel's pointers, in its order.
        shared_features: the columns that all directions of the kernel have.
    """

    operation = CONVOLUTION
    configs: NDArray[np.void]
    whole: Table
    kernel: str
    shared_features: tuple[str, ...]

    def __init_subclass__(cls) -> None:
        if "configs" in vars(cls):
            cls.whole = Table.of(cls.configs)

    def __init__(
        self,
        name: str,
        direction: str,
        operands: tuple[str, ...],
        own_features: tuple[str, ...] = (),
    ) -> None:
        self.name, self.direction, self.operands = name, direction, operands
        self.feature_names: tuple[str, ...] = (*self.shared_features, *own_features)
        self._step = partial(kernel_step, self.kernel, operands)

    def serves(self, problem: Problem) -> bool:
        """Return whether some config may compute `problem`, by the rules that need no config."""
        return problem.direction == self.direction and self._handles(problem)

    @abstractmethod
    def _handles(self, problem: Problem) -> bool:
        """Return whether the kernel computes `problem`, whose direction is the family's."""

    @abstractmethod
    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        """Return the rows of `table` that cheap rules allow; `_costly_rules` sees these alone."""

    @abstractmethod
    def _cut(self, problem: Any, t: Columns) -> Workings:
        """Return how configs cut the problem into blocks and, unless `Shaped._shape` computes them,
        the blocks' resources and work, for rules, features and launches. The kernel computes some
        of this from its macros too, and asserts that both agree (`common.agreed_macros`)."""

    @abstractmethod
    def _costly_rules(self, problem: Any, device: Device, t: Columns, w: Any) -> Mask:
        """Return which of the rows left by `_cheap_rules`, whose `_cut` is `w`, are legal."""

    @abstractmethod
    def _derived(self, problem: Any, device: Device, t: Columns, w: Any) -> dict[str, Floats]:
        """Return ``estimate`` in seconds, and the features that are not in the workings `w`, the
        fields or the problem's features, or that replace one of these."""

    def _completed(self, cut: Workings, problem: Any, table: Table, at: Rows) -> Workings:
        """Return the workings of the rows `at`, whose `_cut` is `cut`."""
        return cut

    def _workings(self, problem: Any, table: Table, at: Rows) -> Any:
        return self._completed(self._cut(problem, table.at(at)), problem, table, at)

    def offered(self, problem: Any, device: Device, table: Table) -> tuple[Any, Rows, Any]:
        """Return the legal pairs; see `confpred.families.protocol.Batched`."""
        problem = _batch(problem)
        allowed = self._cheap_rules(problem, device, table)
        problem, at = problem.pairs(np.arange(len(table.rows)), allowed)
        t = table.at(at)
        cut = self._cut(problem, t)
        legal = self._costly_rules(problem, device, t, cut)
        problem, at = problem.pairs(at, legal)
        return problem, at, self._completed(picked(cut, legal), problem, table, at)

    def legal(self, problem: Problem, device: Device) -> Mask:
        legal = np.zeros(len(self.configs), np.bool_)
        if self.serves(problem):
            legal[self.offered(problem, device, self.whole)[1]] = True
        return legal

    def estimate_s(self, problem: Problem, device: Device, rows: Rows) -> Floats:
        together = _batch(problem)
        workings = self._workings(together, self.whole, rows)
        return self._derived(together, device, self.whole.at(rows), workings)["estimate"]

    def features(self, problem: Any, device: Device, rows: Rows) -> NDArray[np.float32]:
        together = _batch(problem)
        workings = self._workings(together, self.whole, rows)
        columns = self.described(together, device, self.whole, rows, workings)
        return np.ascontiguousarray(columns.T)

    def table(self, rows: Rows) -> Table:
        """Return a part of the config table."""
        return Table.of(self.configs, rows)

    def described(
        self, problem: Any, device: Device, table: Table, at: Rows, workings: Any
    ) -> NDArray[np.float32]:
        """Return the features; see `confpred.families.protocol.Batched`."""
        t, problem = table.at(at), _batch(problem)
        derived: dict[str, Any] = self._derived(problem, device, t, workings)
        values = {**vars(workings), **problem.once(problem_features), **t, **derived}
        values["log_estimate"] = np.log2(values["estimate"] / problem.map(device.roofline_s))
        matrix = np.empty((len(self.feature_names), len(at)), np.float32)
        for row, name in zip(matrix, self.feature_names, strict=True):
            row[:] = values[name]
        return matrix

    def _one(self, problem: Problem, row: int) -> Any:
        """Return the workings of config `row` alone, as numbers."""
        return picked(self._workings(_batch(problem), self.whole, np.array([row])), 0)


class Shaped(Tabled):
    """Base of families whose blocks have a shape that no size of the layer changes."""

    @abstractmethod
    def _shape(self, problem: Problem, table: Table) -> Any:
        """Return the resources and the work of a block, arrays over all rows of `table`, and
        ``fits``: the rows that are legal by these alone."""

    def _cheap_rules(self, problem: Any, device: Device, table: Table) -> Mask:
        def fits(p: Problem) -> Mask:
            shape = self._shape(p, table)
            return shape.fits & (shape.smem_bytes <= device.smem_per_block)

        return problem.each_row(fits)

    def _completed(self, cut: Workings, problem: Any, table: Table, at: Rows) -> Workings:
        shape = problem.each_row(lambda p: self._shape(p, table), at)
        return Workings(**vars(cut), **vars(shape))


def _batch(problem: Any) -> ProblemBatch:
    return problem if isinstance(problem, ProblemBatch) else ProblemBatch([problem])


def legal_among(
    family: Family, problems: Sequence[Any], rows: Sequence[Rows], device: Device
) -> list[Mask]:
    """Return for each problem which of its `rows` are legal, in a third of the time of
    `Family.legal` where they are few of a large table."""
    if not isinstance(family, Tabled):
        return [family.legal(p, device)[own] for p, own in zip(problems, rows, strict=True)]
    masks: list[Mask] = [np.zeros(len(own), np.bool_) for own in rows]
    served = [i for i, problem in enumerate(problems) if family.serves(problem)]
    step = int(np.clip(_ROWS * len(rows) // max(1, sum(map(len, rows))), 1, _PROBLEMS))
    for start in range(0, len(served), step):
        some = served[start : start + step]
        table = family.table(np.unique(np.concatenate([rows[i] for i in some])))
        legal = np.zeros((len(some), len(table.rows)), np.bool_)
        batch, at, _ = family.offered(ProblemBatch([problems[i] for i in some]), device, table)
        legal[0 if batch.index is None else batch.index, at] = True
        for i, of_table in zip(some, legal, strict=True):
            masks[i] = of_table[np.searchsorted(table.rows, rows[i])]
    return masks
