"""The measured layers that a problem is most like."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from confpred.families.protocol import Candidate
from confpred.families.registry import config_words
from confpred.model.folder import Model
from confpred.problem.record import Record

#: How far apart problems of another direction, dtype or epilogue are: as with four times the batch.
_UNLIKE = 2.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A layer that was measured for the model, in full or by dozens of configs.

    Attributes:
        problem: the layer.
        distance: from the layer asked about, in doublings (see `NearestLayers`).
        candidate: what was the fastest of all that was measured.
        time_ms: its time, milliseconds.
        roofline_share: the part of the roofline that it reaches.
    """

    problem: Record
    distance: float
    candidate: Candidate
    time_ms: float
    roofline_share: float

    def to_json(self) -> dict[str, Any]:
        numbers = {"time_ms": self.time_ms, "roofline_share": self.roofline_share}
        words = {"provider": self.candidate.provider, "config": config_words(self.candidate)}
        return {"problem": self.problem.to_json(), "distance": self.distance, **words, **numbers}


class NearestLayers:
    """The layers that a model's data has measured, to be searched for those like a problem.

    The distance of two problems is the root of the sum of squares over their fields: of a size, the
    binary logarithm of the ratio; of a pair, those of both members plus one; of any other field, 2
    where they differ.
    """

    def __init__(self, model: Model) -> None:
        self._device, self._best = model.device, tuple(model.measured.values())
        kind = model.operation.problem
        self._problems = [kind.parse(words) for words in model.measured]
        places = [_place(problem) for problem in self._problems]
        self._sizes = np.array([sizes for sizes, _ in places])
        self._kinds = np.array([kinds for _, kinds in places], object)

    def nearest(self, problem: Record, count: int) -> tuple[Neighbour, ...]:
        """Return the `count` nearest, nearest first, or all if there are fewer. A problem that was
        measured itself is its own neighbour, at distance 0."""
        if not self._problems:
            return ()
        sizes, kinds = _place(problem)
        squares = ((self._sizes - np.array(sizes)) ** 2).sum(axis=1)
        unlike = (self._kinds != np.array(kinds, object)).sum(axis=1)
        distance = np.sqrt(squares + _UNLIKE**2 * unlike)
        found = []
        for i in np.argsort(distance, kind="stable")[:count].tolist():
            near, best = self._problems[i], self._best[i]
            share = self._device.roofline_s(near) * 1e3 / best.time_ms
            found.append(Neighbour(near, float(distance[i]), best.candidate, best.time_ms, share))
        return tuple(found)


def _place(problem: Record) -> tuple[list[float], list[object]]:
    """Return the logarithms of a problem's sizes, and the values of its other fields."""
    sizes: list[float] = []
    kinds: list[object] = []
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if field.name in problem.PAIRS:
            sizes += (math.log2(1 + member) for member in value)
        elif field.name in problem.LIMITS:
            sizes.append(math.log2(max(value, 1)))
        else:
            kinds.append(value)
    return sizes, kinds
