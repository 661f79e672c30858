"""The bound on an answer's regret: fitted to answers for networks held out, and calibrated on them.

Conformal prediction for groups: regressors that saw none of a network predict a high quantile of
the logarithm of its answers' regret; by how much answers exceed that, at most but for ``MISS`` of
them, is added for each provider.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightgbm
import numpy as np
from numpy.typing import NDArray

from confpred.families.candidate import PYTORCH
from confpred.model.bounds import signal_names, signals
from confpred.model.pytorch_ratio import pytorch_features
from confpred.model.trees import Trees
from confpred.problem.record import Record
from confpred.training.answers import Answer
from confpred.training.dataset import Dataset
from confpred.training.fit import boost

MISS = 0.05  # share of answers that may have a larger regret than their bound
_QUANTILE = 0.9  # that trees predict: a higher one has too few examples on its far side
_TREES, _PARTS = 60, 5
_LEAST_IN_LEAF = 30
_GROW: dict[str, float | str] = {
    "objective": "quantile",
    "alpha": _QUANTILE,
    "learning_rate": 0.05,
    "num_leaves": 6,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
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

    def fit(rows: NDArray[np.bool_]) -> str:
        least = min(_LEAST_IN_LEAF, max(1, int(rows.sum()) // 20))
        data = lightgbm.Dataset(matrix[rows], regret[rows], feature_name=names)
        return boost(data, {**_GROW, "min_data_in_leaf": least}, _TREES, seed)

    part = _parts(found, seed)
    excess = np.empty(len(found))  # of what trees predict that saw none of the networks
    for number in np.unique(part):
        held_out = part == number
        train = ~held_out if not held_out.all() else held_out
        excess[held_out] = regret[held_out] - Trees(fit(train)).predict(matrix[held_out])
    bound = np.empty(len(found))
    for number in np.unique(part):
        held_out = part == number
        train = ~held_out if not held_out.all() else held_out
        offsets = _offsets(excess[train], provider[train], sorted(set(provider.tolist())))
        added = np.array([offsets[name] for name in provider[held_out]])
        bound[held_out] = np.maximum(0.0, regret[held_out] - excess[held_out] + added)
    inside = regret <= bound
    return FittedBounds(
        quantile=fit(np.ones(len(found), np.bool_)),
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


def _parts(found: Sequence[Answer], seed: int) -> NDArray[np.intp]:
    """A number below ``_PARTS`` for each answer, the same for all of a network and of a layer."""
    first: dict[str, str] = {}
    owner = [first.setdefault(str(a.problem.layer()), a.networks[0]) for a in found]
    networks = sorted(set(owner))
    random.Random(seed).shuffle(networks)
    number = {network: i % _PARTS for i, network in enumerate(networks)}
    return np.array([number[network] for network in owner])


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
