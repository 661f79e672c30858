"""What an evaluation says of each layer, in groups.

An evaluation is read from the JSON that ``confpred evaluate --json`` writes, so that a page can be
made of one that took its time elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.errors import ConfpredError, DataError
from confpred.families.registry import all_families
from confpred.files import read_json
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record
from confpred.training import EVALUATION_FORMAT

#: A choice that takes this many times as long as the best config is told apart as slow.
SLOW = 1.1
COVERAGE = 0.95  # that a bound is calibrated for
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
    """An evaluation from its figures, as its ``to_json`` has them; `source` is named in errors.

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
    """For each judged layer what a single bound would be, calibrated on all folds but its own,
    which is the one that holds out the first of its networks."""
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
        """The figures of `layers`, of which there is at least one."""
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
    """The groups that `names` puts layers in, in the order of their first layers."""
    members: dict[str, list[JudgedLayer]] = {}
    for layer in layers:
        for name in names(layer):
            members.setdefault(name, []).append(layer)
    return [Group.of(name, found) for name, found in members.items()]


def by_family(layers: Sequence[JudgedLayer]) -> list[Group]:
    return sorted(grouped(layers, lambda layer: [layer.family]), key=lambda g: g.name)


def by_network(layers: Sequence[JudgedLayer]) -> list[Group]:
    """Each layer counts in all networks that have it; the network that loses most comes first."""
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
