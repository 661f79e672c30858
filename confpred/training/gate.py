"""Which families can win a problem, learned from problems that were measured with several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.base import clone

from confpred.model.gate import FAMILY, Gate, gate_features
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Timings
from confpred.training.fit import REGRESSOR, text_of

MIN_PROBLEMS = 30  # fewer say little about which family wins
#: Logarithms of how far a family lags behind end here: beyond, it has lost however far it is.
CAP = 1.0
_GROW = {
    "n_estimators": 200,
    "num_leaves": 16,
    "learning_rate": 0.03,
    "min_child_samples": 3,
    "colsample_bytree": 0.6,
    "subsample": 0.5,
    "subsample_freq": 1,
}


@dataclass(frozen=True, slots=True, eq=False)
class FittedGate:
    """A `confpred.model.gate.Gate`, with its regressor in LightGBM's text form.

    Attributes:
        families: as of a `Gate`.
        lag: the regressor.
        problems: what it was fitted to.
    """

    families: tuple[str, ...]
    lag: str
    problems: tuple[Record, ...]

    def gate(self, operation: Operation) -> Gate:
        """Ready to predict."""
        return Gate(operation, self.families, Trees(self.lag))


def fit_gate(timings: Sequence[Timings], operation: Operation, seed: int) -> FittedGate | None:
    """Fit the logarithm of (time of a family's fastest measured config / that of all families'), on
    all devices that were measured.

    Returns:
        None if fewer than ``MIN_PROBLEMS`` were measured with several families.
    """
    best: dict[Device, dict[Record, dict[str, float]]] = {}
    for t in sorted(timings, key=lambda t: (t.device.key, str(t.problem), t.family)):
        of_problem = best.setdefault(t.device, {}).setdefault(t.problem, {})
        of_problem[t.family] = float(t.time_ms.min())
    compared = {
        device: {problem: times for problem, times in found.items() if len(times) > 1}
        for device, found in best.items()
    }
    measured = [times for found in compared.values() for times in found.values()]
    if len(measured) < MIN_PROBLEMS:
        return None
    families = tuple(sorted({name for times in measured for name in times}))
    features = np.concatenate(
        [
            gate_features(operation, list(found), device, families, list(map(list, found.values())))
            for device, found in compared.items()
            if found
        ]
    )
    lag = [np.log(ms / min(times.values())) for times in measured for ms in times.values()]
    problems = sorted({problem for found in compared.values() for problem in found}, key=str)
    names = [*operation.feature_names, FAMILY]
    model = clone(REGRESSOR).set_params(**_GROW, random_state=seed)
    model.fit(features, np.clip(lag, 0.0, CAP), feature_name=names)
    return FittedGate(families, text_of(model), tuple(problems))
