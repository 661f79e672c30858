"""Judges of the ways to choose a Triton kernel's config without a model: a list of configs that is
tried at each new shape, the best config of the nearest shape in a file, and any config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from confpred.families.registry import all_families
from confpred.problem.device import Device
from confpred.training.cross_validate import Score, regret_of
from confpred.training.dataset import Timings
from confpred.training.regret import TOPS
from confpred.triton.problem import KernelCall

Judge = Callable[[Timings], Score]
Baseline = Callable[[Sequence[Timings], Device, int], Judge]
_UNSERVED = 2.0  # the regret that a config is charged where it was not measured
_LISTED = 10


def average_order(train: Sequence[Timings]) -> Callable[[Timings], NDArray[np.intp]]:
    """Return what orders the measured configs of a problem by their mean log regret over `train`. A
    config counts as ``_UNSERVED`` times the best where it is illegal or was not measured."""
    cost = {name: np.zeros(len(family.configs)) for name, family in all_families().items()}
    for t in train:
        cost[t.family][t.rows] += np.log((t.time_ms / t.time_ms.min()).clip(max=_UNSERVED) / 2)
    return lambda t: np.argsort(cost[t.family][t.rows], kind="stable")


def _listed(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Try the ten configs that are the best on average."""
    order = average_order(train)

    def judge(t: Timings) -> Score:
        best = t.time_ms[order(t)[:_LISTED]].min() / t.time_ms.min()
        return Score((float(best),) * len(TOPS), _LISTED)

    return judge


def _nearest(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Take what was fastest at the measured shape whose sizes have the nearest logarithms; among
    shapes of the same dtypes and words, where there are any."""

    def judge(t: Timings) -> Score:
        sizes, others = np.log2(_sizes(t)), [o for o in train if o.family == t.family]

        def distance(other: Timings) -> tuple[bool, float]:
            return _words(other) != _words(t), float(
                np.square(np.log2(_sizes(other)) - sizes).sum()
            )

        near = min(others, key=distance)
        both, at, at_near = np.intersect1d(t.rows, near.rows, return_indices=True)
        rest = np.setdiff1d(np.arange(len(t.rows)), at)
        order = np.concatenate([at[np.argsort(near.time_ms[at_near], kind="stable")], rest])
        return Score(regret_of(t, order), len(both))

    return judge


def _median(train: Sequence[Timings], device: Device, seed: int) -> Judge:
    """Take the config that half of the others are faster than."""
    return lambda t: Score(
        (float(np.median(t.time_ms) / t.time_ms.min()),) * len(TOPS), len(t.rows)
    )


def _sizes(t: Timings) -> Sequence[int]:
    return t.problem.sizes if isinstance(t.problem, KernelCall) else ()


def _words(t: Timings) -> list[object]:
    texts = t.problem.CHOICES
    return [getattr(t.problem, name) for name in texts]


#: By the name that tables show.
TUNING_BASELINES: Mapping[str, Baseline] = {
    "nearest measured shape": _nearest,
    "ten configs, all tried": _listed,
    "median config": _median,
}
