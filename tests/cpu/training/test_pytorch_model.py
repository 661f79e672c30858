"""Where PyTorch's own operator is preferred: the margin is what predictions of it err by."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from synthetic import SMALL

from confpred.model.ranking import PytorchModel, pytorch_features
from confpred.model.trees import Trees
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, read_dataset
from confpred.training.pytorch import CAP, DOUBT, MIN_PROBLEMS, RISK, fit_pytorch, margins


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
    return fit_pytorch(dataset.timings, theirs, dataset.operation, dataset.device, SMALL, 0)


def noisy(dataset: Dataset, scale: float) -> dict[Record, float]:
    rng = np.random.default_rng(0)
    return {t.problem: float(np.exp(rng.normal(scale=scale))) for t in dataset.timings}


def margin_of(errors: np.ndarray, expected: float = 0.2) -> float:
    """Of problems of one kind whose predictions are this much too large."""
    predicted = np.full(len(errors), expected)
    return margins(["any"] * len(errors), predicted, predicted - errors)["any"]


def test_the_margin_is_as_wide_as_predictions_err():
    normal = np.random.default_rng(0).normal(size=2000)
    assert margin_of(0 * normal) == 0
    for scale in (0.05, 0.3):
        exact = scale * NormalDist().inv_cdf(1 - RISK)
        assert margin_of(scale * normal) == pytest.approx(exact, rel=0.1)


def test_the_margin_is_on_the_side_of_pytorch():
    """That its operator is faster than predicted is what the margin is for; that it is slower
    needs none."""
    surprises = np.where(np.arange(100) % 3, 0.0, 0.3)
    assert margin_of(surprises) == pytest.approx(0.3)
    assert margin_of(-surprises) == 0


def test_dense_layers_are_chosen_at_a_smaller_risk():
    """Of a surprise in five, which is more than one risk allows, and less than the other."""
    kinds = ["dense"] * 200 + ["fused dense"] * 200 + ["grouped"] * 200 + ["fused depthwise"] * 200
    predicted = np.full(len(kinds), 0.1)
    errors = np.where(np.arange(len(kinds)) % 5, 0.0, 0.3)
    found = margins(kinds, predicted, predicted - errors)
    assert found["dense"] == found["fused dense"] == pytest.approx(0.3)
    assert found["grouped"] == found["fused depthwise"] == pytest.approx(0.0)


def test_kinds_have_margins_of_their_own():
    kinds = ["dense"] * 200 + ["grouped"] * 200 + ["depthwise"] * (MIN_PROBLEMS - 1)
    errors = np.array([0.1] * 200 + [0.4] * 200 + [9.0] * (MIN_PROBLEMS - 1))
    predicted = np.full(len(kinds), 0.1)
    found = margins(kinds, predicted, predicted - errors)
    assert found["dense"] == pytest.approx(0.1)
    assert found["grouped"] == pytest.approx(0.4)
    assert found["depthwise"] == pytest.approx(0.4)  # too few: as all together
    errors[:100], predicted[:100] = 9.0, 2 * DOUBT  # no doubt, no say
    assert margins(kinds, predicted, predicted - errors)["dense"] == pytest.approx(0.1)
    few = MIN_PROBLEMS // 2
    assert margins(kinds[-few:], predicted[-few:], predicted[-few:] - 0.1)["depthwise"] == (
        pytest.approx(0.1)
    )
    assert margins(kinds[:3], predicted[:3], predicted[:3])["dense"] == CAP


def test_extreme_ratios_count_as_large_ones(dataset):
    """One layer in five is a disaster of cuDNN's; it must not change what is said of the others."""
    ratios = dict.fromkeys((t.problem for t in dataset.timings), 1.5)
    for i, problem in enumerate(ratios):
        ratios[problem] = 1e6 if i % 5 == 0 else 1.5
    fitted = fit(dataset, ratios)
    model = PytorchModel(dataset.operation, Trees(fitted), {})
    expected = [model.slowdown(problem, dataset.device)[0] for problem in ratios]
    assert max(expected) <= np.exp(CAP) * 1.01


def test_the_least_slowdown_is_the_expected_one_less_the_margin(dataset):
    fitted = fit(dataset, noisy(dataset, 0.3))
    operation: Operation = dataset.operation
    problem = dataset.timings[0].problem
    model = PytorchModel(operation, Trees(fitted), {problem.kind: 0.3})
    (expected,) = model.ratio.predict(pytorch_features(operation, [problem], dataset.device))
    slowdown, least = model.slowdown(problem, dataset.device)
    assert np.log(slowdown) == pytest.approx(expected)
    assert np.log(slowdown / least) == pytest.approx(0.3)
    assert PytorchModel(operation, Trees(fitted), {}).slowdown(problem, dataset.device)[1] == 0


def test_too_few_measurements_say_nothing(dataset):
    few = dict(list(noisy(dataset, 0.1).items())[: MIN_PROBLEMS - 1])
    assert fit(dataset, few) is None


def test_the_same_data_and_seed_give_the_same_bytes(dataset):
    first, second = (fit(dataset, noisy(dataset, 0.1)) for _ in range(2))
    assert first == second is not None
