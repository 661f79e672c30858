"""`max_regret`: a prediction whose bound is above it is not launched."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from confpred.errors import InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.predict.choice import Choice, is_trusted, with_fallback
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem

LAYER = Problem(3, 64, 24, 24, 64, 3, 3, padding=1, groups=8)
OURS = Choice(LAYER, "h100", "predicted", Candidate("grouped_fprop", 5), 0.1, regret_bound=1.2)
HUGE = Problem(60_000, 64, 30, 30, 64, 3, 3, padding=1, groups=8)


@pytest.fixture(scope="module")
def predictor(model_folder) -> Predictor:
    return Predictor.load(model_folder)


@pytest.mark.parametrize(
    ("choice", "most", "expected"),
    [
        (OURS, None, True),
        (OURS, 1.2, True),
        (OURS, 1.19, False),
        (replace(OURS, regret_bound=None), 9.0, False),  # nothing is known of it
        (replace(OURS, source="heuristic", regret_bound=None), 9.0, False),
        (replace(OURS, source="transferred", regret_bound=None), 9.0, False),
        (replace(OURS, source="measured", regret_bound=None), 1.0, True),
        (replace(OURS, source="pinned", regret_bound=None), 1.0, True),
        (replace(OURS, candidate=PYTORCH_OPERATOR), 1.0, True),  # what would run anyway
    ],
)
def test_what_is_trusted(choice: Choice, most: float | None, expected: bool) -> None:
    assert is_trusted(choice, most) is expected


def test_what_is_not_trusted_comes_after_pytorchs_operator() -> None:
    theirs = replace(OURS, candidate=PYTORCH_OPERATOR, regret_bound=None)
    second = replace(OURS, candidate=Candidate("grouped_fprop", 6), regret_bound=None)
    first, *rest = with_fallback([OURS, theirs, second], 1.1)
    assert (first.source, first.candidate) == ("fallback", PYTORCH_OPERATOR)
    assert (first.predicted_ms, first.regret_bound, first.model) == (None, None, None)
    assert [c.candidate for c in rest] == [OURS.candidate, second.candidate]
    assert all(c.regret_bound is None for c in rest)
    assert with_fallback([OURS, second], 1.5) == [OURS, second]


def test_a_predictor_keeps_to_it(predictor: Predictor) -> None:
    choice = predictor.choose(LAYER, "h100")
    assert choice.source == "predicted"
    if choice.candidate != PYTORCH_OPERATOR:
        assert predictor.choose(LAYER, "h100", max_regret=choice.regret_bound) == choice
        strict = max(1.0, choice.regret_bound - 1e-3)
        refused = [
            predictor.choose(LAYER, "h100", max_regret=strict),
            *predictor.choose_many([LAYER], "h100", max_regret=strict),
            predictor.rank(LAYER, "h100", 4, max_regret=strict)[0],
        ]
        assert {c.source for c in refused} == {"fallback"}
        assert len(predictor.rank(LAYER, "h100", 4, max_regret=strict)) == 4


@pytest.mark.parametrize("value", [0.99, -1, float("nan"), float("inf"), "1.1", True])
def test_only_factors_are_accepted(predictor: Predictor, value: object) -> None:
    with pytest.raises(InvalidInput, match="max_regret"):
        predictor.choose(LAYER, "h100", max_regret=value)


def test_a_problem_out_of_the_datas_range_says_so(predictor: Predictor) -> None:
    inside, outside = (predictor.choose(p, "h100") for p in (LAYER, HUGE))
    assert (inside.extrapolated, outside.extrapolated) == (False, True)
    assert inside.regret_bound is not None
    assert outside.regret_bound is None
    assert json.loads(json.dumps(outside.to_json()))["extrapolated"] is True
    assert predictor.choose(HUGE, "h100", max_regret=9.0).candidate == PYTORCH_OPERATOR
