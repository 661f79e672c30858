"""Which families can win a problem, learned from problems that were measured with several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightgbm
import numpy as np

from confpred.model.gate import FAMILY, Gate, gate_features
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Timings
from confpred.training.fit import boost

MIN_PROBLEMS = 30  # fewer say little about which family wins
#: Logarithms of how far a family lags behind end here: beyond, it has lost however far it is.
CAP = 1.0
#: A family that lags behind the first by more than this logarithm is left out. Measured by
#: cross-validation: see decision 97.
MARGIN = 0.06
_TREES = 200
_GROW = {
    "num_leaves": 16,
    "learning_rate": 0.03,
    "min_data_in_leaf": 3,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.5,
    "bagging_freq": 1,
}


@dataclass(frozen=True, slots=True, eq=False)
class FittedGate:
    """A `confpred.model.gate.Gate`, with its regressor in LightGBM's text form.

    Attributes:
        families: as of a `Gate`.
        lag: the regressor.
        margin: as of a `Gate`.
        problems: what it was fitted to.
    """

    families: tuple[str, ...]
    lag: str
    margin: float
    problems: tuple[Record, ...]

    def gate(self, operation: Operation) -> Gate:
        """Ready to predict."""
        return Gate(operation, self.families, Trees(self.lag), self.margin)


def fit_gate(
    timings: Sequence[Timings], operation: Operation, device: Device, seed: int
) -> FittedGate | None:
    """Fit the logarithm of (time of a family's fastest measured config / that of all families').

    Returns:
        None if fewer than ``MIN_PROBLEMS`` were measured with several families.
    """
    best: dict[Record, dict[str, float]] = {}
    for t in timings:
        best.setdefault(t.problem, {})[t.family] = float(t.time_ms.min())
    best = {problem: times for problem, times in best.items() if len(times) > 1}
    if len(best) < MIN_PROBLEMS:
        return None
    families = tuple(sorted({name for times in best.values() for name in times}))
    problems = sorted(best, key=str)
    measured = [dict(sorted(best[problem].items())) for problem in problems]
    features = gate_features(operation, problems, device, families, list(map(list, measured)))
    lag = [np.log(ms / min(times.values())) for times in measured for ms in times.values()]
    names = [*operation.feature_names, FAMILY]
    data = lightgbm.Dataset(features, np.clip(lag, 0.0, CAP), feature_name=names)
    return FittedGate(families, boost(data, _GROW, _TREES, seed), MARGIN, tuple(problems))
