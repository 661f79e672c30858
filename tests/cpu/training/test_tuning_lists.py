"""The baselines of Triton kernels: by hand, on a few made-up times."""

from __future__ import annotations

import made_up_kernel
import numpy as np
import pytest

from confpred.families import registry
from confpred.training.dataset import Timings
from confpred.training.tuning_lists import TUNING_BASELINES

DEVICE = made_up_kernel.DEVICE


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the made-up kernel be one of the families."""
    families = {"product": made_up_kernel.FAMILY}
    monkeypatch.setattr("confpred.training.tuning_lists.all_families", lambda: families)
    assert "product" not in registry.all_families()


def timings(words: str, times: dict[int, float]) -> Timings:
    rows, ms = np.array([*times], np.intp), np.array([*times.values()])
    problem = made_up_kernel.FAMILY.operation.problem.parse(words)
    return Timings(problem, (words,), "product", rows, ms, 0 * ms, DEVICE)


TIMES = dict(zip(range(12), np.linspace(2, 1, 12), strict=True))
TRAIN = [
    timings("M=64 N=64 K=64", TIMES),
    timings("M=1024 N=64 K=64", {**TIMES, 3: 0.5, 4: 0.6}),
    timings("M=512 N=64 K=64 dtype=bfloat16", {0: 1.0, 1: 2.0}),
]
ASKED = timings("M=512 N=64 K=64", {0: 3.0, 2: 1.0, 4: 1.5, 11: 4.0})


def regret(name: str, asked: Timings = ASKED) -> tuple[float, ...]:
    return TUNING_BASELINES[name](TRAIN, DEVICE, 0)(asked).regret


def test_the_nearest_shape_is_of_the_same_dtype() -> None:
    # At M=1024, 4 is the fastest of these, then 11, 2 and 0; 3 was not measured here.
    assert regret("nearest measured shape") == (1.5, 1.0, 1.0)
    assert regret("nearest measured shape", timings("M=64 N=70 K=64", {0: 1.0, 11: 2.0}))[0] == 2
    far = timings("M=8 N=8 K=8 dtype=bfloat16", {1: 1.0, 5: 3.0, 6: 2.0})
    assert regret("nearest measured shape", far) == (1.0, 1.0, 1.0)


def test_ten_configs_are_all_tried() -> None:
    assert regret("ten configs, all tried") == (1.0, 1.0, 1.0)
    # 1 and 2 are the worst ones on average, so they are not tried where they are the best.
    every = timings("M=512 N=64 K=64", {row: 1.0 + 0.1 * (row not in (1, 2)) for row in range(12)})
    assert regret("ten configs, all tried", every)[0] == pytest.approx(1.1)


def test_half_of_the_configs_are_faster_than_the_median() -> None:
    assert regret("median config") == (2.25, 2.25, 2.25)
