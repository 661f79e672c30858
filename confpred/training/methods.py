"""Ways to choose a config: the model, and the baselines that it has to beat.

A *baseline* learns from training timings and returns a *judge*, which says what it would have cost
on a problem: the measured regret of its choice among the problem's measured configs. `score` says
the same of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from math import comb

import numpy as np
from numpy.typing import NDArray

from confpred.errors import MissingExtra
from confpred.families.protocol import Rows
from confpred.families.registry import all_families
from confpred.model.rank import FamilyModel
from confpred.model.registers import Registers
from confpred.model.trees import Trees
from confpred.problem.device import Device
from confpred.problem.record import Record
from confpred.training.dataset import Timings
from confpred.training.fit import Fitted

TOPS = (1, 3, 8)
_UNSERVED = 2.0  # the regret that a fixed config is charged where it was not measured


@dataclass(frozen=True, slots=True)
class Score:
    """How a method did on one problem.

    Attributes:
        regret: for each k of ``TOPS``, that of the best of the method's first k choices.
        candidates: configs that it chose from.
        predicted_ms: what it expected of its first choice; None where it expects nothing.
        ranked: what it would offer if nothing had to have been measured: the finalists among all
            legal configs, best first, and their expected seconds; None as before.
        ahead: how many times as long as the first of those its first choice among the measured
            configs is expected to take.
    """

    regret: tuple[float, ...]
    candidates: int
    predicted_ms: float | None = None
    ranked: tuple[Rows, NDArray[np.float64]] | None = None
    ahead: float = 1.0


#: A device and a problem on it.
At = tuple[Device, Record]
Judge = Callable[[Timings], Score]
Baseline = Callable[[Sequence[Timings], Device, int], Judge]


def baselines() -> dict[str, Baseline]:
    """The baselines to compare the model with, by the name that tables show."""
    return {
        "fixed config": _fixed,
        "roofline": _estimate,
        "XGBoost, raw ms": _ancestor,
        "random": _random,
    }


def family_models(fitted: Sequence[Fitted]) -> dict[str, FamilyModel]:
    """What was fitted, ready to predict, through the same code as a saved model."""
    models = {}
    for f in fitted:
        order, time = Trees(f.order), Trees(f.time)
        for family in f.pool.families:
            text = f.registers.get(family.name)
            registers = None if text is None else Registers(family, text)
            models[family.name] = FamilyModel(family, f.pool, order, time, registers)
    return models


def score(model: FamilyModel, t: Timings) -> Score:
    """How the model does on a problem, choosing among the configs that were measured."""
    rows, seconds = model.rank(t.problem, t.device, t.rows)
    legal = model.legal(t.problem, t.device)  # a family may need limits to be given
    if not len(legal):
        legal = t.rows
    ranked, all_seconds = model.rank(t.problem, t.device, legal)
    found = np.flatnonzero(ranked == rows[0])
    place = found[0] if len(found) else -1  # no better than the last finalist
    return Score(
        regret=_regret(t, np.searchsorted(t.rows, rows)),
        candidates=len(t.rows),
        predicted_ms=float(seconds[0]) * 1e3,
        ranked=(ranked, all_seconds),
        ahead=float(all_seconds[place] / all_seconds[0]),
    )


def best_ms(
    models: Mapping[str, FamilyModel], timings: Sequence[Timings], at: Collection[At]
) -> dict[At, float]:
    """Milliseconds of our best config of each of the problems `at`, in all of their families.

    Often the best one is not among the few that were measured. So the fastest measured time is
    divided by how far ahead of the measured configs the model's first choice is.
    """
    found: dict[At, float] = {}
    for t in timings:
        where = t.device, t.problem
        if where in at and t.family in models:
            ms = float(t.time_ms.min()) / score(models[t.family], t).ahead
            found[where] = min(found.get(where, np.inf), ms)
    return found


def _regret(t: Timings, order: NDArray[np.intp]) -> tuple[float, ...]:
    """Regret of the best of the first k of `order` (positions in `t`), for each k of ``TOPS``."""
    best = t.time_ms.min()
    return tuple(float(t.time_ms[order[:k]].min() / best) for k in TOPS)


def _of(timings: Sequence[Timings], device: Device) -> list[Timings]:
    """The timings of `device`, which is all that the baselines know."""
    return [t for t in timings if t.device == device]


def _fixed(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """One order of all configs, by mean log regret over the training problems; the first that a
    problem can use is taken. A config counts as ``_UNSERVED`` times the best where it is illegal
    or was not measured."""
    cost = {name: np.zeros(len(family.configs)) for name, family in all_families().items()}
    for t in _of(train, device):
        cost[t.family][t.rows] += np.log((t.time_ms / t.time_ms.min()).clip(max=_UNSERVED) / 2)
    return lambda t: Score(_regret(t, np.argsort(cost[t.family][t.rows], kind="stable")), 1)


def _estimate(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """The family's own analytic model, which learns nothing."""

    def judge(t: Timings) -> Score:
        seconds = all_families()[t.family].estimate_s(t.problem, device, t.rows)
        order = np.argsort(seconds, kind="stable")
        return Score(_regret(t, order), len(t.rows), float(seconds[order[0]]) * 1e3)

    return judge


def _random(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """The expectation over uniformly random choices without replacement."""

    def judge(t: Timings) -> Score:
        times, count = np.sort(t.time_ms), len(t.rows)
        expected = []
        for top in TOPS:
            k = min(top, count)  # the i-th best leads if the other k - 1 are among the worse ones
            chance = [comb(count - i - 1, k - 1) / comb(count, k) for i in range(count)]
            expected.append(float(times @ chance / times[0]))
        return Score(tuple(expected), count)

    return judge


def _ancestor(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """The recipe of earlier work: XGBoost's defaults on the raw sizes and config values, squared
    error on raw milliseconds."""
    try:
        import xgboost
    except ImportError:
        raise MissingExtra("xgboost", "dev") from None
    models = {}
    for name in {t.family for t in _of(train, device)}:
        own = [t for t in _of(train, device) if t.family == name]
        data = xgboost.DMatrix(
            np.concatenate([_raw_features(t) for t in own]),
            np.concatenate([t.time_ms for t in own]),
        )
        grow = {"objective": "reg:squarederror", "seed": seed, "nthread": 1}
        models[name] = xgboost.train(grow, data, num_boost_round=300)

    def judge(t: Timings) -> Score:
        expected = models[t.family].inplace_predict(_raw_features(t))
        order = np.argsort(expected, kind="stable")
        return Score(_regret(t, order), len(t.rows))

    return judge


def _raw_features(t: Timings) -> NDArray[np.float64]:
    """Problem and config as plain numbers, one row a config of `t`."""
    sizes: list[float] = []
    for field in fields(t.problem):
        value = getattr(t.problem, field.name)
        if field.name in t.problem.CHOICES:
            sizes.append(t.problem.CHOICES[field.name].index(value))
        else:
            sizes += value if field.name in t.problem.PAIRS else (value,)
    configs = all_families()[t.family].configs[t.rows]
    columns = [configs[name] for name in configs.dtype.names or ()]
    return np.column_stack([np.broadcast_to(sizes, (len(t.rows), len(sizes))), *columns])
