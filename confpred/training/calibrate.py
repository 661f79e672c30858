"""Parts of a model beside the order and the time of configs: which families can win, how PyTorch's
operator compares with them, and a bound on an answer's regret."""

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

MIN_PROBLEMS = 30  # fewer do not show where PyTorch's operator wins
#: Logarithms of ratios are clipped here, at 2.7 times as fast or slow: they decide which is faster,
#: and outliers of 30 times, which cuDNN has now and then, do not help there.
CAP = 1.0
#: Weight of a slowdown over PyTorch's operator, relative to a speedup that is missed because the
#: operator is preferred (decision 169).
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
#: examples above it (decision 170); the offsets make it a bound.
_GROW_BOUND = {
    "objective": "regression_l1",
    "n_estimators": 80,
    "learning_rate": 0.05,
    "num_leaves": 6,
    "colsample_bytree": 0.5,
    "subsample": 0.7,
    "subsample_freq": 1,
}
_FEWEST = 40  # answers that a provider needs to be calibrated alone
#: Milliseconds by device and problem.
Times = Mapping[tuple[Device, Record], float]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer for a problem, by models that were trained without its layer."""

    problem: Record
    networks: tuple[str, ...]  # networks that have the problem, sorted
    options: Options  # all candidates in the order of the answer, with their expected seconds
    ours_ms: float  # time of the first measured confpred config in that order
    our_best_ms: float  # time of the fastest measured config of all families
    pytorch_ms: float | None  # measured time of PyTorch's operator, if it is a candidate

    @property
    def chosen(self) -> Candidate:
        """The first candidate."""
        return self.options[0][1]

    @property
    def best_ms(self) -> float:
        """Time of the fastest measured candidate."""
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
    """Fit the logarithm of (PyTorch's time / time of confpred's best config), on all devices that
    were measured.

    Args:
        ours_ms: times of the best configs (`confpred.training.cross_validate.best_ms`).
        pytorch_ms: times of PyTorch's operator, in cuDNN's benchmark mode. Problems that are not in
            both are left out.
        operation: the operation of the problems.
        device: the device that the model is for.
        hyper: how the trees grow.
        seed: seed of the trees.

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
    """Return the least prediction for which a config is preferred to PyTorch's operator, by kind of
    problem: the one that would have lost least on problems of the kind, or on all problems if the
    kind has fewer than ``MIN_PROBLEMS``.

    Args:
        kinds: kinds of the problems, which the predictions were not learned from.
        expected: predicted logarithms of PyTorch's time over that of the best config.
        actual: measured logarithms of PyTorch's time over that of the chosen config, because a
            choice that is not the fastest is one reason for a prediction that is too large.
    """
    by_kind = {}
    for kind in sorted(set(kinds)):
        of_kind = np.array(kinds) == kind
        if of_kind.sum() < MIN_PROBLEMS:
            of_kind[:] = True
        by_kind[kind] = _best_margin(expected[of_kind], actual[of_kind])
    return by_kind


def _best_margin(expected: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Return the margin, from 0 to ``CAP``, that loses least if a config is preferred where
    `expected` is above it; ``CAP`` if there are too few problems to tell."""
    if len(expected) < MIN_PROBLEMS:
        return CAP
    order = np.argsort(expected, kind="stable")
    rising, ahead = expected[order], actual[order]
    # By the number of problems, the first ones, for which PyTorch's operator is preferred: speedups
    # that are missed for these, and slowdowns of the others.
    given_away = np.concatenate([[0.0], np.cumsum(ahead.clip(min=0))])
    lost = np.concatenate([np.cumsum((-ahead).clip(min=0)[::-1])[::-1], [0.0]])
    steps = np.concatenate([[0.0], rising[(rising > 0) & (rising < CAP)], [CAP]])
    tried = (steps[:-1] + steps[1:]) / 2  # all margins between two problems give the same choices
    first = np.searchsorted(rising, tried)  # problem on which a config would be chosen
    return float(tried[np.argmin(given_away[first] + CAUTION * lost[first])])


@dataclass(frozen=True, slots=True, eq=False)
class FittedGate:
    """A `confpred.model.rank.Gate`, with its regressor in LightGBM's text form."""

    families: tuple[str, ...]
    lag: str
    problems: tuple[Record, ...]  # problems that it was fitted to


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
        device: {problem: times for problem, times in own.items() if len(times) > 1}
        for device, own in best.items()
    }
    measured = [times for own in compared.values() for times in own.values()]
    if len(measured) < MIN_PROBLEMS:
        return None
    families = tuple(sorted({name for times in measured for name in times}))
    features = np.concatenate(
        [
            gate_features(operation, list(own), device, families, list(map(list, own.values())))
            for device, own in compared.items()
            if own
        ]
    )
    lag = [np.log(ms / min(times.values())) for times in measured for ms in times.values()]
    problems = sorted({problem for own in compared.values() for problem in own}, key=str)
    names = [*operation.feature_names, FAMILY]
    model = clone(REGRESSOR).set_params(**_GROW_GATE, random_state=seed)
    model.fit(features, np.clip(lag, 0.0, CAP), feature_name=names)
    return FittedGate(families, text_of(model), tuple(problems))


