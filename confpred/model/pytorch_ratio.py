"""PyTorch's own operator among the candidates: how its time compares with the best config's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.model.features import operation_features
from confpred.model.pools import DEVICE, bandwidth
from confpred.model.rank import Options
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record


@dataclass(frozen=True, slots=True)
class PytorchModel:
    """A model of PyTorch's own operator, which has no configs.

    Attributes:
        operation: the operation that it computes.
        ratio: regressor of log(its time / time of our fastest config), from `pytorch_features`; it
            does not tell large ratios apart, as nothing depends on that
            (`confpred.training.pytorch`).
        margins: how large that logarithm must be for ours to be preferred, by the problem's kind:
            what cost least on layers that the regressor was not trained on. Where nothing is known
            of a kind, none of ours is.
    """

    operation: Operation
    ratio: Trees
    margins: Mapping[str, float]

    def log_ratios(self, problems: Sequence[Record], device: Device) -> NDArray[np.float64]:
        """Return what is expected of log(its time / time of our fastest), for each problem."""
        return self.ratio.predict(pytorch_features(self.operation, problems, device))

    def slowdowns(self, problems: Sequence[Record], device: Device) -> list[tuple[float, float]]:
        """Return how many times as long as our fastest config it takes, expected and at least, for
        each problem."""
        ratios = self.log_ratios(problems, device).tolist()
        margins = [self.margins.get(problem.kind, inf) for problem in problems]
        return [(exp(r), exp(r - margin)) for r, margin in zip(ratios, margins, strict=True)]


def pytorch_feature_names(operation: Operation) -> tuple[str, ...]:
    """Return the columns of `pytorch_features`."""
    return (*operation.feature_names, DEVICE)


def pytorch_features(
    operation: Operation, problems: Sequence[Record], device: Device
) -> NDArray[np.float32]:
    """Return the features of each of `problems` alone, and the device's: a row each."""
    own = operation_features(operation, problems, device)
    matrix = np.empty((len(own), own.shape[1] + 1), np.float32)
    matrix[:, :-1] = own
    matrix[:, -1] = bandwidth(device)
    return matrix


def with_pytorch(
    options: Options, slowdown: tuple[float, float] | None, fastest_s: float | None = None
) -> Options:
    """Put PyTorch's own operator among `options`, before those that do not beat it even if its
    time is overestimated.

    Args:
        options: our candidates, fastest first.
        slowdown: how many times as long as our fastest config PyTorch's takes: expected, and at
            least (`PytorchModel`); None where that is not known.
        fastest_s: seconds of our fastest config, where that is not among `options`.
    """
    if not options or slowdown is None:
        return options
    best = options[0][0] if fastest_s is None else fastest_s
    expected, least = (best * times for times in slowdown)
    place = sum(seconds <= least for seconds, _ in options)
    return [*options[:place], (expected, PYTORCH_OPERATOR), *options[place:]]
