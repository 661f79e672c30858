"""The predictor's answers: from where, in what order, and always the same."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import lightgbm
import numpy as np
import pytest
from hypothesis import given
from strategies import problems_of

from confpred.errors import InvalidInput, UnknownDevice
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate, config_dict
from confpred.families.registry import all_families, families_of, kernels_of
from confpred.model.folder import load_model
from confpred.model.rank import FINALISTS
from confpred.predict.choice import MAX_TOP, Choice
from confpred.predict.explain import explain_layer
from confpred.predict.plan import plan_of
from confpred.predict.predictor import RANKINGS_KEPT, Predictor, nearest_models
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.limits import Limits

H100 = get_device("h100")
FAMILY = all_families()["grouped_fprop"]
UNSEEN = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
STRIDED = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 groups=8 padding=1 stride=3")


@pytest.fixture(scope="module")
def predictor(model_folder: Path) -> Predictor:
    return Predictor.load(model_folder)


@pytest.fixture(scope="module")
def measured(predictor: Predictor) -> list[Problem]:
    return [Problem.parse(words) for words in predictor.models["h100"].measured]


def neighbours(count: int) -> list[Problem]:
    """Problems that were not measured, each with well over a hundred candidates."""
    return [replace(UNSEEN, n=n, h=29 + n % 5) for n in range(2, 2 + count)]


def test_problems_of_a_further_operation_have_its_models(predictor, model_folder):
    further = Predictor({}, further={Problem: predictor.models})
    assert not further.models
    for limits in (Limits(), Limits(workspace_bytes=0)):
        found, right = (p.within(limits).rank(UNSEEN, "h100", 3) for p in (further, predictor))
        assert found == right
    found, right = (explain_layer(UNSEEN, "a100", predictor=p) for p in (further, predictor))
    assert found == right
    line = ConvNd(8, 64, 512, 64, 4, padding=3, cut=3, groups=64, rank=1, layout="channels_first")
    both, own = Predictor.load(model_folder, further=["conv"]), Predictor.load(operation="conv")
    assert both.rank(line, "h100") == own.rank(line, "h100")
    assert both.rank(UNSEEN, "h100") == predictor.rank(UNSEEN, "h100")


def test_a_measured_problem_gets_its_best_config(predictor, measured):
    for problem in measured:
        best = predictor.models["h100"].measured[str(problem)]
        choice = predictor.choose(problem, "h100")
        assert choice.source == "measured"
        assert choice.candidate == best.candidate
        assert choice.predicted_ms == pytest.approx(best.time_ms)
        assert choice.regret_bound is None
        assert choice.model == "made-up-1"


def test_predictions_are_those_of_lightgbm(predictor, model_folder):
    """The order is the whole ensemble's, and the finalists hold the best of all candidates."""
    order, time = (
        lightgbm.Booster(model_file=model_folder / f"grouped_fprop.{kind}.txt")
        for kind in ("order", "time")
    )
    model = predictor.models["h100"].families["grouped_fprop"]
    same = []
    for problem in neighbours(40):
        rows = np.flatnonzero(FAMILY.legal(problem, H100))
        features = model.features(problem, H100, rows)
        cost = dict(zip(rows.tolist(), order.predict(features), strict=True))
        ranked = [c for c in predictor.rank(problem, "h100", MAX_TOP) if c.family]
        costs = np.array([cost[c.config_id] for c in ranked])
        finalists = costs[:FINALISTS]
        assert finalists == pytest.approx(sorted(finalists))
        costs = np.maximum.accumulate(costs)  # runners-up count as no better than finalists
        (best,) = time.predict(features[rows == ranked[0].config_id])
        expected = np.exp(best + costs - costs[0]) * H100.roofline_s(problem) * 1e3
        assert [c.predicted_ms for c in ranked] == pytest.approx(expected)
        same.append(costs[0] == min(cost.values()))
    assert np.mean(same) >= 0.85


@given(problems_of(FAMILY))
def test_choices_are_legal_and_consistent(model_folder, problem):
    predictor = Predictor.load(model_folder)
    ranked = predictor.rank(problem, "h100", 8)
    assert ranked[0] == predictor.choose(problem, H100) == predictor.rank(problem, "h100", 1)[0]
    assert ranked[:3] == predictor.rank(problem, "h100", 3)
    kernels = [c for c in ranked if c.family]
    assert len({(c.family, c.config_id) for c in kernels}) == len(kernels)
    families = kernels_of(problem)
    legal = {name: family.legal(problem, H100) for name, family in families.items()}
    assert all(legal[c.family][c.config_id] for c in kernels)
    assert (ranked[0].source == "fallback") == (not any(mask.any() for mask in legal.values()))


