"""PyTorch's own operator: how its time compares with ours, and how far that may err."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightgbm
import numpy as np
from numpy.typing import NDArray

from confpred.model.pytorch_ratio import pytorch_feature_names, pytorch_features
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Timings
from confpred.training.fit import Hyperparameters, boost

MIN_PROBLEMS = 30  # fewer say nothing about where PyTorch's own operator wins
#: Logarithms of ratios end here, at 2.7 times as fast or slow: which is the faster is the question,
#: and it is not answered better by learning that cuDNN now and then takes 30 times as long.
CAP = 1.0
#: What an answer of ours loses against PyTorch's operator weighs so many times as much as what it
#: would have gained where the operator was preferred (decision 146).
CAUTION = 7.0
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
    ours = fastest_ms(timings)
    both = sorted(ours.keys() & pytorch_ms.keys(), key=lambda asked: (str(asked[1]), asked[0].key))
    if sum(where == device for where, _ in both) < MIN_PROBLEMS:
        return None
    features = np.concatenate([pytorch_features(operation, [p], where) for where, p in both])
    ratio = np.log([pytorch_ms[asked] / ours[asked] for asked in both]).clip(-CAP, CAP)
    names = list(pytorch_feature_names(operation))
    data = lightgbm.Dataset(features, ratio, feature_name=names)
    return boost(data, {**_GROW, "num_leaves": hyper.pytorch_leaves}, hyper.pytorch_trees, seed)


def fastest_ms(timings: Sequence[Timings]) -> dict[tuple[Device, Record], float]:
    """Milliseconds of our fastest measured config of each problem on each device."""
    found: dict[tuple[Device, Record], float] = {}
    for t in timings:
        asked = t.device, t.problem
        found[asked] = min(found.get(asked, np.inf), float(t.time_ms.min()))
    return found


def margins(
    kinds: Sequence[str], expected: NDArray[np.float64], actual: NDArray[np.float64]
) -> dict[str, float]:
    """How large a prediction must be for ours to be chosen, by the kind of the problem: what would
    have cost least on problems of the kind, or on all where it has fewer than ``MIN_PROBLEMS``.

    Args:
        kinds: of problems that the predictions were not learned from.
        expected: predicted logarithms of PyTorch's time over ours.
        actual: the same as measured, ours being the config that was chosen: that it is not the
            fastest is among the reasons why a prediction is too large.
    """
    found = {}
    for kind in sorted(set(kinds)):
        of_kind = np.array(kinds) == kind
        if of_kind.sum() < MIN_PROBLEMS:
            of_kind[:] = True
        found[kind] = _cheapest(expected[of_kind], actual[of_kind])
    return found


def _cheapest(expected: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """The margin, from 0 to ``CAP``, that loses least if ours is chosen where `expected` is larger;
    ``CAP`` where there are too few problems to tell."""
    if len(expected) < MIN_PROBLEMS:
        return CAP
    order = np.argsort(expected, kind="stable")
    rising, ahead = expected[order], actual[order]
    given_away = np.concatenate([[0.0], np.cumsum(ahead.clip(min=0))])
    lost = np.concatenate([np.cumsum((-ahead).clip(min=0)[::-1])[::-1], [0.0]])
    steps = np.concatenate([[0.0], rising[(rising > 0) & (rising < CAP)], [CAP]])
    tried = (steps[:-1] + steps[1:]) / 2  # nothing tells the places between two problems apart
    first = np.searchsorted(rising, tried)  # of those on which ours would be chosen
    return float(tried[np.argmin(given_away[first] + CAUTION * lost[first])])
