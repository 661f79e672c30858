"""Fit the regressors of each pool of families to timings, by LightGBM's estimators."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from lightgbm import LGBMModel, LGBMRanker, LGBMRegressor
from numpy.typing import NDArray
from sklearn.base import clone

from confpred.errors import DataError
from confpred.families.registry import all_families
from confpred.model.features import Pool, Registers, pools, registers_text
from confpred.model.rank import FamilyModel
from confpred.problem.device import Device
from confpred.problem.operation import Operation
from confpred.training import Said, unsaid
from confpred.training.dataset import Dataset, Timings
from confpred.triton.problem import KernelCall

#: Leaves that a tree can have at least, if there are few rows: trained on 471 rows of an
#: operation, choices had a regret of 2.18 with leaves of 200 rows, and of 1.07 with leaves of a
#: twentieth of the rows.
MIN_LEAVES = 20
#: Regrets are clipped here to order configs: trees would spend leaves on differences between very
#: slow configs, instead of those between good ones.
HOPELESS = 4.5
#: Configs are ranked by levels of their regret: 0 for ``LAST_LEVEL`` times the best and more,
#: ``LEVELS`` for the best. A level is worth ``GAIN`` times as much as the next lower one.
LEVELS, LAST_LEVEL, GAIN = 30, 1.3, 1.25
#: One thread: LightGBM's threads wait for one another by spinning, thousands of times a tree. With
#: as many as there are cores, anything else on the machine makes a fit of 2 s take minutes.
_ALIKE: dict[str, Any] = {
    "n_jobs": 1,
    "deterministic": True,
    "force_row_wise": True,
    "verbosity": -1,
}
REGRESSOR, RANKER = LGBMRegressor(**_ALIKE), LGBMRanker(**_ALIKE)
#: Lines of a tree that only continued training and explanations need. Without them trees are
#: shorter, so the lengths of trees that LightGBM writes would be wrong, and are left out too.
_UNUSED = re.compile(
    r"^(?:split_gain|(?:leaf|internal)_(?:weight|count)|internal_value|tree_sizes)=.*\n",
    re.MULTILINE,
)
#: LightGBM writes 17 digits of a number. A feature is a float32, which nine digits separate from
#: its neighbours, though one that lies on a threshold may come to its other side. A leaf adds to a
#: logarithm, or to a ratio: the error of five decimals is negligible in a sum of hundreds, and
#: digits of leaves are the largest part of a model's compressed files.
_FORMATS: dict[str, Callable[[float], str]] = {
    "threshold": lambda x: f"{x:.9g}",
    "leaf_value": lambda x: f"{x:.5f}".rstrip("0").rstrip("."),
}
_LEAVES, _END = re.compile(r"^leaf_value=(.*)$", re.MULTILINE), "end of trees\n"
_NUMBERS = re.compile(rf"^({'|'.join(_FORMATS)})=(.*)$", re.MULTILINE)
#: First and second derivative of an objective's error by each prediction.
_Derivatives = tuple[NDArray[np.float64], NDArray[np.float64]]
_Model = TypeVar("_Model", bound=LGBMModel)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters of the trees; the field names are LightGBM's where it has one."""

    trees: int = 300  # this and the next four: of the regressor that orders configs
    num_leaves: int = 127
    learning_rate: float = 0.08
    min_data_in_leaf: int = 50  # at most one in ``MIN_LEAVES`` of the rows
    feature_fraction: float = 0.8
    rank_trees: int = 300  # trees that rank configs, appended to these ...
    rank_weight: float = 0.02  # ... and the factor of their values
    time_trees: int = 300  # of the regressor of configs' times, which shares the others
    time_leaves: int = 127
    #: A config's weight is (best time of its problem / its time) to this power, because the order
    #: of the good configs decides the choice.
    focus: float = 4.0
    pytorch_trees: int = 200  # of the regressor of PyTorch's own operator
    pytorch_leaves: int = 16


#: A Triton kernel is sampled for minutes, and its model lies in a wheel (decision 214).
_OF_TRITON = Hyperparameters(
    trees=200, num_leaves=63, rank_trees=100, time_trees=100, time_leaves=63
)


def usual(operation: Operation) -> Hyperparameters:
    """Return how the trees of an operation grow, unless somebody says otherwise."""
    return _OF_TRITON if issubclass(operation.problem, KernelCall) else Hyperparameters()


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Fitted ensembles of a pool; they make the `FamilyModel` of each of the pool's families."""

    pool: Pool
    order: str  # the regressor that orders configs, in LightGBM's text form
    time: str  # the regressor of configs' times
    registers: Mapping[str, str]  # registers of compiled kernels, as text, by family


def fit_families(
    timings: Sequence[Timings],
    device: Device,
    hyper: Hyperparameters,
    seed: int,
    say: Said = unsaid,
) -> tuple[Fitted, ...]:
    """Fit each family that `timings` has on `device`, also from the times of its configs, and of
    families with the same config table, on other devices. A family that was measured on other
    devices alone is fitted too if those problems were measured on `device`: its competitors are
    known there, and much the same makes a config slow on all devices (decision 145). The same input
    gives the same bytes.

    Raises:
        DataError: there are no timings of `device`.
    """
    if not (names := learnable(timings, device)):
        raise DataError("no measurements are left to train on")
    learned = {name: all_families()[name] for name in sorted(names)}
    all_pools = pools(learned.values())
    fitted = []
    for number, pool in enumerate(all_pools):
        say("fitting the model", number, len(all_pools))
        own = [t for t in timings if learned.get(t.family) in pool.families]
        fitted.append(_fit_pool(own, pool, hyper, seed))
    say("fitting the model", len(all_pools), len(all_pools))
    return tuple(fitted)


