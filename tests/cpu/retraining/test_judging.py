"""When a new model counts as better."""

from __future__ import annotations

import numpy as np
import pytest

from confpred.retraining.retrain import LEAST_NETWORKS, LEAST_PROBLEMS, Pair, compare


def pairs(ratio: float, spread: float = 0.05, networks: int = 12, each: int = 10) -> list[Pair]:
    rng = np.random.default_rng(0)
    return [
        Pair(f"n{i}", 1.0, float(ratio * np.exp(rng.normal(scale=spread))))
        for i in range(networks)
        for _ in range(each)
    ]


def test_faster_choices_are_better():
    verdict = compare(pairs(0.93))
    assert verdict.better
    assert 0.9 < verdict.ratio < verdict.at_most < 0.96
    assert verdict.faster > verdict.slower
    assert "0.9" in verdict.why


@pytest.mark.parametrize("ratio", [1.0, 1.001, 1.1])
def test_choices_that_are_no_faster_are_not_better(ratio: float):
    verdict = compare([Pair(p.network, p.old_ms, ratio) for p in pairs(1.0)])
    assert not verdict.better
    assert verdict.ratio == verdict.at_most == pytest.approx(ratio)
    assert "no faster" in verdict.why


def test_a_gain_that_may_be_chance_is_not_enough():
    """One network gains much, the others lose a little: the mean gains, and says little."""
    some = [Pair("a", 1.0, 0.3)] * 10
    others = [Pair(f"n{i}", 1.0, 1.02) for i in range(9) for _ in range(10)]
    verdict = compare(some + others)
    assert verdict.ratio < 1 < verdict.at_most
    assert not verdict.better
    assert "may be chance" in verdict.why


@pytest.mark.parametrize(
    "few",
    [
        [],
        pairs(0.5, networks=LEAST_NETWORKS - 1),
        pairs(0.5, networks=3, each=10)[: LEAST_PROBLEMS - 1],
    ],
    ids=["none", "networks", "problems"],
)
def test_too_little_is_no_proof(few: list[Pair]):
    verdict = compare(few)
    assert not verdict.better
    assert verdict.ratio is None
    assert "larger budget" in verdict.why
