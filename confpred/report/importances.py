"""How much a model's order of configs rests on each feature.

A model's files leave out what LightGBM would count importances from, so they are measured: the
values of one feature are exchanged at random among many rows, and what counts is how far that moves
the predicted times of a layer's configs against one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from confpred.model.folder import Model
from confpred.model.rank import FamilyModel
from confpred.predict.explain import theme_of

_LAYERS, _CONFIGS = 40, 32  # of a pool, and of each of these layers
_SEED = 0


@dataclass(frozen=True, slots=True)
class Importance:
    """One feature of a pool of families.

    Attributes:
        feature: its name.
        theme: what it tells, as explanations group features.
        moved: root mean square by which the exchange moves the ratio of two configs' predicted
            times: 0.05 is 5 %.
    """

    feature: str
    theme: str
    moved: float


def importances(model: Model) -> dict[str, list[Importance]]:
    """The features of each pool of `model`, by the pool's name, the largest importance first, as
    measured on layers of its data and the configs that it offers for them."""
    pools: dict[str, list[FamilyModel]] = {}
    for learned in model.families.values():
        pools.setdefault(learned.pool.name, []).append(learned)
    return {name: _of_pool(model, members) for name, members in sorted(pools.items())}


def _of_pool(model: Model, members: Sequence[FamilyModel]) -> list[Importance]:
    rng = np.random.default_rng(_SEED)
    pool = members[0].pool
    parts = list(_features(model, members, rng))
    if not parts:
        return []
    features = np.concatenate(parts)
    layer = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    before = members[0].order.predict(features)
    found = []
    for column, name in enumerate(pool.feature_names):
        mixed = features.copy()
        mixed[:, column] = rng.permutation(mixed[:, column])
        if np.array_equal(mixed, features, equal_nan=True):
            continue
        moved = _within_layers(members[0].order.predict(mixed) - before, layer)
        fields = members[0].family.configs.dtype.names or ()
        theme = theme_of(name, fields) if _varies(features[:, column], layer) else "layer"
        found.append(Importance(name, theme, float(np.expm1(np.sqrt((moved**2).mean())))))
    return sorted(found, key=lambda importance: -importance.moved)


def _features(
    model: Model, members: Sequence[FamilyModel], rng: np.random.Generator
) -> list[NDArray[np.float32]]:
    """Those of some configs of some layers, one matrix a layer and family."""
    kind = model.operation.problem
    words = list(model.measured)
    found = []
    for index in rng.permutation(len(words)).tolist():
        problem = kind.parse(words[index])
        for learned in members:
            rows = learned.legal(problem, model.device)
            rows = np.sort(rng.permutation(rows)[:_CONFIGS])
            if len(rows) > 1:
                found.append(learned.features(problem, model.device, rows))
        if len(found) >= _LAYERS:
            break
    return found


def _within_layers(moved: NDArray[np.float64], layer: NDArray[np.intp]) -> NDArray[np.float64]:
    """What is left of `moved` when each layer's mean is taken off: what moves all configs of a
    layer alike changes no choice."""
    mean = np.bincount(layer, moved) / np.bincount(layer)
    return moved - mean[layer]


def _varies(column: NDArray[np.float32], layer: NDArray[np.intp]) -> bool:
    """Whether the configs of some layer differ in this feature."""
    same = layer[1:] == layer[:-1]
    differs = (column[1:] != column[:-1]) & ~(np.isnan(column[1:]) & np.isnan(column[:-1]))
    return bool((same & differs).any())
