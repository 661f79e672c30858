"""A bound on the regret of a choice, and whether its problem is out of distribution.

The bound is conditional: a regressor predicts the median of the regret from how close the first
candidates are, how PyTorch's operator compares, and the problem. It is conformal: an offset for
each provider makes it hold for layers that the model has not seen (`confpred.training.calibrate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import PYTORCH
from confpred.model.rank import Options, pytorch_feature_names, pytorch_features
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record

_CLOSE = 0.02  # difference of logarithms of times that are about the same
_OF_OPTIONS = ("is_pytorch", "log_pytorch", "log_second", "log_sixth", "close", "log_other_family")


class Trust(NamedTuple):
    """The bound on an answer's regret, and whether the problem is out of distribution; there is no
    bound then."""

    bound: float | None
    extrapolated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """The smallest and the largest value of each feature of some problems."""

    least: NDArray[np.float32]
    largest: NDArray[np.float32]

    def has(self, features: NDArray[np.float32]) -> bool:
        """Return whether all `features` of a problem lie in the range."""
        return bool(((features >= self.least) & (features <= self.largest)).all())


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """The bounds of a model on the regret of its own answers.

    Attributes:
        quantile: regressor of a quantile of log(regret), from `signals`: the median or, in models
            older than decision 170, a high quantile.
        offsets: value added to the quantile, by chosen provider.
        ranges: features of the problems that each provider was measured on, by provider.
    """

    operation: Operation
    quantile: Trees
    offsets: Mapping[str, float]
    ranges: Mapping[str, Range]

    def of(
        self, problems: Sequence[Record], device: Device, options: Sequence[Options]
    ) -> list[Trust]:
        """Return how far the first of each problem's `options`, which are in the order of the
        answer, can be trusted on `device`."""
        trusts = [Trust(None, True)] * len(problems)
        features = pytorch_features(self.operation, problems, device)
        chosen = [mine[0][1].provider for mine in options]
        covered = [
            i
            for i, provider in enumerate(chosen)
            if provider in self.offsets and self.ranges[provider].has(features[i])
        ]
        if covered:
            matrix = signals(features[covered], [options[i] for i in covered])
            for i, quantile in zip(covered, self.quantile.predict(matrix).tolist(), strict=True):
                trusts[i] = Trust(exp(max(0.0, quantile + self.offsets[chosen[i]])), False)
        return trusts


def signal_names(operation: Operation) -> tuple[str, ...]:
    """Return the columns of `signals`."""
    return (*pytorch_feature_names(operation), *_OF_OPTIONS)


def signals(features: NDArray[np.float32], options: Sequence[Options]) -> NDArray[np.float32]:
    """Return the signals of an answer's regret, a row an answer, from the problems' `features`
    (`pytorch_features`) and the `options` of each in the order of the answer."""
    return np.hstack([features, np.array([_of_options(mine) for mine in options], np.float32)])


def _of_options(options: Options) -> tuple[float, ...]:
    ours = [(seconds, c) for seconds, c in options if c.provider != PYTORCH]
    theirs = [seconds for seconds, c in options if c.provider == PYTORCH]
    best, first = ours[0]
    behind = [log(seconds / best) for seconds, _ in ours[1:]]
    other = [log(s / best) for s, c in ours if c.provider != first.provider]
    return (
        options[0][1].provider == PYTORCH,
        log(theirs[0] / best) if theirs else np.nan,
        behind[0] if behind else np.nan,
        behind[4] if len(behind) > 4 else np.nan,
        sum(distance < _CLOSE for distance in behind),
        other[0] if other else np.nan,
    )
