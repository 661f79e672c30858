"""Layers of an evaluation, in groups.

An evaluation is read from the JSON that ``confpred evaluate --json`` writes, so that a page can be
made of one that took its time elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.errors import ConfpredError, DataError
from confpred.families.protocol import Candidate
from confpred.families.registry import all_families, config_words
from confpred.files import read_json
from confpred.model.folder import Model
from confpred.model.rank import FamilyModel
from confpred.predict.explain import theme_of
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record
from confpred.report import COVERAGE
from confpred.training import EVALUATION_FORMAT
from confpred.training.dataset import Dataset, Timings

#: A choice that takes this many times as long as the best config is told apart as slow.
SLOW = 1.1
_BATCHES = (1, 4, 8, 16, 32, 64, 128)  # upper ends of the groups of batch sizes


@dataclass(frozen=True, slots=True)
class JudgedLayer:
    """A problem and family, and what the choice for it cost.

    Attributes:
        problem: what was computed.
        networks: the networks that have it.
        family: the kernel family of which a config was chosen.
        best_ms: time of its fastest measured config, milliseconds.
        regret: time of the choice over that.
        candidates: configs that were chosen from.
        bound: the bound on the regret that came with the choice; where the evaluation has none,
            the 95 % quantile of the regret in the folds that the layer is not of.
    """

    problem: Record
    networks: tuple[str, ...]
    family: str
    best_ms: float
    regret: float
    candidates: int
    bound: float


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """An evaluation, read and checked.

    Attributes:
        name: what tables call it: the device, or the device and the file where there are several.
        device: what was measured.
        layers: every judged problem and family.
        own_bounds: whether the evaluation has a bound for each of them.
        figures: the content of the file.
    """

    name: str
    device: Device
    layers: tuple[JudgedLayer, ...]
    own_bounds: bool
    figures: Mapping[str, Any]


def read_evaluation(path: Path) -> Evaluated:
    """Read what ``confpred evaluate --json`` wrote.

    Raises:
        DataError: the file cannot be read, is damaged, or is no evaluation.
    """
    return evaluated(read_json(path, "an evaluation", EVALUATION_FORMAT), path.name)


def evaluated(figures: Mapping[str, Any], source: str) -> Evaluated:
    """Return an evaluation from its figures, as its ``to_json`` has them; errors name `source`.

    Raises:
        DataError: they are damaged.
    """
    try:
        device = get_device(figures["device"])
        entries = list(figures["judged"])
        own = bool(entries) and all(entry.get("regret_bound") is not None for entry in entries)
        bounds = [e["regret_bound"] for e in entries] if own else _constant_bounds(figures)
        layers = tuple(map(_layer, entries, bounds))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{source} is damaged: {_reason(error)}") from error
    if not layers:
        raise DataError(f"{source} judges no layer")
    return Evaluated(device.key, device, layers, own, figures)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ConfpredError) else repr(error)


def _layer(entry: Mapping[str, Any], bound: float) -> JudgedLayer:
    family = all_families()[entry["family"]]
    best_ms, regret = float(entry["oracle_ms"]), float(entry["regret"])
    if not all(0 < number < math.inf for number in (best_ms, regret, bound)) or regret < 1:
        raise ValueError(f"impossible figures of {entry['problem']!r}")
    return JudgedLayer(
        problem=family.operation.problem.parse(entry["problem"]),
        networks=tuple(map(str, entry["networks"])),
        family=family.name,
        best_ms=best_ms,
        regret=regret,
        candidates=int(entry["candidates"]),
        bound=float(bound),
    )


def _constant_bounds(figures: Mapping[str, Any]) -> list[float]:
    """Return a single bound for each judged layer, calibrated on all folds but its own.

    Its fold is the one that holds out the first of its networks.
    """
    fold_of = {name: i for i, fold in enumerate(figures["folds"]) for name in fold["networks"]}
    regret = np.array([float(entry["regret"]) for entry in figures["judged"]])
    fold = np.array([fold_of.get(entry["networks"][0], -1) for entry in figures["judged"]])
    bound = {}
    for number in set(fold.tolist()):
        others = regret[fold != number]
        bound[number] = float(np.quantile(others if len(others) else regret, COVERAGE))
    return [bound[number] for number in fold.tolist()]


@dataclass(frozen=True, slots=True)
class Group:
    """Judged layers that have something in common.

    Attributes:
        name: what it is.
        layers: how many.
        geomean, p95, worst: of their regret.
        slow: share of them with a regret above ``SLOW``.
        efficiency: mean of best time over the choice's.
        efficiency_p10: its 10 % quantile.
        bound: geometric mean of the bounds.
        covered: share of them whose regret is within its bound.
    """

    name: str
    layers: int
    geomean: float
    p95: float
    worst: float
    slow: float
    efficiency: float
    efficiency_p10: float
    bound: float
    covered: float

    @classmethod
    def of(cls, name: str, layers: Sequence[JudgedLayer]) -> Group:
        """Return the figures of at least one layer."""
        regret = np.array([layer.regret for layer in layers])
        bound = np.array([layer.bound for layer in layers])
        return cls(
            name=name,
            layers=len(layers),
            geomean=_geomean(regret),
            p95=float(np.quantile(regret, 0.95)),
            worst=float(regret.max()),
            slow=float((regret > SLOW).mean()),
            efficiency=float((1 / regret).mean()),
            efficiency_p10=float(np.quantile(1 / regret, 0.1)),
            bound=_geomean(bound),
            covered=float((regret <= bound).mean()),
        )


def _geomean(values: NDArray[np.float64]) -> float:
    return float(np.exp(np.log(values).mean()))


def grouped(
    layers: Iterable[JudgedLayer], names: Callable[[JudgedLayer], Iterable[str]]
) -> list[Group]:
    """Return the groups that `names` puts layers in, in the order of their first layers."""
    members: dict[str, list[JudgedLayer]] = {}
    for layer in layers:
        for name in names(layer):
            members.setdefault(name, []).append(layer)
    return [Group.of(name, found) for name, found in members.items()]


def by_family(layers: Sequence[JudgedLayer]) -> list[Group]:
    return sorted(grouped(layers, lambda layer: [layer.family]), key=lambda g: g.name)


def by_network(layers: Sequence[JudgedLayer]) -> list[Group]:
    """Group by network, the one that loses most first; a layer counts in all of its networks."""
    return sorted(grouped(layers, lambda layer: layer.networks), key=lambda g: (-g.geomean, g.name))


def by_direction(layers: Sequence[JudgedLayer]) -> list[Group]:
    """Empty where problems have no direction."""
    return sorted(grouped(layers, lambda layer: _field(layer, "direction")), key=lambda g: g.name)


def by_dtype(layers: Sequence[JudgedLayer]) -> list[Group]:
    return sorted(grouped(layers, lambda layer: _field(layer, "dtype")), key=lambda g: g.name)


def by_batch(layers: Sequence[JudgedLayer]) -> list[Group]:
    """Empty where problems have no batch ``n``."""
    found = {group.name: group for group in grouped(layers, _batch)}
    return [found[name] for name in _batch_names() if name in found]


def _field(layer: JudgedLayer, name: str) -> list[str]:
    value = getattr(layer.problem, name, None)
    return [] if value is None else [str(value)]


def _batch(layer: JudgedLayer) -> list[str]:
    n = getattr(layer.problem, "n", None)
    return [] if n is None else [_batch_names()[int(np.searchsorted(_BATCHES, n))]]


def _batch_names() -> list[str]:
    names, low = [], 1
    for high in _BATCHES:
        names.append(str(high) if low == high else f"{low} to {high}")
        low = high + 1
    return [*names, f"{low} and more"]


#: Upper ends of the groups of times, milliseconds.
_TIMES_MS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


@dataclass(frozen=True, slots=True)
class Noise:
    """Interquartile range of the replays of a config, over their median.

    Attributes:
        name: what the configs have in common.
        configs: how many there are.
        median, p95: of that ratio.
    """

    name: str
    configs: int
    median: float
    p95: float


def noise_by_family(timings: Sequence[Timings]) -> list[Noise]:
    return [
        _noise(family, [t for t in timings if t.family == family])
        for family in sorted({t.family for t in timings})
    ]


def noise_by_time(timings: Sequence[Timings]) -> list[Noise]:
    times = np.concatenate([t.time_ms for t in timings])
    spread = np.concatenate([t.spread_ms for t in timings]) / times
    group = np.searchsorted(_TIMES_MS, times)
    names = [f"up to {_TIMES_MS[0]:g} ms"]
    names += [f"{a:g} to {b:g} ms" for a, b in pairwise(_TIMES_MS)]
    names.append(f"above {_TIMES_MS[-1]:g} ms")
    return [
        _of(name, spread[group == number])
        for number, name in enumerate(names)
        if (group == number).any()
    ]


def _noise(name: str, timings: Sequence[Timings]) -> Noise:
    return _of(name, np.concatenate([t.spread_ms / t.time_ms for t in timings]))


def _of(name: str, spread: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Noise:
    known = spread[~np.isnan(spread)]
    if not len(known):
        return Noise(name, len(spread), float("nan"), float("nan"))
    return Noise(name, len(spread), float(np.median(known)), float(np.quantile(known, 0.95)))


_FASTEST = 5  # configs that are told of beside the choice


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured config of a layer.

    Attributes:
        rank: 1 for the fastest that was measured.
        config: in words.
        time_ms: milliseconds.
        spread: interquartile range of the time over the time.
        chosen: whether this is what was chosen.
    """

    rank: int
    config: str
    time_ms: float
    spread: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class WorstLayer:
    """A layer, and what was measured of it.

    Attributes:
        evaluation: name of the evaluation.
        layer: as it was judged.
        floor_share: the part of the roofline that its best config reaches.
        measured: the fastest configs, and the chosen one; empty without the measurements.
        count: how many configs were measured; 0 without the measurements.
        pytorch_ms: time of PyTorch's operator, milliseconds, where it was measured.
    """

    evaluation: str
    layer: JudgedLayer
    floor_share: float
    measured: tuple[Measured, ...]
    count: int
    pytorch_ms: float | None


