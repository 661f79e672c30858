"""How far measurements scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from confpred.training.dataset import Timings

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
    """By how long the config takes."""
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