def fit_bounds(answers: Sequence[Answer], dataset: Dataset, seed: int) -> tuple[str, BoundsCard]:
    """Fit the bound on regret to answers for held-out networks.

    Returns:
        The regressor of a `confpred.model.bounds.Bounds` in LightGBM's text form, and its card.
        There, ``coverage`` and ``median`` are of bounds that were fitted and calibrated without the
        answers' layers, and mostly without their networks (`_parts`).

    Raises:
        DataError: there are fewer than two answers.
    """
    if len(answers) < 2:
        raise DataError(f"a bound on regret needs at least 2 problems; found {len(answers)}")
    operation, device = dataset.operation, dataset.device
    regret = np.log([answer.regret for answer in answers])
    provider = np.array([answer.chosen.provider for answer in answers])
    features = pytorch_features(operation, [answer.problem for answer in answers], device)
    matrix = signals(features, [answer.options for answer in answers])
    grown = clone(REGRESSOR).set_params(
        **_GROW_BOUND,
        min_child_samples=min(_LEAST_IN_LEAF, max(1, len(answers) // 20)),
        random_state=seed,
    )
    parts = _parts(answers)
    excess = regret - cross_val_predict(grown, matrix, regret, cv=parts)
    bound = np.empty(len(answers))
    for train, test in parts:
        offsets = _offsets(excess[train], provider[train], provider)
        added = np.array([offsets[name] for name in provider[test]])
        # Without its excess the regret is as predicted.
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
    """Return for each of the `wanted` providers the value that at most a share ``MISS`` of its
    answers exceeds.

    Args:
        excess: how far log(regret) of each answer is above its prediction.
        provider: the chosen provider of each answer.
        wanted: names; a provider of fewer than ``_FEWEST`` answers gets the value of all answers.
    """
    offsets = {}
    for name in wanted:
        own = excess[provider == name]
        some = own if len(own) >= _FEWEST else excess
        # A little higher than 1 - MISS, so that it holds for a further answer too (conformal).
        level = min(1.0, (1 - MISS) * (1 + 1 / len(some)))
        offsets[str(name)] = float(np.quantile(some, level, method="higher"))
    return offsets


def _parts(answers: Sequence[Answer]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Return the positions of the answers to train on and of those to predict, for each part.

    All answers of a layer are in one part, and so are those of all layers that have their first
    answer of the same network. If nearly all are of one network, every answer is predicted by a
    model that was trained on it.
    """
    first: dict[str, str] = {}
    owner = [first.setdefault(str(a.problem.layer()), a.networks[0]) for a in answers]
    sizes = Counter(owner)
    if len(answers) - max(sizes.values()) < 2:  # LightGBM learns from two at least
        return [(np.arange(len(answers)), np.arange(len(answers)))]
    return list(GroupKFold(min(_PARTS, len(sizes))).split(answers, groups=owner))


def _ranges(dataset: Dataset) -> dict[str, dict[str, list[float]]]:
    """Return the smallest and the largest value of each feature of each provider's problems."""
    problems: dict[str, list[Record]] = defaultdict(list)
    for t in dataset.timings:
        problems[t.family].append(t.problem)
    if dataset.pytorch_ms:
        problems[PYTORCH] = list(dataset.pytorch_ms)
    ranges = {}
    for name, own in sorted(problems.items()):
        features = pytorch_features(dataset.operation, own, dataset.device)
        ranges[name] = {
            "least": features.min(axis=0).tolist(),
            "largest": features.max(axis=0).tolist(),
        }
    return ranges
