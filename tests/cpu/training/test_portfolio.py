"""The portfolio costs its training problems almost nothing."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic

from confpred.problem.device import get_device
from confpred.training.dataset import Dataset, Timings, read_dataset
from confpred.training.portfolio import ENOUGH, TOLERANCE, choose_portfolio


@pytest.fixture(scope="module")
def dataset(measurements) -> Dataset:
    return read_dataset([measurements])


@pytest.fixture(scope="module")
def portfolio(dataset) -> np.ndarray:
    return choose_portfolio(dataset.timings, synthetic.FAMILY, dataset.device)


def test_each_problem_has_a_config_near_its_best(dataset, portfolio):
    for t in dataset.timings:
        assert t.time_ms[portfolio[t.rows]].min() <= TOLERANCE * t.time_ms.min()


def test_each_problem_has_enough_configs(dataset, portfolio):
    for t in dataset.timings:
        legal = synthetic.FAMILY.legal(t.problem, dataset.device)
        offered = (legal & portfolio).sum()
        assert offered >= ENOUGH or portfolio[t.rows].all()


def timings(rows: list[int], ms: list[float], n: int = 32) -> Timings:
    problem = synthetic.Problem(n, 64, 28, 28, 64, 3, 3, padding=1, groups=8)
    times = np.array(ms)
    return Timings(problem, (), "grouped_fprop", np.array(rows), times, times, get_device("h100"))


def test_one_config_that_suits_all_is_found_and_configs_without_merit_are_not(monkeypatch):
    monkeypatch.setattr("confpred.training.portfolio.ENOUGH", 1)
    legal = np.flatnonzero(synthetic.FAMILY.legal(timings([0], [1.0]).problem, synthetic.DEVICE))
    a, b, c = (int(row) for row in legal[:3])
    data = [timings([a, b, c], [1.0, 1.001, 9.0]), timings([a, b, c], [2.0, 1.0, 9.0], n=31)]
    chosen = choose_portfolio(data, synthetic.FAMILY, synthetic.DEVICE)
    assert np.flatnonzero(chosen).tolist() == [b]
