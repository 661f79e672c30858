"""The order of measurements under a budget."""

from __future__ import annotations

import numpy as np
import pytest

from confpred.problem.conv2d import Problem
from confpred.problem.operation import KernelSpec
from confpred.retraining.offers import HELD_OUT_OF, Costs, Offer, is_held_out, plan
from confpred.sampler.tasks import Task

LAYER = Problem(2, 64, 14, 14, 64, 3, 3, padding=1, groups=8)
COSTS = Costs(row_s=0.01, task_s=0.0, kernel_s=1.0, processes=1)


def offer(place: float, doubt: float = 0.1, rows: int = 40, kernels: str = "") -> Offer:
    task = Task(LAYER, (), "grouped_fprop", "", tuple(range(rows)))
    specs = frozenset(KernelSpec(name, name, ()) for name in kernels)
    return Offer((task,), specs, np.array([place]), doubt)


@pytest.mark.parametrize(
    ("offers", "known", "expected"),
    [
        ([offer(0, 0.1), offer(5, 0.3), offer(10, 0.2)], (), [1, 2, 0]),
        ([offer(0.0), offer(4.0), offer(9.0)], (0.1, 3.0), [2, 1, 0]),
        ([offer(0.0, 0.11), offer(0.0, 0.1), offer(3.0, 0.1)], (), [0, 2, 1]),
        # The second and the third are as good, but the third's kernels come with the first.
        ([offer(0, 0.9, kernels="ab"), offer(9, kernels="cd"), offer(-9, kernels="ab")],
         (), [0, 2, 1]),
        ([offer(0, rows=40), offer(9, rows=4)], (), [1, 0]),
        ([], (), []),
    ],
    ids=["doubt", "unlike what was measured", "unlike what is planned", "kernels are paid for once",
         "cheap", "nothing"],
)  # fmt: skip
def test_what_comes_first(
    offers: list[Offer], known: tuple[float, ...], expected: list[int]
) -> None:
    assert plan(offers, [np.array([place]) for place in known], COSTS, 99) == expected


@pytest.mark.parametrize(("budget_s", "count"), [(0.39, 1), (0.41, 2), (1.0, 3), (99.0, 5)])
def test_the_budget_ends_it(budget_s: float, count: int):
    assert len(plan([offer(i) for i in range(5)], [], COSTS, budget_s)) == count


def test_compilations_side_by_side_cost_less():
    offers = [offer(i, kernels="abcdefgh"[i]) for i in range(8)]
    found = [len(plan(offers, [], Costs(0.01, 0.0, 1.0, processes), 2.0)) for processes in (1, 8)]
    assert found == [2, 4]


def test_about_one_network_in_ten_is_held_out_for_good():
    names = [f"network{i}" for i in range(2_000)]
    held_out = [name for name in names if is_held_out([name])]
    assert 0.8 < len(held_out) * HELD_OUT_OF / len(names) < 1.2
    assert all(is_held_out(["other", name]) for name in held_out)
    assert not is_held_out([])
    assert is_held_out(["convnext_xxlarge"]) == is_held_out(("convnext_xxlarge",))