def worst_layers(evaluated: Evaluated, dataset: Dataset | None, count: int) -> list[WorstLayer]:
    """Return the `count` layers with the largest regret, the worst first."""
    ordered = sorted(evaluated.layers, key=lambda layer: (-layer.regret, str(layer.problem)))
    of_layer = {} if dataset is None else {(t.problem, t.family): t for t in dataset.timings}
    found = []
    for layer in ordered[:count]:
        timings = of_layer.get((layer.problem, layer.family))
        found.append(
            WorstLayer(
                evaluation=evaluated.name,
                layer=layer,
                floor_share=evaluated.device.roofline_s(layer.problem) * 1e3 / layer.best_ms,
                measured=() if timings is None else tuple(_measured(layer, timings)),
                count=0 if timings is None else len(timings.rows),
                pytorch_ms=dataset.pytorch_ms.get(layer.problem) if dataset else None,
            )
        )
    return found


def _measured(layer: JudgedLayer, timings: Timings) -> Sequence[Measured]:
    """Return the fastest configs and the chosen one.

    An evaluation names the time of its choice and not the config, and two configs hardly have the
    same time to the bit.
    """
    chosen = int(np.abs(timings.time_ms - layer.regret * layer.best_ms).argmin())
    order = np.argsort(timings.time_ms, kind="stable").tolist()
    shown = order[:_FASTEST]
    if chosen not in shown:
        shown = [*shown, chosen]
    return [
        Measured(
            rank=order.index(i) + 1,
            config=config_words(Candidate(timings.family, int(timings.rows[i]))),
            time_ms=float(timings.time_ms[i]),
            spread=float(timings.spread_ms[i] / timings.time_ms[i]),
            chosen=i == chosen,
        )
        for i in shown
    ]


# Importances. A model's files leave out LightGBM's own counts, so they are measured: the values of
# one feature are exchanged at random among many rows, and the result is how far that moves the
# predicted times of a layer's configs against one another.

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
    """Return the features of each pool of `model`, the largest importance first.

    They are measured on layers of its data and the configs that it offers for them.
    """
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
    """Return the features of some configs of some layers, one matrix a layer and family."""
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
    """Return `moved` less each layer's mean, as moving all its configs alike changes no choice."""
    mean = np.bincount(layer, moved) / np.bincount(layer)
    return moved - mean[layer]


def _varies(column: NDArray[np.float32], layer: NDArray[np.intp]) -> bool:
    """Whether the configs of some layer differ in this feature."""
    same = layer[1:] == layer[:-1]
    differs = (column[1:] != column[:-1]) & ~(np.isnan(column[1:]) & np.isnan(column[:-1]))
    return bool((same & differs).any())
