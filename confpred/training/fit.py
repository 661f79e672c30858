"""From timings to regressors for each family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray

from confpred.errors import DataError
from confpred.families.registry import all_families
from confpred.model.pools import Pool, pools
from confpred.model.registers import Registers, registers_text
from confpred.problem.device import Device
from confpred.training.dataset import Timings
from confpred.training.steps import Said, unsaid

#: How many leaves a tree can have at least, however few rows there are: from 471 rows of layer norm
#: (`examples/`), choices had a regret of 2.18 with leaves of 200 rows, and of 1.07 with leaves of a
#: twentieth of the rows.
MIN_LEAVES = 20
#: Regrets end here, where configs are ordered: which of the hopeless ones is the worse, and by how
#: many thousand times, takes leaves from those that are close.
HOPELESS = 4.5
#: LightGBM's threads wait for one another by spinning, thousands of times a tree: with as many as
#: there are cores, anything else on the machine makes a fit of 2 s take minutes.
_THREADS = 1
#: What LightGBM writes of a tree only for continued training and explanations. Without it trees are
#: shorter, so the lengths of trees that LightGBM writes would be wrong, and are left out too.
_UNUSED = re.compile(
    r"^(?:split_gain|(?:leaf|internal)_(?:weight|count)|internal_value|tree_sizes)=.*\n",
    re.MULTILINE,
)
#: LightGBM writes 17 digits of a number. A feature is a float32, which nine digits tell from its
#: neighbours, though one that lies on a threshold may come to its other side. A leaf adds to a
#: logarithm, or to a ratio: what five decimals miss of it is nothing to a sum of hundreds, and of
#: what a model's files compress to, digits of leaves are the largest part.
_FORMATS: dict[str, Callable[[float], str]] = {
    "threshold": lambda x: f"{x:.9g}",
    "leaf_value": lambda x: f"{x:.5f}".rstrip("0").rstrip("."),
}
_NUMBERS = re.compile(rf"^({'|'.join(_FORMATS)})=(.*)$", re.MULTILINE)
#: Of an objective: the first and second derivative of the error by each prediction.
_Derivatives = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """How the trees grow; the field names are LightGBM's where it has one.

    Attributes:
        trees, num_leaves, learning_rate, min_data_in_leaf, feature_fraction: of the regressor that
            orders configs. A leaf needs no more than one in ``MIN_LEAVES`` of the rows.
        time_trees, time_leaves: the same for the regressor of their times, which shares the others.
        focus: a config weighs (best time of its problem / its time) to this power, because it is
            the order among the good configs that decides.
        pytorch_trees, pytorch_leaves: of the regressor of PyTorch's own operator
            (`confpred.training.pytorch`).
    """

    trees: int = 300
    num_leaves: int = 127
    learning_rate: float = 0.08
    min_data_in_leaf: int = 50
    feature_fraction: float = 0.8
    time_trees: int = 200
    time_leaves: int = 31
    focus: float = 4.0
    pytorch_trees: int = 200
    pytorch_leaves: int = 16


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """What was fitted for a pool: it makes the `FamilyModel` of each of the pool's families.

    Attributes:
        pool: the families.
        order, time: their regressors in LightGBM's text form.
        registers: of the compiled kernels of each family, as text, by its name; without families of
            which nothing is known.
    """

    pool: Pool
    order: str
    time: str
    registers: Mapping[str, str]


def fit_families(
    timings: Sequence[Timings],
    device: Device,
    hyper: Hyperparameters,
    seed: int,
    say: Said = unsaid,
) -> tuple[Fitted, ...]:
    """Fit each family that `timings` has on `device`; what other devices took for its configs, and
    for those of families with the same table, is learned from too. So is a family that only others
    were measured with, if that was for problems that `device` was measured with: what it competes
    with is known there, and what makes a config slow is much the same on all (decision 145). The
    same input gives the same bytes.

    Raises:
        DataError: there are no timings of `device`.
    """
    here = {t.problem for t in timings if t.device == device}
    if not here:
        raise DataError("no measurements are left to train on")
    names = {t.family for t in timings if t.device == device or t.problem in here}
    learned = {name: all_families()[name] for name in sorted(names)}
    found = pools(learned.values())
    fitted = []
    for number, pool in enumerate(found):
        say("fitting the model", number, len(found))
        own = [t for t in timings if learned.get(t.family) in pool.families]
        fitted.append(_fit_pool(own, pool, hyper, seed))
    say("fitting the model", len(found), len(found))
    return tuple(fitted)


def _fit_pool(timings: Sequence[Timings], pool: Pool, hyper: Hyperparameters, seed: int) -> Fitted:
    texts = {
        family.name: registers_text(
            family, [(t.problem, t.rows, t.registers) for t in timings if t.family == family.name]
        )
        for family in pool.families
    }
    tables = {name: text for name, text in texts.items() if text is not None}
    registers = {n: Registers(all_families()[n], text) for n, text in tables.items()}
    features = np.concatenate(
        [
            pool.features(
                all_families()[t.family], t.problem, t.device, t.rows, registers.get(t.family)
            )
            for t in timings
        ]
    )
    slowdown = np.concatenate([t.time_ms * 1e-3 / t.device.roofline_s(t.problem) for t in timings])
    time = lightgbm.Dataset(
        features,
        np.log(slowdown),
        weight=regrets(timings) ** -hyper.focus,
        feature_name=list(pool.feature_names),
    )
    return Fitted(
        pool=pool,
        order=grow_order(features, pool.feature_names, timings, hyper, seed),
        time=boost(time, growth(hyper, hyper.time_leaves, len(features)), hyper.time_trees, seed),
        registers=tables,
    )


def grow_order(
    features: NDArray[np.float32],
    names: Sequence[str],
    timings: Sequence[Timings],
    hyper: Hyperparameters,
    seed: int,
) -> str:
    """The regressor that orders configs, in LightGBM's text form.

    It learns differences within each of `timings`: what all configs of a problem have in common is
    nothing to order them by, and a problem's regrets are all off by one factor, as they are
    relative to the best of the few configs that were measured of it (decision 144).

    Args:
        features: a row for each config of each of `timings`.
        names: of its columns.
        timings: what was measured.
        hyper, seed: how it grows.
    """
    regret = regrets(timings)
    label, weight = np.log(regret.clip(max=HOPELESS)), regret**-hyper.focus
    timing = np.repeat(np.arange(len(timings)), [len(t.rows) for t in timings])
    weights = np.bincount(timing, weight)

    def within(predicted: NDArray[np.float64], _: lightgbm.Dataset) -> _Derivatives:
        error = predicted - label
        common = np.bincount(timing, weight * error) / weights
        return weight * (error - common[timing]), weight

    data = lightgbm.Dataset(features, label, feature_name=list(names))
    grow = {**growth(hyper, hyper.num_leaves, len(features)), "objective": within}
    return boost(data, grow, hyper.trees, seed)


def regrets(timings: Sequence[Timings]) -> NDArray[np.float64]:
    """How many times as long as the best measured config of its problem each config takes."""
    return np.concatenate([t.time_ms / t.time_ms.min() for t in timings])


def growth(hyper: Hyperparameters, leaves: int, rows: int) -> dict[str, Any]:
    """What `boost` is told of trees of so many leaves that learn from so many rows."""
    return {
        "num_leaves": leaves,
        "learning_rate": hyper.learning_rate,
        "min_data_in_leaf": min(hyper.min_data_in_leaf, rows // MIN_LEAVES),
        "feature_fraction": hyper.feature_fraction,
    }


def boost(data: lightgbm.Dataset, grow: Mapping[str, Any], trees: int, seed: int) -> str:
    """Regression trees in LightGBM's text form; `grow` are its parameters, and may name another
    objective than squared error.

    The text holds what predictions need, and is a third as long as LightGBM writes it.
    """
    fixed = {
        "objective": "regression",
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": _THREADS,
        "verbosity": -1,
    }
    booster = lightgbm.train({**fixed, **grow}, data, num_boost_round=trees)
    text, end, _ = str(booster.model_to_string()).partition("end of trees\n")
    return _NUMBERS.sub(_shorter, _UNUSED.sub("", text)) + end


def _shorter(line: re.Match[str]) -> str:
    written = _FORMATS[line[1]]
    return f"{line[1]}={' '.join(written(float(number)) for number in line[2].split())}"
