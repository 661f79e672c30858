"""Where PyTorch's operator comes in answers for held-out networks."""

from __future__ import annotations

from math import exp

import pytest

from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.training.calibrate import CAP, MIN_PROBLEMS, Answer
from confpred.training.cross_validate import CrossValidation, Offered, answered

H100, H200 = get_device("h100"), get_device("h200")
OURS = Candidate("grouped_fprop", 0)


def offered(
    fold: int,
    n: int,
    expected: float | None,
    error: float,
    device: Device = H100,
    ahead: float = 1.0,
) -> Offered:
    """Return a problem whose ratio to PyTorch's time is overestimated by `error`."""
    problem = Problem(n, 64, 28, 28, 64, 3, 3, padding=1, groups=8)
    theirs = None if expected is None else exp(expected - error)
    answer = Answer(problem, ("net",), [(1.0, OURS)], 1.0, 1.0, theirs)
    return Offered(fold, device, answer, ahead, expected)


def chosen(found: CrossValidation) -> list[Candidate]:
    return [answer.chosen for answer in found.answers]


def test_a_fold_keeps_the_margins_that_the_others_have() -> None:
    count = MIN_PROBLEMS + 5
    exact = [offered(0, 1 + i, 0.2, 0.0) for i in range(count)]
    mistaken = [offered(1, 1 + i, 0.2, 0.4) for i in range(count)]
    found = answered(exact + mistaken, H100)
    # The mistaken fold does not know of its mistakes, and the exact one is warned by them.
    assert chosen(found) == [PYTORCH_OPERATOR] * count + [OURS] * count
    # Midway between what is expected of all of them, and the most that a margin can be.
    assert found.margins["grouped"] == pytest.approx((0.2 + CAP) / 2)


def test_where_nothing_is_known_of_pytorchs_time_ours_is_chosen() -> None:
    assert chosen(answered([offered(0, 1, None, 0.0)], H100)) == [OURS]


def test_too_few_answers_leave_all_to_pytorch() -> None:
    found = answered([offered(i % 2, 1 + i, 0.5 * CAP, 0.0) for i in range(4)], H100)
    assert set(chosen(found)) == {PYTORCH_OPERATOR}


def test_what_came_of_it_on_other_devices_counts_for_the_margins() -> None:
    """A device of few problems is warned, or encouraged, by the other folds' of others."""
    few = [offered(i % 2, 1 + i, 0.2, 0.0) for i in range(4)]
    exact = [offered(i % 2, 1 + i, 0.2, 0.0, H200) for i in range(2 * MIN_PROBLEMS)]
    assert set(chosen(answered(few, H100))) == {PYTORCH_OPERATOR}
    assert set(chosen(answered(few + exact, H100))) == {OURS}
    mistaken = [offered(1, 1 + i, 0.2, 0.4, H200) for i in range(MIN_PROBLEMS)]
    # In the order of the folds' problems: the mistaken fold does not know of its mistakes.
    found = answered(few + exact + mistaken, H100)
    assert chosen(found) == [PYTORCH_OPERATOR, OURS] * 2


def test_a_choice_among_few_measured_configs_is_expected_to_be_faster_among_all() -> None:
    """By 0.3, which makes up for the error that the measured ones show."""
    slow = [offered(i % 2, 1 + i, 0.2, 0.3) for i in range(2 * MIN_PROBLEMS)]
    ahead = [offered(i % 2, 1 + i, 0.2, 0.3, ahead=exp(0.3)) for i in range(2 * MIN_PROBLEMS)]
    assert set(chosen(answered(slow, H100))) == {PYTORCH_OPERATOR}
    assert set(chosen(answered(ahead, H100))) == {OURS}
