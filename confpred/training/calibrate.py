"""Parts of a model beside the order and the time of configs: which families can win, how
PyTorch's operator compares with them, and a bound on an answer's regret.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_predict

from confpred.errors import DataError
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.model.bounds import signal_names, signals
from confpred.model.card import BoundsCard
from confpred.model.rank import (
    FAMILY,
    Options,
    gate_features,
    pytorch_feature_names,
    pytorch_features,
)
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, Timings
from confpred.training.fit import REGRESSOR, Hyperparameters, text_of

MIN_PROBLEMS = 30  # fewer say nothing about where PyTorch's own operator wins
#: Logarithms of ratios end here, at 2.7 times as fast or slow: which is the faster is the question,
#: and it is not answered better by learning that cuDNN now and then takes 30 times as long.
CAP = 1.0
#: Weight of a loss against PyTorch's operator over a gain that was missed where the operator was
#: preferred (decision 169).
CAUTION = 3.0
#: One row a problem is little data, so each tree sees another half of the rows.
_GROW = {
    "min_child_samples": 3,
    "colsample_bytree": 0.6,
    "subsample": 0.5,
    "subsample_freq": 1,
}
_GROW_GATE = {**_GROW, "n_estimators": 200, "num_leaves": 16, "learning_rate": 0.03}
MISS = 0.05  # share of answers that may have a larger regret than their bound
_PARTS = 5
_LEAST_IN_LEAF = 30
#: The median separates good answers from bad ones better than a high quantile, which has too few
#: examples on its far side (decision 170); the offsets make it a bound.
_GROW_BOUND = {
    "objective": "regression_l1",
    "n_estimators": 80,
    "learning_rate": 0.05,
    "num_leaves": 6,
    "colsample_bytree": 0.5,
    "subsample": 0.7,
    "subsample_freq": 1,
}
_FEWEST = 40  # answers of a provider that is calibrated alone
#: Milliseconds by device and problem.
Times = Mapping[tuple[Device, Record], float]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer for a problem, of models that saw none of its layer."""

    problem: Record
    networks: tuple[str, ...]  # that have it, sorted
    options: Options  # all candidates in the order of the answer, with their expected seconds
    ours_ms: float  # time of the first of those confpred candidates that were measured
    our_best_ms: float  # time of the fastest measured config of all families
    pytorch_ms: float | None  # measured time of PyTorch's operator, where it is a candidate

    @property
    def chosen(self) -> Candidate:
        """The first candidate."""
        return self.options[0][1]

    @property
    def best_ms(self) -> float:
        """Time of the fastest of all that was measured."""
        return min(self.our_best_ms, self.pytorch_ms or inf)

    @property
    def regret(self) -> float:
        """Measured time of the first candidate over that of the fastest."""
        ms = self.ours_ms
        if self.pytorch_ms is not None and self.chosen == PYTORCH_OPERATOR:
            ms = self.pytorch_ms
        return ms / self.best_ms


def fit_pytorch(
    ours_ms: Times, pytorch_ms: Times, operation: Operation, device: Device,
    hyper: Hyperparameters, seed: int,
) -> str | None:  # fmt: skip
    """Fit the logarithm of (PyTorch's time / that of our best config), on all devices that were
    measured.

    Args:
        ours_ms: of our best config (`confpred.training.cross_validate.best_ms`).
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
        learning_rate=0.05,
        n_estimators=hyper.pytorch_trees,
        num_leaves=hyper.pytorch_leaves,
        random_state=seed,
    )
    return text_of(model.fit(features, ratio, feature_name=list(pytorch_feature_names(operation))))


def margins(
    kinds: Sequence[str], expected: NDArray[np.float64], actual: NDArray[np.float64]
) -> dict[str, float]:
    """Return how large a prediction must be for a confpred kernel to be chosen, by the kind of the
    problem: what would have cost least on problems of the kind, or on all where it has fewer than
    ``MIN_PROBLEMS``.

    Args:
        kinds: of problems that the predictions were not learned from.
        expected: predicted logarithms of PyTorch's time over confpred's.
        actual: the same as measured, confpred's being the chosen config's: that it is not the
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
    """Return the margin, from 0 to ``CAP``, that loses least if a confpred kernel is chosen where
    `expected` is larger; ``CAP`` where there are too few problems to tell."""
    if len(expected) < MIN_PROBLEMS:
        return CAP
    order = np.argsort(expected, kind="stable")
    rising, ahead = expected[order], actual[order]
    given_away = np.concatenate([[0.0], np.cumsum(ahead.clip(min=0))])
    lost = np.concatenate([np.cumsum((-ahead).clip(min=0)[::-1])[::-1], [0.0]])
    steps = np.concatenate([[0.0], rising[(rising > 0) & (rising < CAP)], [CAP]])
    tried = (steps[:-1] + steps[1:]) / 2  # any between two problems will do
    first = np.searchsorted(rising, tried)  # of those on which a confpred kernel would be chosen
    return float(tried[np.argmin(given_away[first] + CAUTION * lost[first])])


