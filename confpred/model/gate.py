"""Which families can win, from the problem alone: the others are not even described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from confpred.model.features import operation_features
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record

#: The last column of the gate's features: the family's place among those of the gate.
FAMILY = "family"
#: A family that lags behind the first one by more than this logarithm is left out (decision 166).
MARGIN = 0.10


@dataclass(frozen=True, slots=True)
class Gate:
    """What a model has learned of its families from problems that several of them serve.

    Attributes:
        operation: what they compute.
        families: names of the families that it knows.
        lag: regressor of log(time of a family's best config / time of the best of all families'),
            from the operation's features and the family.
    """

    operation: Operation
    families: tuple[str, ...]
    lag: Trees

    def open(
        self, problems: Sequence[Record], device: Device, serving: Sequence[Sequence[str]]
    ) -> list[list[str]]:
        """The families worth comparing for each problem, of those `serving` it. One that the gate
        does not know always is."""
        asked = [
            (i, [name for name in names if name in self.families])
            for i, names in enumerate(serving)
            if len(names) > 1
        ]
        found = [list(names) for names in serving]
        asked = [(i, names) for i, names in asked if len(names) > 1]
        if not asked:
            return found
        some = [problems[i] for i, _ in asked]
        groups = [names for _, names in asked]
        matrix = gate_features(self.operation, some, device, self.families, groups)
        lags = self.lag.predict(matrix).tolist()
        for i, names in asked:
            mine, lags = lags[: len(names)], lags[len(names) :]
            behind = min(mine) + MARGIN
            closed = {name for name, lag in zip(names, mine, strict=True) if lag > behind}
            found[i] = [name for name in found[i] if name not in closed]
        return found


def gate_features(
    operation: Operation,
    problems: Sequence[Record],
    device: Device,
    families: Sequence[str],
    asked: Sequence[Sequence[str]],
) -> NDArray[np.float32]:
    """The features that a gate's trees take: a row for each family that is `asked` about each of
    `problems`."""
    own = operation_features(operation, problems, device)
    places = [families.index(name) for names in asked for name in names]
    matrix = np.empty((len(places), own.shape[1] + 1), np.float32)
    matrix[:, :-1] = np.repeat(own, [len(names) for names in asked], axis=0)
    matrix[:, -1] = places
    return matrix
