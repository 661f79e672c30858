"""Layers of an evaluation, in groups, from the JSON that ``confpred evaluate --json`` writes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from confpred.training import EVALUATION_FORMAT, Said, unsaid
from confpred.training.dataset import Dataset, Timings
from confpred.training.regret import Spread, geomean

_BATCHES = (1, 4, 8, 16, 32, 64, 128)  # upper ends of the groups of batch sizes
_BATCH_NAMES = ("1", *(f"{a + 1} to {b}" for a, b in pairwise(_BATCHES)), "129 and more")
_TIMES_MS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.5)  # upper ends of the groups of times
_FASTEST = 5  # fastest configs that are shown beside the choice
_LAYERS, _CONFIGS = 40, 32  # of a pool, and of each of these layers, to measure importances on
_SEED = 0
#: The subjects that layers are grouped by, as a page calls them.
SUBJECTS = {
    "family": "kernel family",
    "direction": "direction",
    "dtype": "dtype",
    "batch": "batch size",
    "network": "network",
}


@dataclass(frozen=True, slots=True)
class JudgedLayer:
    """A problem and family, and the regret of the choice for it."""

    problem: Record
    networks: tuple[str, ...]  # networks that have the problem
    family: str  # family of the chosen config
    best_ms: float  # time of the family's fastest measured config
    regret: float  # time of the choice over `best_ms`
    candidates: int  # configs to choose from
    #: Bound on its regret: the 95 % quantile of the regret in the other folds than the layer's.
    bound: float


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """An evaluation, read and checked."""

    name: str  # name in tables: the device, with a number if it has several evaluations
    device: Device
    layers: tuple[JudgedLayer, ...]  # every judged problem and family
    figures: Mapping[str, Any]  # the content of the file


def read_evaluation(path: Path) -> Evaluated:
    """Read the output of ``confpred evaluate --json``.

    Raises:
        DataError: the file cannot be read, is damaged, or is no evaluation.
    """
    return evaluated(read_json(path, "an evaluation", EVALUATION_FORMAT), path.name)


def evaluated(figures: Mapping[str, Any], source: str) -> Evaluated:
    """Return an evaluation from figures as its ``to_json`` writes them; errors name `source`.

    Raises:
        DataError: the figures are damaged.
    """
    try:
        device = get_device(figures["device"])
        entries = list(figures["judged"])
        layers = tuple(map(_layer, entries, _constant_bounds(figures)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = str(error) if isinstance(error, ConfpredError) else repr(error)
        raise DataError(f"{source} is damaged: {reason}") from error
    if not layers:
        raise DataError(f"{source} judges no layer")
    return Evaluated(device.key, device, layers, figures)


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
    bound = np.empty(len(regret))
    for number in np.unique(fold):
        others = regret[fold != number]
        bound[fold == number] = np.quantile(others if len(others) else regret, COVERAGE)
    bounds: list[float] = bound.tolist()
    return bounds


@dataclass(frozen=True, slots=True)
class Group:
    """Judged layers with a common property, which is the group's name."""

    name: str
    regret: Spread
    bound: float  # geometric mean of the bounds
    covered: float  # share of them whose regret is within its bound

    @classmethod
    def of(cls, name: str, layers: Sequence[JudgedLayer]) -> Group:
        """Return the figures of at least one layer."""
        regret = np.array([layer.regret for layer in layers])
        bound = np.array([layer.bound for layer in layers])
        return cls(name, Spread.of(regret), geomean(bound), float((regret <= bound).mean()))


def groups_of(layers: Iterable[JudgedLayer], subject: str) -> list[Group]:
    """Return the layers in groups by one of ``SUBJECTS``, in the order of their names; networks
    come in that of their regret, the worst first, and a layer counts in all of its networks.
    Layers whose problems have no such field are in no group."""
    members: dict[str, list[JudgedLayer]] = defaultdict(list)
    for layer in layers:
        for name in _names(layer, subject):
            members[name].append(layer)
    groups = [Group.of(name, own) for name, own in sorted(members.items())]
    if subject == "network":
        groups.sort(key=lambda group: -group.regret.geomean)
    if subject == "batch":
        groups.sort(key=lambda group: _BATCH_NAMES.index(group.name))
    return groups


def _names(layer: JudgedLayer, subject: str) -> Sequence[str]:
    if subject == "network":
        return layer.networks
    if subject == "family":
        return [layer.family]
    value = getattr(layer.problem, "n" if subject == "batch" else subject, None)
    if value is None:
        return []
    if subject == "batch":
        return [_BATCH_NAMES[int(np.searchsorted(_BATCHES, value))]]
    return [str(value)]


@dataclass(frozen=True, slots=True)
class Noise:
    """Statistics of the noise: interquartile range of a config's replays over their median."""

    name: str  # what the configs have in common
    configs: int
    median: float  # this and the next: statistics of that ratio
    p95: float

    @classmethod
    def of(cls, name: str, spread: NDArray[np.float64]) -> Noise:
        """Return the statistics of the ratios that were recorded."""
        ratios = spread[~np.isnan(spread)]
        if not len(ratios):
            return cls(name, len(spread), math.nan, math.nan)
        return cls(name, len(spread), float(np.median(ratios)), float(np.quantile(ratios, 0.95)))


def noise_by_family(timings: Sequence[Timings]) -> list[Noise]:
    spread: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for t in timings:
        spread[t.family].append(t.spread_ms / t.time_ms)
    return [Noise.of(family, np.concatenate(ratios)) for family, ratios in sorted(spread.items())]


