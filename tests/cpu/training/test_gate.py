"""The gate learns which family wins, the same from the same data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from confpred.model import rank
from confpred.model.trees import Trees
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import get_device
from confpred.training.calibrate import MIN_PROBLEMS, fit_gate
from confpred.training.dataset import Timings

H100 = get_device("h100")
LAYER = Problem(8, 64, 28, 28, 64, 3, 3, padding=1, groups=64)
FAMILIES = ("depthwise_fprop", "grouped_fprop")


def timed(problem: Problem, family: str, ms: float) -> Timings:
    rows = np.arange(3)
    return Timings(problem, (), family, rows, ms * np.array([1.5, 1.0, 2.0]), np.zeros(3), H100)


def timings(count: int) -> list[Timings]:
    """Return the grouped family takes half as long for few channels, and twice as long for many."""
    found = []
    for i in range(count):
        problem = replace(
            LAYER, n=1 + i, c=16 * (1 + i % 8), k=16 * (1 + i % 8), groups=16 * (1 + i % 8)
        )
        ratio = 0.5 if problem.c < 72 else 2.0
        found += [timed(problem, FAMILIES[0], 1.0), timed(problem, FAMILIES[1], ratio)]
    found.append(timed(replace(LAYER, n=999), FAMILIES[0], 1.0))  # which has but one family
    return found


def test_it_learns_who_wins(monkeypatch):
    fitted = fit_gate(timings(200), CONVOLUTION, 0)
    assert fitted.families == FAMILIES
    assert len(fitted.problems) == 200
    gate = rank.Gate(CONVOLUTION, fitted.families, Trees(fitted.lag))
    asked = [replace(LAYER, n=1000 + c, c=c, k=c, groups=c) for c in (16, 32, 96, 128)]
    opened = gate.open(asked, H100, [FAMILIES] * len(asked))
    assert opened == [["grouped_fprop"]] * 2 + [["depthwise_fprop"]] * 2
    assert gate.open(asked, H100, [FAMILIES[:1]] * len(asked)) == [["depthwise_fprop"]] * 4
    monkeypatch.setattr(rank, "MARGIN", 5.0)  # how wide the gate opens is a constant
    assert gate.open(asked, H100, [FAMILIES] * 4) == [[*FAMILIES]] * 4


def test_times_are_compared_with_those_of_the_same_device():
    """Another device, a thousand times as fast, was measured with one family alone."""
    there = [
        replace(t, time_ms=t.time_ms / 1e3, device=get_device("h200"))
        for t in timings(60)
        if t.family == FAMILIES[0]
    ]
    alone, both = (fit_gate([*timings(60), *more], CONVOLUTION, 0) for more in ((), there))
    assert alone.lag == both.lag


def test_the_same_data_and_seed_give_the_same_gate():
    data = timings(60)
    first, again = (fit_gate(each, CONVOLUTION, 3) for each in (data, data[::-1]))
    assert first.lag == again.lag
    assert first.problems == again.problems


def test_few_problems_make_no_gate():
    assert fit_gate(timings(MIN_PROBLEMS - 1), CONVOLUTION, 0) is None
    assert fit_gate(timings(MIN_PROBLEMS), CONVOLUTION, 0) is not None
    alone = [t for t in timings(100) if t.family == FAMILIES[0]]
    assert fit_gate(alone, CONVOLUTION, 0) is None