def learnable(timings: Sequence[Timings], device: Device) -> set[str]:
    """Return the families that `fit_families` fits."""
    here = {t.problem for t in timings if t.device == device}
    return {t.family for t in timings if t.device == device or t.problem in here}


def _fit_pool(timings: Sequence[Timings], pool: Pool, hyper: Hyperparameters, seed: int) -> Fitted:
    texts, registers = {}, {}
    families = {family.name: family for family in pool.families}
    for name, family in families.items():
        own = [(t.problem, t.rows, t.registers) for t in timings if t.family == name]
        if (text := registers_text(family, own)) is not None:
            texts[name], registers[name] = text, Registers(family, text)
    features = np.concatenate(
        [
            pool.features(families[t.family], t.problem, t.device, t.rows, registers.get(t.family))
            for t in timings
        ]
    )
    slowdown = np.concatenate([t.time_ms * 1e-3 / t.device.roofline_s(t.problem) for t in timings])
    time = fresh(REGRESSOR, hyper, len(features), seed).set_params(
        n_estimators=hyper.time_trees, num_leaves=hyper.time_leaves
    )
    time.fit(
        features,
        np.log(slowdown),
        sample_weight=regrets(timings) ** -hyper.focus,
        feature_name=list(pool.feature_names),
    )
    order = grow_order(features, pool.feature_names, timings, hyper, seed)
    return Fitted(pool=pool, order=order, time=text_of(time), registers=texts)


def grow_order(
    features: NDArray[np.float32],
    names: Sequence[str],
    timings: Sequence[Timings],
    hyper: Hyperparameters,
    seed: int,
) -> str:
    """Return the ensemble that orders configs, in LightGBM's text form.

    Its first trees learn differences within each of `timings`, because a factor that all configs of
    a problem share does not order them. A problem's regrets share an unknown factor: they are
    relative to the best of the few configs that were measured (decision 144). The other trees learn
    to rank, which separates close configs (decision 168). `features` has a row for each config of
    each of `timings`, and the columns `names`.
    """
    sizes, regret = [len(t.rows) for t in timings], regrets(timings)
    label, weight = np.log(regret.clip(max=HOPELESS)), regret**-hyper.focus
    timing = np.repeat(np.arange(len(timings)), sizes)
    weights = np.bincount(timing, weight)

    def within(label: NDArray[np.float64], predicted: NDArray[np.float64]) -> _Derivatives:
        error = predicted - label
        common = np.bincount(timing, weight * error) / weights
        return weight * (error - common[timing]), weight

    order = fresh(REGRESSOR, hyper, len(features), seed)
    order.set_params(objective=within, n_estimators=hyper.trees, num_leaves=hyper.num_leaves)
    order.fit(features, label, feature_name=list(names))
    if not hyper.rank_trees:
        return text_of(order)
    level = np.rint(LEVELS * (1 - label / np.log(LAST_LEVEL)).clip(min=0)).astype(int)
    rank = fresh(RANKER, hyper, len(features), seed).set_params(
        n_estimators=hyper.rank_trees,
        num_leaves=hyper.num_leaves,
        label_gain=[GAIN**level for level in range(LEVELS + 1)],
    )
    rank.fit(features, level, group=sizes, feature_name=list(names))
    return text_of(order, (rank, -hyper.rank_weight))


def teach(
    learned: FamilyModel, base: Dataset, uploaded: Sequence[Timings], hyper: Hyperparameters
) -> str:
    """Return trees that order the configs of a family in place of its present ones, fitted to the
    times of its pool in `base` and to those that were `uploaded`."""
    pool = {family.name: replace(learned, family=family) for family in learned.pool.families}
    timings = [*(t for t in base.everywhere if t.family in pool), *uploaded]
    features = [pool[t.family].features(t.problem, t.device, t.rows) for t in timings]
    return grow_order(np.concatenate(features), learned.pool.feature_names, timings, hyper, 0)


def regrets(timings: Sequence[Timings]) -> NDArray[np.float64]:
    """Return each config's time over that of the best measured config of its problem."""
    return np.concatenate([t.time_ms / t.time_ms.min() for t in timings])


def fresh(kind: _Model, hyper: Hyperparameters, rows: int, seed: int) -> _Model:
    """Return an estimator like `kind`, not fitted yet, for so many rows."""
    estimator: _Model = clone(kind).set_params(
        learning_rate=hyper.learning_rate,
        min_child_samples=min(hyper.min_data_in_leaf, rows // MIN_LEAVES),
        colsample_bytree=hyper.feature_fraction,
        random_state=seed,
    )
    return estimator


def text_of(model: LGBMModel, *added: tuple[LGBMModel, float]) -> str:
    """Return `model`, and a multiple of others of the same features, as one ensemble
    in LightGBM's text form.

    The text holds what predictions need, and is a third as long as LightGBM writes it.
    """
    text, end, _ = str(model.booster_.model_to_string()).partition(_END)
    count = model.booster_.num_trees()
    for other, times in added:
        trees = str(other.booster_.model_to_string()).partition(_END)[0]
        for tree in trees.split("Tree=")[1:]:
            _, _, fields = tree.partition("\n")
            text += f"Tree={count}\n" + _LEAVES.sub(partial(_times, times), fields)
            count += 1
    return _NUMBERS.sub(_shorter, _UNUSED.sub("", text)) + end


def _times(times: float, line: re.Match[str]) -> str:
    return "leaf_value=" + " ".join(repr(float(value) * times) for value in line[1].split())


def _shorter(line: re.Match[str]) -> str:
    written = _FORMATS[line[1]]
    return f"{line[1]}={' '.join(written(float(number)) for number in line[2].split())}"
