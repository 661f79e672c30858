"""PyTorch's own operator: how its time compares with ours, and how far that may err."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from confpred.model.pytorch_ratio import pytorch_feature_names, pytorch_features
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.fit import REGRESSOR, Hyperparameters, text_of

MIN_PROBLEMS = 30  # fewer say nothing about where PyTorch's own operator wins
#: Logarithms of ratios end here, at 2.7 times as fast or slow: which is the faster is the question,
#: and it is not answered better by learning that cuDNN now and then takes 30 times as long.
CAP = 1.0
#: What an answer of ours loses against PyTorch's operator weighs so many times as much as what it
#: would have gained where the operator was preferred (decision 169).
CAUTION = 3.0
#: One row a problem is little data, so each tree sees another half of the rows.
_GROW = {
    "learning_rate": 0.05,
    "min_child_samples": 3,
    "colsample_bytree": 0.6,
    "subsample": 0.5,
    "subsample_freq": 1,
}
#: Milliseconds by device and problem.
Times = Mapping[tuple[Device, Record], float]


def fit_pytorch(
    ours_ms: Times,
    pytorch_ms: Times,
    operation: Operation,
    device: Device,
    hyper: Hyperparameters,
    seed: int,
) -> str | None:
    """Fit the logarithm of (PyTorch's time / that of our best config), on all devices that were
    measured.

    Args:
        ours_ms: of our best config (`confpred.training.methods.best_ms`).
        pytorch_ms: of PyTorch's own operator, in cuDNN's benchmark mode. Problems that one of both
            lacks are left out.
        operation: what is computed.
        device: the device to compare on.
        hyper: how the trees grow.
        seed: of the trees.

    Returns:
        The regressor in LightGBM's text form; None if fewer than ``MIN_PROBLEMS`` were measured on
        `device`.
    """
    both = sorted(ours_ms.keys() & pytorch_ms.keys(), key=lambda at: (str(at[1]), at[0].key))
    if sum(where == device for where, _ in both) < MIN_PROBLEMS:
        return None
    features = np.concatenate([pytorch_features(operation, [p], where) for where, p in both])
    ratio = np.log([pytorch_ms[at] / ours_ms[at] for at in both]).clip(-CAP, CAP)
    model = clone(REGRESSOR).set_params(
        **_GROW,
        n_estimators=hyper.pytorch_trees,
        num_leaves=hyper.pytorch_leaves,
        random_state=seed,
    )
    return text_of(model.fit(features, ratio, feature_name=list(pytorch_feature_names(operation))))


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
