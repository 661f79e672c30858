"""Where PyTorch's own operator is preferred: the margin is what predictions of it err by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import SMALL

from confpred.model.ranking import PytorchModel, pytorch_features
from confpred.model.trees import Trees
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, read_dataset
from confpred.training.pytorch import CAP, MIN_PROBLEMS, FittedPytorch, fit_pytorch


@pytest.fixture(scope="module")
def dataset(measurements: Path) -> Dataset:
    return read_dataset([measurements])


def fit(dataset: Dataset, ratios: dict[Record, float]) -> FittedPytorch | None:
    """Fit PyTorch's times that are `ratios` of our best ones."""
    theirs = {
        (dataset.device, t.problem): float(t.time_ms.min() * ratios[t.problem])
        for t in dataset.timings
        if t.problem in ratios
    }
    return fit_pytorch(dataset.timings, theirs, dataset.operation, dataset.device, SMALL, 0)


def noisy(dataset: Dataset, scale: float) -> dict[Record, float]:
    rng = np.random.default_rng(0)
    return {t.problem: float(np.exp(rng.normal(scale=scale))) for t in dataset.timings}


def test_the_margin_is_as_wide_as_predictions_err(dataset):
    margins = [fit(dataset, noisy(dataset, scale)).margin for scale in (0.0, 0.05, 0.3)]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert 0.02 < margins[1] < 0.1
    assert 0.15 < margins[2] < 0.5


def test_extreme_ratios_count_as_large_ones(dataset):
    """One layer in five is a disaster of cuDNN's; it must not change what is said of the others."""
    ratios = dict.fromkeys((t.problem for t in dataset.timings), 1.5)
    for i, problem in enumerate(ratios):
        ratios[problem] = 1e6 if i % 5 == 0 else 1.5
    fitted = fit(dataset, ratios)
    model = PytorchModel(dataset.operation, Trees(fitted.ratio), fitted.margin)
    expected = [model.slowdown(problem, dataset.device)[0] for problem in ratios]
    assert max(expected) <= np.exp(CAP) * 1.01


def test_the_least_slowdown_is_the_expected_one_less_the_margin(dataset):
    fitted = fit(dataset, noisy(dataset, 0.3))
    operation: Operation = dataset.operation
    model = PytorchModel(operation, Trees(fitted.ratio), fitted.margin)
    problem = dataset.timings[0].problem
    (expected,) = model.ratio.predict(pytorch_features(operation, problem, dataset.device))
    slowdown, least = model.slowdown(problem, dataset.device)
    assert np.log(slowdown) == pytest.approx(expected)
    assert np.log(slowdown / least) == pytest.approx(fitted.margin)


def test_the_margin_is_on_the_side_of_pytorch(dataset):
    """Its surprises are all that it is much faster than predicted, which is what the margin is
    for; as many that it is slower would need none."""
    problems = sorted({t.problem for t in dataset.timings}, key=str)
    surprises = np.random.default_rng(0).random(len(problems)) < 0.35

    def margin(surprise: float) -> float:
        ratios = {p: surprise if s else 1.2 for p, s in zip(problems, surprises, strict=True)}
        return fit(dataset, ratios).margin

    assert margin(1.2 * 0.7) > 2 * margin(1.2 / 0.7)


def test_too_few_measurements_say_nothing(dataset):
    few = dict(list(noisy(dataset, 0.1).items())[: MIN_PROBLEMS - 1])
    assert fit(dataset, few) is None


def test_the_same_data_and_seed_give_the_same_bytes(dataset):
    first, second = (fit(dataset, noisy(dataset, 0.1)) for _ in range(2))
    assert (first.ratio, first.margin) == (second.ratio, second.margin)
