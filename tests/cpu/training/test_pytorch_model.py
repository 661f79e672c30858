"""Where PyTorch's own operator is preferred: the margin is what costs least."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import SMALL

from confpred.model.rank import PytorchModel, pytorch_features
from confpred.model.trees import Trees
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.calibrate import CAP, CAUTION, MIN_PROBLEMS, fit_pytorch, margins
from confpred.training.dataset import Dataset, read_dataset


@pytest.fixture(scope="module")
def dataset(measurements: Path) -> Dataset:
    return read_dataset([measurements])


def fit(dataset: Dataset, ratios: dict[Record, float]) -> str | None:
    """Fit PyTorch's times that are `ratios` of our best ones."""
    theirs = {
        (dataset.device, t.problem): float(t.time_ms.min() * ratios[t.problem])
        for t in dataset.timings
        if t.problem in ratios
    }
    ours = {(dataset.device, t.problem): float(t.time_ms.min()) for t in dataset.timings}
    return fit_pytorch(ours, theirs, dataset.operation, dataset.device, SMALL, 0)


def noisy(dataset: Dataset, scale: float) -> dict[Record, float]:
    rng = np.random.default_rng(0)
    return {t.problem: float(np.exp(rng.normal(scale=scale))) for t in dataset.timings}


def margin_of(expected: np.ndarray, actual: np.ndarray) -> float:
    """Ratios of problems of one kind."""
    return margins(["any"] * len(expected), expected, actual)["any"]


def test_the_margin_grows_with_the_error_and_loses_least():
    """No other margin would have lost less time, of which PyTorch's counts for more."""
    rng, before = np.random.default_rng(0), -1.0
    expected = rng.uniform(-0.5, 1.0, 1000)
    for error in (0.0, 0.1, 0.2, 0.3):
        actual = expected + error * rng.normal(size=1000)

        def cost(margin: float, actual: np.ndarray = actual) -> float:
            ours = expected >= margin
            return (
                CAUTION * (-actual[ours]).clip(min=0).sum() + actual[~ours].clip(min=0).sum()
            ).item()

        margin = margin_of(expected, actual)
        assert margin > before
        assert cost(margin) <= min(cost(other) for other in np.linspace(0, CAP, 500)) + 1e-9
        before = margin


def test_the_margin_is_on_the_side_of_pytorch():
    """That its operator is faster than predicted is what the margin is for; that it is slower
    needs none."""
    expected = np.linspace(0.01, 0.5, 100)
    assert margin_of(expected, expected) < 0.02
    assert margin_of(expected, expected - 0.2) == pytest.approx(0.2, abs=0.01)
    assert margin_of(expected, expected + 0.2) < 0.01


def test_rare_losses_are_worth_many_small_gains():
    """One layer in ten would be as much slower as the others are faster: worth it. Not so if it
    were one in three."""
    expected = np.full(100, 0.2)
    rare, frequent = (np.where(np.arange(100) % n, 0.1, -0.1) for n in (10, 3))
    assert margin_of(expected, rare) == pytest.approx(0.1)
    far = margin_of(np.append(expected, 0.9), np.append(frequent, 0.9))
    assert far == pytest.approx(0.55)  # midway, as nothing tells the places of a gap apart


def test_kinds_have_margins_of_their_own():
    few = MIN_PROBLEMS - 1
    kinds = ["dense"] * 200 + ["grouped"] * 200 + ["depthwise"] * few
    expected = np.concatenate([np.linspace(0, 0.9, 200)] * 2 + [np.full(few, 0.1)])
    errors = np.array([0.1] * 200 + [0.4] * 200 + [-9.0] * few)
    found = margins(kinds, expected, expected - errors)
    assert found["dense"] == pytest.approx(0.1, abs=0.01)
    assert found["grouped"] == pytest.approx(0.4, abs=0.01)
    assert found["depthwise"] == margin_of(expected, expected - errors)  # too few: as all together
    assert margins(kinds[:few], expected[:few], expected[:few])["dense"] == CAP


def test_extreme_ratios_count_as_large_ones(dataset):
    """One layer in five is a disaster of cuDNN's; it must not change what is said of the others."""
    ratios = dict.fromkeys((t.problem for t in dataset.timings), 1.5)
    for i, problem in enumerate(ratios):
        ratios[problem] = 1e6 if i % 5 == 0 else 1.5
    fitted = fit(dataset, ratios)
    model = PytorchModel(dataset.operation, Trees(fitted), {})
    expected = [model.slowdowns([problem], dataset.device)[0][0] for problem in ratios]
    assert max(expected) <= np.exp(CAP) * 1.01


def test_the_least_slowdown_is_the_expected_one_less_the_margin(dataset):
    fitted = fit(dataset, noisy(dataset, 0.3))
    operation: Operation = dataset.operation
    problem = dataset.timings[0].problem
    model = PytorchModel(operation, Trees(fitted), {problem.kind: 0.3})
    (expected,) = model.ratio.predict(pytorch_features(operation, [problem], dataset.device))
    ((slowdown, least),) = model.slowdowns([problem], dataset.device)
    assert np.log(slowdown) == pytest.approx(expected)
    assert np.log(slowdown / least) == pytest.approx(0.3)
    unknown = PytorchModel(operation, Trees(fitted), {})
    assert unknown.slowdowns([problem], dataset.device)[0][1] == 0


def test_too_few_measurements_say_nothing(dataset):
    few = dict(list(noisy(dataset, 0.1).items())[: MIN_PROBLEMS - 1])
    assert fit(dataset, few) is None
