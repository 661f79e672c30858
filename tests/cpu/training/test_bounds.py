"""The bound on regret holds as often as it says, for every provider, and tells answers apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from confpred.errors import DataError
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.model.bounds import Bounds, Range
from confpred.model.card import BoundsCard
from confpred.model.trees import Trees
from confpred.problem.conv2d import Problem
from confpred.training.calibrate import Answer, fit_bounds
from confpred.training.dataset import Dataset, read_dataset


@pytest.fixture(scope="module")
def dataset(measurements: Path) -> Dataset:
    return read_dataset([measurements])


def answer(index: int, rng: np.random.Generator) -> Answer:
    """One in five names PyTorch's operator, and is worse; of ours, those with close candidates are
    good."""
    theirs, close = index % 5 == 0, index % 2 == 0
    scale = 0.2 if theirs else 0.02 if close else 0.1
    regret = float(np.exp(abs(rng.normal(scale=scale))))
    ours = [(1.0 + (0.01 if close else 0.3) * i, Candidate("grouped_fprop", i)) for i in range(9)]
    pytorch = (1.05 if theirs else 2.0, PYTORCH_OPERATOR)
    size = 8 + index % 40
    return Answer(
        problem=Problem(1 + index, 64, size, size, 64, 3, 3, padding=1, groups=8),
        networks=(f"net{index % 12}",),
        options=[pytorch, *ours] if theirs else [*ours, pytorch],
        ours_ms=1.0 if theirs else regret,
        our_best_ms=1.0,
        pytorch_ms=regret if theirs else 2.0,
    )


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    rng = np.random.default_rng(0)
    return [answer(index, rng) for index in range(800)]


@pytest.fixture(scope="module")
def fitted(answers: list[Answer], dataset: Dataset) -> tuple[str, BoundsCard]:
    return fit_bounds(answers, dataset, 0)


@pytest.fixture(scope="module")
def bounds(fitted: tuple[str, BoundsCard], dataset: Dataset) -> Bounds:
    text, card = fitted
    ranges = {
        name: Range(*(np.array(of[end], np.float32) for end in ("least", "largest")))
        for name, of in card.ranges.items()
    }
    return Bounds(dataset.operation, Trees(text), card.offsets, ranges)


def test_it_holds_for_networks_that_it_has_not_seen(fitted: tuple[str, BoundsCard]) -> None:
    coverage = fitted[1].coverage
    assert 0.93 <= coverage["all"] <= 0.98
    assert set(coverage) == {"all", "grouped_fprop", "pytorch"}
    assert min(coverage.values()) >= 0.9


@pytest.mark.parametrize("count", [2, 3, 4])
def test_few_answers_are_enough(count: int, answers: list[Answer], dataset: Dataset) -> None:
    alike = [replace(answer, networks=("net",)) for answer in answers[: count - 1]]
    assert fit_bounds([*alike, answers[count]], dataset, 0)[1].coverage["all"] > 0


def test_one_answer_is_too_few(answers: list[Answer], dataset: Dataset) -> None:
    with pytest.raises(DataError, match="at least 2 problems; found 1"):
        fit_bounds(answers[:1], dataset, 0)


def test_it_is_wide_where_answers_are_worse(bounds, answers, dataset) -> None:
    # All of a problem that was measured, so that nothing is out of range.
    problem = next(t.problem for t in dataset.timings if t.problem in dataset.pytorch_ms)
    of = {
        index: bounds.of([problem], dataset.device, [answers[index].options])[0].bound
        for index in (2, 1, 5)
    }
    close, apart, theirs = of.values()
    assert 1 <= close < apart < theirs


def test_what_is_out_of_the_datas_range_has_none(bounds, answers, dataset) -> None:
    measured = dataset.timings[0].problem
    assert bounds.of([measured], dataset.device, [answers[1].options])[0].extrapolated is False
    for change in ({"n": 50_000}, {"dtype": "float32"}, {"r": 9, "s": 9, "padding": (4, 4)}):
        outside = Problem(**{**measured.to_json(), **change})
        assert bounds.of([outside], dataset.device, [answers[1].options]) == [(None, True)]
    unknown = [(1.0, Candidate("depthwise_fprop", 0))]
    assert bounds.of([measured], dataset.device, [unknown]) == [(None, True)]
