"""The bound on an answer's regret: fitted to answers for networks held out, and calibrated on them.

Conformal prediction for groups: regressors that saw none of a network predict the median of the
logarithm of its answers' regret; by how much answers exceed that, at most but for ``MISS`` of them,
is added for each provider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_predict

from confpred.families.protocol import PYTORCH
from confpred.model.bounds import signal_names, signals
from confpred.model.pytorch_ratio import pytorch_features
from confpred.problem.record import Record
from confpred.training.answers import Answer
from confpred.training.dataset import Dataset
from confpred.training.fit import REGRESSOR, text_of

MISS = 0.05  # share of answers that may have a larger regret than their bound
_PARTS = 5
_LEAST_IN_LEAF = 30
#: The median tells good answers from bad ones better than a high quantile, which has too few
#: examples on its far side (decision 170); the offsets make it a bound.
_GROW = {
    "objective": "regression_l1",
    "n_estimators": 80,
    "learning_rate": 0.05,
    "num_leaves": 6,
    "colsample_bytree": 0.5,
    "subsample": 0.7,
    "subsample_freq": 1,
}
#: A provider of fewer answers than this is calibrated together with the others.
_FEWEST = 40


@dataclass(frozen=True, slots=True, eq=False)
class FittedBounds:
    """A `confpred.model.bounds.Bounds`, with its regressor in LightGBM's text form.

    Attributes:
        quantile, offsets: as there.
        ranges: the least and the largest values of the features, by provider.
        coverage: share of answers whose regret is within a bound that was fitted and calibrated
            without their networks: of all, and by provider.
        median: median of these bounds.
    """

    quantile: str
    offsets: Mapping[str, float]
    ranges: Mapping[str, tuple[list[float], list[float]]]
    coverage: Mapping[str, float]
    median: float


def fit_bounds(found: Sequence[Answer], dataset: Dataset, seed: int) -> FittedBounds:
    """Learn from the answers `found` for networks held out, of which there are some."""
    operation, device = dataset.operation, dataset.device
    regret = np.log([answer.regret for answer in found])
    provider = np.array([answer.chosen.provider for answer in found])
    features = pytorch_features(operation, [answer.problem for answer in found], device)
    matrix = signals(features, [answer.options for answer in found])
    names = list(signal_names(operation))

    grown = clone(REGRESSOR).set_params(
        **_GROW,
        min_child_samples=min(_LEAST_IN_LEAF, max(1, len(found) // 20)),
        random_state=seed,
    )
    parts = _parts(found)
    excess = regret - cross_val_predict(grown, matrix, regret, cv=parts)
    bound = np.empty(len(found))
    for train, test in parts:
        offsets = _offsets(excess[train], provider[train], sorted(set(provider.tolist())))
        added = np.array([offsets[name] for name in provider[test]])
        bound[test] = np.maximum(0.0, regret[test] - excess[test] + added)
    inside = regret <= bound
    return FittedBounds(
        quantile=text_of(grown.fit(matrix, regret, feature_name=names)),
        offsets=_offsets(excess, provider, _providers(dataset)),
        ranges=_ranges(dataset),
        coverage={
            "all": float(inside.mean()),
            **{name: float(inside[provider == name].mean()) for name in np.unique(provider)},
        },
        median=float(np.exp(np.median(bound))),
    )


def _offsets(
    excess: NDArray[np.float64], provider: NDArray[np.str_], wanted: Sequence[str]
) -> dict[str, float]:
    """For each of the `wanted` providers what at most a share ``MISS`` of answers exceeds."""
    of_all = _upper(excess)
    found = {}
    for name in wanted:
        own = excess[provider == name]
        found[str(name)] = _upper(own) if len(own) >= _FEWEST else of_all
    return found


def _upper(excess: NDArray[np.float64]) -> float:
    level = min(1.0, (1 - MISS) * (1 + 1 / len(excess)))
    return float(np.quantile(excess, level, method="higher"))


def _parts(found: Sequence[Answer]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Which answers to learn from, and which to predict then: all of a network and of a layer are
    in one part. Where all are, it is predicted by what has seen it."""
    first: dict[str, str] = {}
    owner = [first.setdefault(str(a.problem.layer()), a.networks[0]) for a in found]
    count = min(_PARTS, len(set(owner)))
    if count < 2:
        return [(np.arange(len(found)), np.arange(len(found)))]
    return list(GroupKFold(count).split(found, groups=owner))


def _providers(dataset: Dataset) -> list[str]:
    names = {t.family for t in dataset.timings}
    return sorted(names | ({PYTORCH} if dataset.pytorch_ms else set()))


def _ranges(dataset: Dataset) -> dict[str, tuple[list[float], list[float]]]:
    problems: dict[str, list[Record]] = {name: [] for name in _providers(dataset)}
    for t in dataset.timings:
        problems[t.family].append(t.problem)
    if PYTORCH in problems:
        problems[PYTORCH] = list(dataset.pytorch_ms)
    found = {}
    for name, own in problems.items():
        features = pytorch_features(dataset.operation, own, dataset.device)
        found[name] = (features.min(axis=0).tolist(), features.max(axis=0).tolist())
    return found
