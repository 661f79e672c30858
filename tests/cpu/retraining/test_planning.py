"""The order of measurements under a budget."""

from __future__ import annotations

import numpy as np
import pytest

from confpred.problem.conv2d import Problem
from confpred.problem.operation import KernelSpec
from confpred.retraining.offers import HELD_OUT_OF, Costs, Offer, is_held_out, plan
from confpred.sampler.tasks import Task

LAYER = Problem(2, 64, 14, 14, 64, 3, 3, padding=1, groups=8)
NOTHING: list[np.ndarray] = []
COSTS = Costs(row_s=0.01, task_s=0.0, kernel_s=1.0, processes=1)


def offer(place: float, doubt: float = 0.1, rows: int = 40, kernels: str = "") -> Offer:
    task = Task(LAYER, (), "grouped_fprop", "", tuple(range(rows)))
    specs = frozenset(KernelSpec(name, name, ()) for name in kernels)
    return Offer((task,), specs, np.array([place]), doubt)


def test_doubt_comes_first():
    assert plan([offer(0, 0.1), offer(5, 0.3), offer(10, 0.2)], NOTHING, COSTS, 9)[0] == 1


def test_what_is_like_what_was_measured_comes_last():
    offers = [offer(0.0), offer(4.0), offer(9.0)]
    assert plan(offers, [np.array([0.1]), np.array([3.0])], COSTS, 9) == [2, 1, 0]


def test_what_is_like_what_is_planned_waits():
    offers = [offer(0.0, 0.11), offer(0.0, 0.1), offer(3.0, 0.1)]
    assert plan(offers, NOTHING, COSTS, 9) == [0, 2, 1]


def test_a_kernel_is_paid_for_once():
    """The second and the third are as good, but the third's kernels come with the first."""
    offers = [offer(0, 0.9, kernels="ab"), offer(9, kernels="cd"), offer(-9, kernels="ab")]
    assert plan(offers, NOTHING, COSTS, 99) == [0, 2, 1]


def test_cheap_ones_come_before_dear_ones():
    assert plan([offer(0, rows=40), offer(9, rows=4)], NOTHING, COSTS, 9)[0] == 1


@pytest.mark.parametrize(("budget_s", "count"), [(0.39, 1), (0.41, 2), (1.0, 3), (99.0, 5)])
def test_the_budget_ends_it(budget_s: float, count: int):
    assert len(plan([offer(i) for i in range(5)], NOTHING, COSTS, budget_s)) == count


def test_compilations_side_by_side_cost_less():
    offers = [offer(i, kernels="abcdefgh"[i]) for i in range(8)]
    found = [
        len(plan(offers, NOTHING, Costs(0.01, 0.0, 1.0, processes), 2.0)) for processes in (1, 8)
    ]
    assert found == [2, 4]


def test_nothing_to_measure_is_no_plan():
    assert plan([], NOTHING, COSTS, 60) == []


def test_about_one_network_in_ten_is_held_out_for_good():
    names = [f"network{i}" for i in range(2_000)]
    held_out = [name for name in names if is_held_out([name])]
    assert 0.8 < len(held_out) * HELD_OUT_OF / len(names) < 1.2
    assert all(is_held_out(["other", name]) for name in held_out)
    assert not is_held_out([])
    assert is_held_out(["convnext_xxlarge"]) == is_held_out(("convnext_xxlarge",))
