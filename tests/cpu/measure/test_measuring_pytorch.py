"""Work of the host before PyTorch's operator is timed."""

from __future__ import annotations

import pytest

from confpred.measure.pytorch import copies_for
from confpred.problem.conv2d import Problem

L2_BYTES = 50_000_000


@pytest.mark.parametrize("n", [1, 8, 100])
def test_operands_of_a_replay_are_three_times_what_the_cache_holds(n):
    problem = Problem.parse(f"n={n} c=64 h=56 w=56 k=64 r=3 s=3 groups=8 padding=1")
    copies = copies_for(problem, 10_000, L2_BYTES)
    assert copies * problem.minimum_bytes >= 3 * L2_BYTES
    assert (copies - 1) * problem.minimum_bytes < 3 * L2_BYTES


def test_there_are_no_more_operands_than_launches_and_at_least_one():
    small = Problem.parse("n=1 c=8 h=7 w=7 k=8 r=3 s=3 groups=8 padding=1")
    assert copies_for(small, 7, L2_BYTES) == 7
    large = Problem.parse("n=256 c=256 h=112 w=112 k=256 r=3 s=3 groups=32 padding=1")
    assert copies_for(large, 7, L2_BYTES) == 1
