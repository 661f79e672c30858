"""PyTorch's own operator: how its time compares with ours, and how far that may err."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightgbm
import numpy as np
from numpy.typing import NDArray

from confpred.model.ranking import pytorch_feature_names, pytorch_features
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Timings
from confpred.training.fit import Hyperparameters, boost

MIN_PROBLEMS = 30  # fewer say nothing about where PyTorch's own operator wins
#: Logarithms of ratios end here, at 2.7 times as fast or slow: which is the faster is the question,
#: and it is not answered better by learning that cuDNN now and then takes 30 times as long.
CAP = 1.0
#: Where the logarithm of the predicted ratio is within DOUBT (a factor of 1.6), it is in doubt
#: which one is faster. RISK is the share of these layers on which the ratio may be overestimated by
#: more than the margin.
DOUBT, RISK = 0.5, 0.25
_PARTS = 5  # of the cross-validation that calibrates
#: One row a problem is little data, so each tree sees another half of the rows.
_GROW = {
    "learning_rate": 0.05,
    "min_data_in_leaf": 3,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.5,
    "bagging_freq": 1,
}


@dataclass(frozen=True, slots=True, eq=False)
class FittedPytorch:
    """A `confpred.model.ranking.PytorchModel`, with its regressor in LightGBM's text form."""

    ratio: str
    margin: float


def fit_pytorch(
    timings: Sequence[Timings],
    pytorch_ms: Mapping[tuple[Device, Record], float],
    operation: Operation,
    device: Device,
    hyper: Hyperparameters,
    seed: int,
) -> FittedPytorch | None:
    """Fit the logarithm of (PyTorch's time / that of our fastest measured config), on all devices
    that were measured.

    The margin is conformal: it is the quantile of how far the prediction exceeds the truth on the
    doubtful problems of `device`, each predicted by trees that saw no problem of its layer.

    Args:
        timings: what to learn from.
        pytorch_ms: milliseconds of PyTorch's own operator, in cuDNN's benchmark mode; problems that
            `timings` lacks are left out.
        operation: what is computed.
        device: the device to compare on.
        hyper: how the trees grow.
        seed: of the trees, and of the parts in which problems are held out.

    Returns:
        None if fewer than ``MIN_PROBLEMS`` were measured on `device`.
    """
    ours: dict[tuple[Device, Record], float] = {}
    for t in timings:
        asked = t.device, t.problem
        ours[asked] = min(ours.get(asked, np.inf), float(t.time_ms.min()))
    both = sorted(ours.keys() & pytorch_ms.keys(), key=lambda asked: (str(asked[1]), asked[0].key))
    problems = [problem for _, problem in both]
    here = np.array([where == device for where, _ in both], np.bool_)
    if here.sum() < MIN_PROBLEMS:
        return None
    features = np.concatenate([pytorch_features(operation, p, where) for where, p in both])
    ratio = np.log([pytorch_ms[asked] / ours[asked] for asked in both]).clip(-CAP, CAP)

    def fit(rows: NDArray[np.bool_]) -> str:
        names = list(pytorch_feature_names(operation))
        data = lightgbm.Dataset(features[rows], ratio[rows], feature_name=names)
        grow = {**_GROW, "num_leaves": hyper.pytorch_leaves}
        return boost(data, grow, hyper.pytorch_trees, seed)

    part = _parts(problems, seed)
    expected = np.empty(len(problems))
    for number in set(part.tolist()):
        held_out = part == number
        expected[held_out] = Trees(fit(~held_out)).predict(features[held_out])
    doubtful = here & (np.abs(expected) < DOUBT)
    return FittedPytorch(
        ratio=fit(np.ones(len(problems), np.bool_)),
        margin=_upper_quantile((expected - ratio)[doubtful], RISK),
    )


def _upper_quantile(errors: NDArray[np.float64], risk: float) -> float:
    """The bound that one more error like `errors` exceeds with a chance of at most `risk`; at least
    0, and ``CAP`` where there are too few errors to tell."""
    level = (1 - risk) * (1 + 1 / max(len(errors), 1))
    if level > 1 or not len(errors):
        return CAP
    return max(0.0, float(np.quantile(errors, level, method="higher")))


def _parts(problems: Sequence[Record], seed: int) -> NDArray[np.intp]:
    """A number below ``_PARTS`` for each problem, the same for all of a layer."""
    layers = sorted({str(p.layer()) for p in problems})
    random.Random(seed).shuffle(layers)
    number = {layer: i % _PARTS for i, layer in enumerate(layers)}
    return np.array([number[str(p.layer())] for p in problems])
