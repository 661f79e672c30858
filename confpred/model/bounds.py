"""How far an answer may be from the best: a bound on its regret, and whether the problem is unlike
all that the model was trained on.

The bound is conditional: regressors predict a high quantile of the regret from how close the first
candidates are to each other, how PyTorch's operator compares, and the problem itself. It is
conformal: an offset for each provider, and so one for PyTorch's operator, makes it hold for the
answers of models that saw none of the problem's layer (`confpred.training.bounds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.model.deciding import Options
from confpred.model.ranking import pytorch_feature_names, pytorch_features
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record

_CLOSE = 0.02  # of logarithms of times: candidates of about the same time
_OF_OPTIONS = ("is_pytorch", "log_pytorch", "log_second", "log_eighth", "close", "log_other_family")


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """The least and the largest value of each feature of some problems."""

    least: NDArray[np.float32]
    largest: NDArray[np.float32]

    def has(self, features: NDArray[np.float32]) -> bool:
        """Whether all `features` of a problem lie in it."""
        return bool(((features >= self.least) & (features <= self.largest)).all())


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """What a model has learned of the regret of its own answers.

    Attributes:
        operation: what is computed.
        quantile: regressor of a high quantile of log(regret), from `signals`.
        offsets: what is added to that, by the provider that is chosen.
        ranges: what the problems are like that each provider was measured on.
    """

    operation: Operation
    quantile: Trees
    offsets: Mapping[str, float]
    ranges: Mapping[str, Range]

    def of(self, problem: Record, device: Device, options: Options) -> tuple[float | None, bool]:
        """The bound on the regret of the first of `options`, and whether it is extrapolated; there
        is no bound then.

        Args:
            problem: what is asked.
            device: where it is to run.
            options: the candidates in the order of the answer, with their expected seconds.
        """
        features = pytorch_features(self.operation, problem, device)
        provider = options[0][1].provider
        if provider not in self.offsets or not self.ranges[provider].has(features[0]):
            return None, True
        quantile = float(self.quantile.predict(signals(features, options))[0])
        return exp(max(0.0, quantile + self.offsets[provider])), False


def signal_names(operation: Operation) -> tuple[str, ...]:
    """The columns of `signals`."""
    return (*pytorch_feature_names(operation), *_OF_OPTIONS)


def signals(features: NDArray[np.float32], options: Options) -> NDArray[np.float32]:
    """What the regret of an answer depends on, as a matrix of one row.

    Args:
        features: those of the problem (`pytorch_features`).
        options: the candidates in the order of the answer, with their expected seconds.
    """
    ours = [(seconds, c) for seconds, c in options if c != PYTORCH_OPERATOR]
    theirs = [seconds for seconds, c in options if c == PYTORCH_OPERATOR]
    best, first = ours[0]
    behind = [log(seconds / best) for seconds, _ in ours[1:]]
    other = [log(s / best) for s, c in ours if c.provider != first.provider]
    row = (
        options[0][1] == PYTORCH_OPERATOR,
        log(theirs[0] / best) if theirs else np.nan,
        behind[0] if behind else np.nan,
        behind[6] if len(behind) > 6 else np.nan,
        sum(distance < _CLOSE for distance in behind),
        other[0] if other else np.nan,
    )
    return np.append(features[0], np.array(row, np.float32))[None, :]
