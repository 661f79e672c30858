"""What families with formulas over a config table share: answers for a part of the table, and for
several problems at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families.common import Table, feature_matrix
from confpred.families.protocol import Rows
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device


class Tabled(ABC):
    """Base of a `Family`, and a `confpred.families.protocol.Grouping`, of formulas.

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
    def offered(self, problem: Any, device: Device, table: Table) -> tuple[Any, Rows]:
        """Which rows of `table`, counted from 0, compute a problem that the family `serves`.

        Returns:
            The problem, or where they are `Several` the problem of each pair; and the rows.
        """

    @abstractmethod
    def _derived(
        self, problem: Any, device: Device, table: Table, at: Rows
    ) -> dict[str, NDArray[np.float64]]:
        """The derived features, and ``estimate`` in seconds, of the rows `at` of `table`."""

    def legal(self, problem: Problem, device: Device) -> NDArray[np.bool_]:
        legal = np.zeros(len(self.configs), np.bool_)
        if self.serves(problem):
            legal[self.offered(problem, device, self.whole)[1]] = True
        return legal

    def estimate_s(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float64]:
        return self._derived(problem, device, self.whole, rows)["estimate"]

    def features(self, problem: Problem, device: Device, rows: Rows) -> NDArray[np.float32]:
        return self.described(problem, device, self.whole, rows)

    def table(self, rows: Rows) -> Table:
        """A part of the config table."""
        return Table.of(self.configs, rows)

    def described(
        self, problem: Any, device: Device, table: Table, at: Rows
    ) -> NDArray[np.float32]:
        """The `features` of the rows `at` of `table`, for the problem or the problem of each."""
        derived = self._derived(problem, device, table, at)
        return feature_matrix(self, problem, device, table.at(at), derived)  # type: ignore[arg-type]
