"""Regret: the measured time of what was chosen over that of the best; 1 is perfect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: The best of the first so many choices is judged too.
TOPS = (1, 3, 8)
FAR = 1.10  # a choice this many times as slow as the best is far off


def geomean(values: ArrayLike) -> float:
    """Return the geometric mean of at least one value."""
    return float(np.exp(np.log(values).mean()))


_STATISTICS: Mapping[str, Callable[[NDArray[np.float64]], Any]] = {
    "geomean": geomean,
    "p90": partial(np.quantile, q=0.90),
    "p95": partial(np.quantile, q=0.95),
    "worst": np.max,
    "efficiency_mean": lambda regret: (1 / regret).mean(),
    "efficiency_p10": lambda regret: np.quantile(1 / regret, 0.10),
    "efficiency_min": lambda regret: (1 / regret).min(),
    "far": lambda regret: (regret > FAR).mean(),
}


def figures(regrets: ArrayLike, *names: str) -> dict[str, Any]:
    """Return the number of regrets, at least one, as ``problems``, and statistics of them by
    name."""
    regret = np.asarray(regrets)
    return {"problems": len(regret), **{name: float(_STATISTICS[name](regret)) for name in names}}


def of_tops(regrets: Sequence[Sequence[float]] | NDArray[np.float64]) -> dict[str, float]:
    """Return the geometric mean of the best of the first k, for each k of ``TOPS``; `regrets` have
    the shape ``(problems, len(TOPS))``."""
    return {str(k): geomean(column) for k, column in zip(TOPS, np.array(regrets).T, strict=True)}


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of regrets; efficiency is 1 / regret."""

    problems: int
    geomean: float
    p95: float
    worst: float
    efficiency_mean: float
    efficiency_p10: float
    efficiency_min: float
    far: float  # share of answers more than ``FAR`` times as slow as the best

    @classmethod
    def of(cls, regrets: ArrayLike) -> Spread:
        """Summarise at least one regret."""
        return cls(**figures(regrets, *(field.name for field in fields(cls)[1:])))