def noise_by_time(timings: Sequence[Timings]) -> list[Noise]:
    times = np.concatenate([t.time_ms for t in timings])
    spread = np.concatenate([t.spread_ms for t in timings]) / times
    group = np.searchsorted(_TIMES_MS, times)
    names = [f"up to {_TIMES_MS[0]:g} ms"]
    names += [f"{a:g} to {b:g} ms" for a, b in pairwise(_TIMES_MS)]
    names.append(f"above {_TIMES_MS[-1]:g} ms")
    return [Noise.of(names[number], spread[group == number]) for number in np.unique(group)]


@dataclass(frozen=True, slots=True)
class MeasuredConfig:
    """One measured config of a layer."""

    rank: int  # 1 for the fastest measured config
    config: str  # in words
    time_ms: float
    spread: float  # interquartile range of the time over the time
    chosen: bool  # whether this config was chosen


@dataclass(frozen=True, slots=True)
class WorstLayer:
    """A layer with a large regret, and its measurements, if the page has them."""

    layer: JudgedLayer
    floor_share: float  # share of the roofline that its best config reaches
    measured: Sequence[MeasuredConfig]  # the fastest configs, and the chosen one
    count: int  # how many configs were measured
    pytorch_ms: float | None  # time of PyTorch's operator


def worst_layers(evaluated: Evaluated, dataset: Dataset | None, count: int) -> list[WorstLayer]:
    """Return the `count` layers with the largest regret, the worst first."""
    ordered = sorted(evaluated.layers, key=lambda layer: (-layer.regret, str(layer.problem)))
    of_layer = {} if dataset is None else {(t.problem, t.family): t for t in dataset.timings}
    worst = []
    for layer in ordered[:count]:
        timings = of_layer.get((layer.problem, layer.family))
        worst.append(
            WorstLayer(
                layer=layer,
                floor_share=evaluated.device.roofline_s(layer.problem) * 1e3 / layer.best_ms,
                measured=[] if timings is None else _measured(layer, timings),
                count=0 if timings is None else len(timings.rows),
                pytorch_ms=dataset.pytorch_ms.get(layer.problem) if dataset else None,
            )
        )
    return worst


def _measured(layer: JudgedLayer, timings: Timings) -> list[MeasuredConfig]:
    """Return the fastest configs and the chosen one.

    An evaluation has the time of its choice and not the config, which is identified by that time:
    two configs hardly have the same time to the bit.
    """
    chosen = int(np.abs(timings.time_ms - layer.regret * layer.best_ms).argmin())
    order = np.argsort(timings.time_ms, kind="stable").tolist()
    return [
        MeasuredConfig(
            rank=order.index(i) + 1,
            config=config_words(Candidate(timings.family, int(timings.rows[i]))),
            time_ms=float(timings.time_ms[i]),
            spread=float(timings.spread_ms[i] / timings.time_ms[i]),
            chosen=i == chosen,
        )
        for i in dict.fromkeys([*order[:_FASTEST], chosen])
    ]


@dataclass(frozen=True, slots=True)
class Importance:
    """One feature of a pool of families.

    A model's files lack LightGBM's own counts, so importances are measured: the values of the
    feature are shuffled among many rows.
    """

    feature: str
    theme: str  # group of the feature in explanations
    #: Root mean square of the change that the shuffle makes in the ratio of the predicted times of
    #: two configs of a layer: 0.05 is 5 %.
    moved: float


def importances(model: Model, say: Said = unsaid) -> dict[str, list[Importance]]:
    """Return the features of each pool of `model`, the largest importance first.

    They are measured on layers of the model's data and the legal configs for them.
    """
    pools: dict[str, list[FamilyModel]] = defaultdict(list)
    for learned in model.families.values():
        pools[learned.pool.name].append(learned)
    by_pool = {}
    for done, (name, members) in enumerate(sorted(pools.items())):
        say(f"importances in {model.version}", done, len(pools))
        by_pool[name] = _of_pool(model, members)
    return by_pool


def _of_pool(model: Model, members: Sequence[FamilyModel]) -> list[Importance]:
    rng = np.random.default_rng(_SEED)
    order, fields = members[0].order, members[0].family.configs.dtype.names or ()
    parts = _features(model, members, rng)
    if not parts:
        return []
    features = np.concatenate(parts)
    layer = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    before = order.predict(features)
    measured = []
    for column, name in enumerate(members[0].pool.feature_names):
        mixed = features.copy()
        mixed[:, column] = rng.permutation(mixed[:, column])
        if np.array_equal(mixed, features, equal_nan=True):
            continue
        moved = order.predict(mixed) - before
        # Less each layer's mean: a change of all of its configs changes no choice.
        moved -= (np.bincount(layer, moved) / np.bincount(layer))[layer]
        theme = theme_of(name, fields) if _varies(features[:, column], layer) else "layer"
        measured.append(Importance(name, theme, float(np.expm1(np.sqrt((moved**2).mean())))))
    return sorted(measured, key=lambda importance: -importance.moved)


def _features(
    model: Model, members: Sequence[FamilyModel], rng: np.random.Generator
) -> list[NDArray[np.float32]]:
    """Return the features of some configs of some layers, one matrix a layer and family."""
    kind = model.operation.problem
    words = list(model.measured)
    matrices = []
    for index in rng.permutation(len(words)).tolist():
        problem = kind.parse(words[index])
        for learned in members:
            rows = learned.legal(problem, model.device)
            rows = np.sort(rng.permutation(rows)[:_CONFIGS])
            if len(rows) > 1:
                matrices.append(learned.features(problem, model.device, rows))
        if len(matrices) >= _LAYERS:
            break
    return matrices


def _varies(column: NDArray[np.float32], layer: NDArray[np.intp]) -> bool:
    """Return whether the configs of some layer differ in this feature."""
    same = layer[1:] == layer[:-1]
    differs = (column[1:] != column[:-1]) & ~(np.isnan(column[1:]) & np.isnan(column[:-1]))
    return bool((same & differs).any())