def test_no_legal_kernel_is_a_fallback(predictor):
    assert predictor.rank(STRIDED, "h100", 5) == [Choice(STRIDED, "h100", "fallback")]


def test_a_device_without_a_model_gets_the_order_of_another_devices(predictor, model_folder):
    """Asked with the device's own description, which decides what is legal and how it is filled."""
    a100, model = get_device("a100"), load_model(model_folder)
    ranked = predictor.rank(UNSEEN, "a100", 5)
    assert {(c.source, c.device, c.model) for c in ranked} == {
        ("transferred", "a100", model.version)
    }
    assert not any(c.is_launched for c in ranked)  # unless one is measured
    assert {(c.measured_on, c.confidence, c.regret_bound) for c in ranked} == {("h100", None, None)}
    learned = model.families[FAMILY.name]
    ours = [c for c in ranked if c.family]
    rows, seconds = learned.rank(UNSEEN, a100, learned.legal(UNSEEN, a100), len(ours))
    assert [c.config_id for c in ours] == rows[: len(ours)].tolist()
    assert [c.predicted_ms for c in ours] == [s * 1e3 for s in seconds[: len(ours)]]
    assert set(rows) <= set(np.flatnonzero(FAMILY.legal(UNSEEN, a100)))


def test_an_answer_transferred_within_an_architecture_is_launched(predictor):
    part = replace(get_device("h100"), key="h100-64sm", sm_count=64)
    for device in ("h100-pcie", "gh200", part):
        ranked = predictor.rank(UNSEEN, device, 5)
        assert {(c.source, c.measured_on, c.regret_bound) for c in ranked} == {
            ("transferred", "h100", None)
        }
        assert all(c.is_guess and c.is_launched for c in ranked)
        assert predictor.choose(UNSEEN, device, max_regret=9.0).source == "fallback"
    assert not Predictor({}).choose(UNSEEN, "h100-pcie").is_launched


def test_a_choice_says_where_its_knowledge_is_from(predictor, measured):
    own, transferred = (predictor.choose(UNSEEN, device) for device in ("h100", "a100"))
    assert (own.source, transferred.source) == ("predicted", "transferred")
    assert own.regret_bound > 1
    assert not own.extrapolated
    assert own.family is None or dict(own.config) == config_dict(FAMILY, own.config_id)
    assert (own.confidence, own.measured_on) == (0.95, "h100")
    best = predictor.choose(next(iter(measured)), "h100")
    assert (best.source, best.confidence, best.measured_on) == ("measured", None, "h100")
    guess = Predictor({}).choose(UNSEEN, "h100")
    assert (guess.source, guess.confidence, guess.measured_on) == ("heuristic", None, None)
    left = predictor.choose(STRIDED, "h100")
    assert (left.source, left.confidence, left.measured_on) == ("fallback", None, None)


def test_the_nearest_device_that_knows_the_operation_is_the_donor():
    model = namedtuple("model", "device operation")
    convolution = namedtuple("operation", "problem")(Problem)
    other = namedtuple("operation", "problem")(str)
    models = {
        key: model(get_device(key), convolution if key != "h200-nvl" else other)
        for key in ("h100", "h200", "rtx-4090", "h200-nvl", "rtx-3090")
    }
    donors = {
        key: next(nearest_models(models, get_device(key), Problem)).device.key
        for key in ("gh200", "h100-nvl", "rtx-5090", "l40s", "b200", "rtx-3060")
    }
    assert donors == {
        "gh200": "h200",
        "h100-nvl": "h100",
        "rtx-5090": "rtx-4090",
        "l40s": "rtx-4090",
        "b200": "h200",
        "rtx-3060": "rtx-3090",  # of its architecture
    }
    assert list(nearest_models(models, get_device("h200"), int)) == []
    assert [m.device.key for m in nearest_models(models, get_device("h200"), Problem)][:2] == [
        "h200", "h100",
    ]  # fmt: skip


def test_families_that_the_model_does_not_know_do_not_compete(predictor):
    """Both compute this layer; the model knows the grouped kernel only."""
    problem = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
    known = families_of(problem).items()
    legal = {name for name, family in known if family.legal(problem, H100).any()}
    assert {"grouped_fprop", "im2col"} <= legal
    ranked = predictor.rank(problem, "h100", MAX_TOP)
    assert {c.source for c in ranked} == {"predicted"}
    assert {c.family for c in ranked} <= {"grouped_fprop", None}


