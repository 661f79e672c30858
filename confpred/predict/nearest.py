"""The measured layers that a problem is most like."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Candidate
from confpred.families.registry import config_words
from confpred.model.folder import Model
from confpred.problem.device import Device
from confpred.problem.record import Record

#: How far apart problems are of which one is of another direction, dtype or epilogue: as far as if
#: one had four times the batch.
_UNLIKE = 2.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A layer that was measured for the model, in full or by dozens of configs.

    Attributes:
        problem: the layer.
        distance: from the layer asked about, in doublings: 1 where one size is twice as large
            (see `NearestLayers`).
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
        return {
            "problem": self.problem.to_json(),
            "distance": self.distance,
            "provider": self.candidate.provider,
            "config": config_words(self.candidate),
            "time_ms": self.time_ms,
            "roofline_share": self.roofline_share,
        }


class NearestLayers:
    """The layers that a model's data has measured, to be searched for those like a problem.

    The distance of two problems is the root of the sum of squares over their fields: of a size, the
    binary logarithm of the ratio; of a pair, those of both members plus one; of any other field, 2
    where they differ.
    """

    def __init__(self, model: Model) -> None:
        """Of `model`, whose device the times are of."""
        self._device, self._best = model.device, tuple(model.measured.values())
        kind = model.operation.problem
        self._problems = [kind.parse(words) for words in model.measured]
        self._sizes = np.array([_sizes(p) for p in self._problems]).reshape(len(self._best), -1)
        self._kinds = np.array([_kinds(p) for p in self._problems], object)

    def nearest(self, problem: Record, count: int) -> tuple[Neighbour, ...]:
        """The `count` nearest, nearest first, or all if there are fewer. A problem that was
        measured itself is its own neighbour, at distance 0."""
        if not self._problems:
            return ()
        squares = ((self._sizes - _sizes(problem)) ** 2).sum(axis=1)
        unlike = (self._kinds != np.array(_kinds(problem), object)).sum(axis=1)
        distance = np.sqrt(squares + _UNLIKE**2 * unlike)
        return tuple(
            self._neighbour(i, float(distance[i]), self._device)
            for i in np.argsort(distance, kind="stable")[:count].tolist()
        )

    def _neighbour(self, index: int, distance: float, device: Device) -> Neighbour:
        problem, best = self._problems[index], self._best[index]
        share = device.roofline_s(problem) * 1e3 / best.time_ms
        return Neighbour(problem, distance, best.candidate, best.time_ms, share)


def _sizes(problem: Record) -> NDArray[np.float64]:
    """The logarithms of a problem's sizes."""
    found: list[float] = []
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if field.name in problem.PAIRS:
            found += (math.log2(1 + member) for member in value)
        elif field.name in problem.LIMITS:
            found.append(math.log2(max(value, 1)))
    return np.array(found)


def _kinds(problem: Record) -> list[object]:
    """The values of a problem's other fields."""
    return [
        getattr(problem, field.name)
        for field in dataclasses.fields(problem)
        if field.name not in problem.LIMITS and field.name not in problem.PAIRS
    ]
