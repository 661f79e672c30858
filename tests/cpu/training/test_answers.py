"""Where PyTorch's operator comes in answers for held-out networks."""

from __future__ import annotations

from math import exp

import pytest

from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.problem.conv2d import Problem
from confpred.training.answers import Answer, Compared, HeldOut, Offered, answered
from confpred.training.pytorch import CAP, MIN_PROBLEMS

OURS = Candidate("grouped_fprop", 0)


def offered(fold: int, n: int, expected: float, error: float) -> Offered:
    """A problem whose ratio to PyTorch's time is overestimated by `error`."""
    problem = Problem(n, 64, 28, 28, 64, 3, 3, padding=1, groups=8)
    theirs = exp(expected - error)
    return Offered(fold, Answer(problem, ("net",), [(1.0, OURS)], 1.0, 1.0, theirs), expected)


def chosen(found: HeldOut) -> list[Candidate]:
    return [answer.chosen for answer in found.answers]


def test_a_fold_keeps_the_margins_that_the_others_have() -> None:
    count = MIN_PROBLEMS + 5
    exact = [offered(0, 1 + i, 0.2, 0.0) for i in range(count)]
    mistaken = [offered(1, 1 + i, 0.2, 0.4) for i in range(count)]
    found = answered(exact + mistaken)
    # The mistaken fold does not know of its mistakes, and the exact one is warned by them.
    assert chosen(found) == [PYTORCH_OPERATOR] * count + [OURS] * count
    # Midway between what is expected of all of them, and the most that a margin can be.
    assert found.margins["grouped"] == pytest.approx((0.2 + CAP) / 2)


def test_where_nothing_is_known_of_pytorchs_time_ours_is_chosen() -> None:
    answer = offered(0, 1, 0.0, 0.0).ours
    assert chosen(answered([Offered(0, answer, None)])) == [OURS]


def test_too_few_answers_leave_all_to_pytorch() -> None:
    found = answered([offered(i % 2, 1 + i, 0.5 * CAP, 0.0) for i in range(4)])
    assert set(chosen(found)) == {PYTORCH_OPERATOR}


def test_what_came_of_it_on_other_devices_counts_for_the_margins() -> None:
    """A device of few problems is warned, or encouraged, by the other folds' of others."""
    few = [offered(i % 2, 1 + i, 0.2, 0.0) for i in range(4)]
    exact = [Compared(i % 2, "grouped", 0.2, 0.2) for i in range(2 * MIN_PROBLEMS)]
    assert set(chosen(answered(few))) == {PYTORCH_OPERATOR}
    assert set(chosen(answered(few, exact))) == {OURS}
    mistaken = [Compared(1, "grouped", 0.2, -0.2) for _ in range(MIN_PROBLEMS)]
    assert chosen(answered(few, exact + mistaken)) == [PYTORCH_OPERATOR] * 2 + [OURS] * 2
