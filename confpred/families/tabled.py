"""What families with formulas over a config table share: answers for a part of the table, and for
several problems at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families.common import Array, Table, feature_columns
from confpred.families.protocol import Rows
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device


class Tabled(ABC):
    """Base of a `Family` of formulas, which is a `confpred.families.protocol.Batched`.

    A formula takes one problem, whose numbers are scalars, or `Several`, whose numbers are arrays.

    Attributes:
        name, configs, feature_names: as of a `Family`.
        whole: its whole config table.
    """

    name: str
    configs: NDArray[np.void]
    feature_names: tuple[str, ...]
    whole: Table

    @abstractmethod
    def serves(self, problem: Any) -> bool:
        """Whether some config may compute `problem`, as far as that depends on no config."""

    @abstractmethod
    def offered(self, problem: Any, device: Device, table: Table) -> tuple[Any, Rows, Any]:
        """See `confpred.families.protocol.Batched`; what was worked out is a `_workings`."""

    @abstractmethod
    def _workings(self, problem: Any, table: Table, at: Rows) -> Any:
        """What the rules of what is legal and the features both need of the rows `at`: a record of
        arrays over them."""

    @abstractmethod
    def _derived(
        self, problem: Any, device: Device, t: Mapping[str, Array], workings: Any
    ) -> dict[str, NDArray[np.float64]]:
        """The derived features, and ``estimate`` in seconds, of some rows, of which `t` holds the
        fields."""

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
        """A part of the config table."""
        return Table.of(self.configs, rows)

    def described(
        self, problem: Any, device: Device, table: Table, at: Rows, workings: Any
    ) -> NDArray[np.float32]:
        """See `confpred.families.protocol.Batched`."""
        t = table.at(at)
        derived = self._derived(problem, device, t, workings)
        return feature_columns(self.feature_names, problem, device, t, derived)


class OneDirection(Tabled):
    """One direction of a kernel that computes several, of which the forward one has an epilogue.

    Attributes:
        direction: of the problems it serves.
        operands: the kernel's pointers, in its order.
        shared_features: the columns that all its directions have.
    """

    shared_features: tuple[str, ...]

    def __init__(self, name: str, direction: str, operands: tuple[str, ...]) -> None:
        self.name = name
        self.direction = direction
        self.operands = operands
        epilogue = ("bias", "activation", "residual") if direction == "fprop" else ()
        self.feature_names = (*self.shared_features, *epilogue)