@dataclass(frozen=True, slots=True, eq=False)
class FittedGate:
    """A `confpred.model.rank.Gate`, with its regressor in LightGBM's text form."""

    families: tuple[str, ...]
    lag: str
    problems: tuple[Record, ...]  # what it was fitted to


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
    model = clone(REGRESSOR).set_params(**_GROW_GATE, random_state=seed)
    model.fit(features, np.clip(lag, 0.0, CAP), feature_name=names)
    return FittedGate(families, text_of(model), tuple(problems))


def fit_bounds(found: Sequence[Answer], dataset: Dataset, seed: int) -> tuple[str, BoundsCard]:
    """Learn from the answers `found` for networks held out.

    Returns:
        The regressor of a `confpred.model.bounds.Bounds` in LightGBM's text form, and its card.
        There, ``coverage`` and ``median`` are of bounds that were fitted and calibrated without the
        networks of the answers.

    Raises:
        DataError: there are fewer than two answers.
    """
    if len(found) < 2:
        raise DataError(f"a bound on regret needs at least 2 problems; found {len(found)}")
    operation, device = dataset.operation, dataset.device
    regret = np.log([answer.regret for answer in found])
    provider = np.array([answer.chosen.provider for answer in found])
    features = pytorch_features(operation, [answer.problem for answer in found], device)
    matrix = signals(features, [answer.options for answer in found])
    grown = clone(REGRESSOR).set_params(
        **_GROW_BOUND,
        min_child_samples=min(_LEAST_IN_LEAF, max(1, len(found) // 20)),
        random_state=seed,
    )
    parts = _parts(found)
    excess = regret - cross_val_predict(grown, matrix, regret, cv=parts)
    bound = np.empty(len(found))
    for train, test in parts:
        offsets = _offsets(excess[train], provider[train], provider)
        added = np.array([offsets[name] for name in provider[test]])
        bound[test] = np.maximum(0.0, regret[test] - excess[test] + added)
    inside = regret <= bound
    ranges = _ranges(dataset)
    card = BoundsCard(
        offsets=_offsets(excess, provider, sorted(ranges)),
        ranges=ranges,
        coverage={
            "all": float(inside.mean()),
            **{name: float(inside[provider == name].mean()) for name in np.unique(provider)},
        },
        median=float(np.exp(np.median(bound))),
    )
    return text_of(grown.fit(matrix, regret, feature_name=list(signal_names(operation)))), card


def _offsets(
    excess: NDArray[np.float64], provider: NDArray[np.str_],
    wanted: Sequence[str] | NDArray[np.str_],
) -> dict[str, float]:  # fmt: skip
    """Return what at most a share ``MISS`` of answers exceeds, for each of the `wanted`
    providers."""
    found = {}
    for name in wanted:
        own = excess[provider == name]
        some = own if len(own) >= _FEWEST else excess
        level = min(1.0, (1 - MISS) * (1 + 1 / len(some)))
        found[str(name)] = float(np.quantile(some, level, method="higher"))
    return found


def _parts(found: Sequence[Answer]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Return which answers to learn from, and which to predict then: all of a network and of a
    layer are in one part. Where almost all are, they are predicted by what has seen them."""
    first: dict[str, str] = {}
    owner = [first.setdefault(str(a.problem.layer()), a.networks[0]) for a in found]
    sizes = Counter(owner)
    if len(found) - max(sizes.values()) < 2:  # LightGBM learns from two at least
        return [(np.arange(len(found)), np.arange(len(found)))]
    return list(GroupKFold(min(_PARTS, len(sizes))).split(found, groups=owner))


def _ranges(dataset: Dataset) -> dict[str, dict[str, list[float]]]:
    """Return the least and the largest values of the features of each provider's problems."""
    problems: dict[str, list[Record]] = defaultdict(list)
    for t in dataset.timings:
        problems[t.family].append(t.problem)
    if dataset.pytorch_ms:
        problems[PYTORCH] = list(dataset.pytorch_ms)
    found = {}
    for name, own in sorted(problems.items()):
        features = pytorch_features(dataset.operation, own, dataset.device)
        found[name] = {
            "least": features.min(axis=0).tolist(),
            "largest": features.max(axis=0).tolist(),
        }
    return found