def test_families_that_the_model_does_not_know_stand_in_where_none_of_its_own_is_legal(predictor):
    problem = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=160 padding=1 dtype=float32")
    ranked = predictor.rank(problem, "h100", 5)
    assert {(c.source, c.family, c.model) for c in ranked} == {
        ("heuristic", "depthwise_fprop", None)
    }
    assert all(c.regret_bound is None for c in ranked)


def test_answers_do_not_depend_on_order_threads_or_process(predictor, model_folder):
    problems = [*neighbours(60), STRIDED]
    expected = [json.dumps(c.to_json()) for c in predictor.choose_many(problems, "h100")]
    fresh = Predictor.load(model_folder)
    with ThreadPoolExecutor(8) as pool:
        shuffled = np.random.default_rng(0).permutation(np.repeat(np.arange(len(problems)), 4))
        answers = list(pool.map(lambda i: (i, fresh.choose(problems[i], "h100")), shuffled))
    assert all(json.dumps(choice.to_json()) == expected[i] for i, choice in answers)


def test_answers_are_remembered_but_fewer_rankings(predictor):
    fresh = Predictor(predictor.models)
    best, ranked = fresh.choose(UNSEEN, "h100"), fresh.rank(UNSEEN, "h100", MAX_TOP)
    assert fresh.choose(replace(UNSEEN), "NVIDIA H100 80GB HBM3") is best
    assert fresh.rank(UNSEEN, "h100", MAX_TOP)[0] is ranked[0]
    for problem in neighbours(2 * RANKINGS_KEPT):
        fresh.rank(problem, "h100", 2)
    assert fresh.choose(UNSEEN, "h100") is best
    again = fresh.rank(UNSEEN, "h100", MAX_TOP)
    assert again == ranked
    assert again[0] is not ranked[0]


@pytest.mark.parametrize("problem", [None, str(UNSEEN), UNSEEN.to_json()])
def test_what_is_no_problem_is_named(predictor, problem):
    with pytest.raises(
        InvalidInput, match=r"problem(=.*| is missing;) allowed: .*confpred\.Problem"
    ):
        predictor.choose(problem, "h100")
    with pytest.raises(InvalidInput, match="problem"):
        predictor.choose_many([problem], "h100")


def test_a_choice_cannot_be_changed_by_its_reader(predictor):
    choice = predictor.rank(UNSEEN, "a100", 1)[0]
    with pytest.raises(TypeError):
        choice.config["block_n"] = 1
    predictor.rank(UNSEEN, "a100", 1).clear()
    assert predictor.rank(UNSEEN, "a100", 1) == [choice]


@pytest.mark.parametrize("top", [0, -1, MAX_TOP + 1, True, 2.0, "3", None])
def test_an_impossible_top_is_named(predictor, top):
    with pytest.raises(InvalidInput, match=r"top(=| is missing)"):
        predictor.rank(UNSEEN, "h100", top)


def test_an_unknown_device_is_named(predictor):
    with pytest.raises(UnknownDevice, match="device='tpu'"):
        predictor.choose(UNSEEN, "tpu")


def test_a_pin_goes_before_everything(model_folder, predictor, measured):
    known = next(p for p in measured if predictor.choose(p, "h100").family)
    worst = {p: int(np.flatnonzero(FAMILY.legal(p, H100))[-1]) for p in (known, UNSEEN)}
    pins = [Choice(p, "h100", "pinned", Candidate(FAMILY.name, row)) for p, row in worst.items()]
    plan = plan_of([*pins, Choice(STRIDED, "h100", "pinned")])
    pinned = Predictor.load(model_folder, plan=plan)
    for problem, row in worst.items():
        ranked = pinned.rank(problem, "h100", 4)
        assert (ranked[0].source, ranked[0].config_id) == ("pinned", row)
        assert ranked[0].predicted_ms > 0
        assert ranked[0].regret_bound is None
        rest = [c for c in predictor.rank(problem, "h100", 4) if c.config_id != row]
        assert [c.config_id for c in ranked[1:]] == [c.config_id for c in rest][:3]
    assert pinned.choose(known, "a100").source == "transferred"
    choice = pinned.choose(STRIDED, "h100")
    assert (choice.source, choice.candidate) == ("pinned", PYTORCH_OPERATOR)


# Predictors that are loaded again and again, as a service does at each reload, leave nothing.


def test_a_predictor_that_goes_takes_its_memory_along(model_folder: Path) -> None:
    sizes = []
    tracemalloc.start()  # NumPy tells it of its arrays
    try:
        for _ in range(6):
            Predictor.load(model_folder).choose_many(neighbours(3), "h100")
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(after - before for before, after in pairwise(sizes[2:])) < 50_000
