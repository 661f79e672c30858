"""PyTorch's own operator: how its time compares with ours, and how far that may err."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightgbm
import numpy as np
from numpy.typing import NDArray

from confpred.model.ranking import pytorch_feature_names, pytorch_features
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
#: which one is faster. RISK is the share of these layers of a kind on which the ratio may be
#: overestimated by more than the margin; of dense ones, most of which are in doubt, DENSE_RISK.
DOUBT, RISK, DENSE_RISK = 0.5, 0.25, 0.15
_DENSE = ("dense", "fused dense")
#: One row a problem is little data, so each tree sees another half of the rows.
_GROW = {
    "learning_rate": 0.05,
    "min_data_in_leaf": 3,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.5,
    "bagging_freq": 1,
}


def fit_pytorch(
    timings: Sequence[Timings],
    pytorch_ms: Mapping[tuple[Device, Record], float],
    operation: Operation,
    device: Device,
    hyper: Hyperparameters,
    seed: int,
) -> str | None:
    """Fit the logarithm of (PyTorch's time / that of our fastest measured config), on all devices
    that were measured.

    Args:
        timings: what to learn from.
        pytorch_ms: milliseconds of PyTorch's own operator, in cuDNN's benchmark mode; problems that
            `timings` lacks are left out.
        operation: what is computed.
        device: the device to compare on.
        hyper: how the trees grow.
        seed: of the trees.

    Returns:
        The regressor in LightGBM's text form; None if fewer than ``MIN_PROBLEMS`` were measured on
        `device`.
    """
    ours: dict[tuple[Device, Record], float] = {}
    for t in timings:
        asked = t.device, t.problem
        ours[asked] = min(ours.get(asked, np.inf), float(t.time_ms.min()))
    both = sorted(ours.keys() & pytorch_ms.keys(), key=lambda asked: (str(asked[1]), asked[0].key))
    if sum(where == device for where, _ in both) < MIN_PROBLEMS:
        return None
    features = np.concatenate([pytorch_features(operation, [p], where) for where, p in both])
    ratio = np.log([pytorch_ms[asked] / ours[asked] for asked in both]).clip(-CAP, CAP)
    names = list(pytorch_feature_names(operation))
    data = lightgbm.Dataset(features, ratio, feature_name=names)
    return boost(data, {**_GROW, "num_leaves": hyper.pytorch_leaves}, hyper.pytorch_trees, seed)


def margins(
    kinds: Sequence[str], expected: NDArray[np.float64], actual: NDArray[np.float64]
) -> dict[str, float]:
    """By how much predictions may be too large, by the kind of the problem: conformal quantiles of
    how far they exceed the truth on doubtful problems; on all of the kind where fewer than
    ``MIN_PROBLEMS`` of them are doubtful, and on all problems where the kind has so few.

    Args:
        kinds: of problems that the predictions were not learned from.
        expected: predicted logarithms of PyTorch's time over ours.
        actual: the same as measured, ours being the config that was chosen: that it is not the
            fastest is among the reasons why a prediction is too large.
    """
    errors, doubtful = expected - actual, np.abs(expected) < DOUBT
    found = {}
    for kind in sorted(set(kinds)):
        of_kind = np.array(kinds) == kind
        few = (errors[of_kind & doubtful], errors[of_kind], errors)
        enough = next((some for some in few if len(some) >= MIN_PROBLEMS), errors)
        found[kind] = _upper_quantile(enough, DENSE_RISK if kind in _DENSE else RISK)
    return found


def _upper_quantile(errors: NDArray[np.float64], risk: float) -> float:
    """The bound that one more error like `errors` exceeds with a chance of at most `risk`; at least
    0, and ``CAP`` where there are too few errors to tell."""
    level = (1 - risk) * (1 + 1 / max(len(errors), 1))
    if level > 1 or not len(errors):
        return CAP
    return max(0.0, float(np.quantile(errors, level, method="higher")))
