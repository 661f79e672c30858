"""Why a layer gets its config: the parts of an explanation are what they say they are."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import lightgbm
import numpy as np
import pytest
from layers import CONVOLUTIONS

import confpred
from confpred.errors import InvalidInput, UnknownDevice
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import all_families
from confpred.model.folder import Model
from confpred.predict.explain import (
    NEAREST,
    OTHER,
    LayerExplanation,
    NearestLayers,
    compare,
    median_config,
    theme_of,
)
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device

H100 = get_device("h100")
FAMILY = all_families()["grouped_fprop"]
UNSEEN = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
STRIDED = replace(UNSEEN, stride=(3, 3))


@pytest.fixture(scope="module")
def predictor(model_folder: Path) -> Predictor:
    return Predictor.load(model_folder)


@pytest.fixture(scope="module")
def model(predictor: Predictor) -> Model:
    return predictor.models["h100"]


@pytest.fixture(scope="module")
def ours(model: Model) -> Predictor:
    """One that leaves nothing to PyTorch's operator, so that there is a config to explain."""
    return Predictor({"h100": replace(model, pytorch=None)})


@pytest.fixture(scope="module")
def explained(ours: Predictor) -> LayerExplanation:
    return confpred.explain_layer(UNSEEN, "h100", top=4, predictor=ours)


def test_the_choices_are_the_predictors(explained, ours):
    assert list(explained.choices) == ours.rank(UNSEEN, "h100", 4)
    assert explained.choice == ours.choose(UNSEEN, "h100")
    assert explained.choice.regret_bound is not None


def test_the_roofline_is_that_of_the_device(explained):
    floor = explained.roofline
    assert (floor.bytes, floor.flops) == (UNSEEN.minimum_bytes, UNSEEN.flops)
    assert floor.floor_ms == pytest.approx(H100.roofline_s(UNSEEN) * 1e3)
    assert floor.limit == "memory"
    assert explained.roofline_share == pytest.approx(floor.floor_ms / explained.choice.predicted_ms)
    wide = Problem.parse("n=256 c=2048 h=28 w=28 k=2048 r=7 s=7 groups=2 padding=3")
    assert confpred.explain_layer(wide).roofline.limit == "arithmetic"


def test_comparisons_are_with_the_next_and_with_a_middling_config(explained, ours, model):
    ranked = ours.rank(UNSEEN, "h100", 2)
    assert [c.other for c in explained.comparisons] == [
        ranked[1].candidate,
        median_config(model.families[FAMILY.name], UNSEEN, H100),
    ]
    near, far = (c.ratio for c in explained.comparisons)
    assert near == pytest.approx(ranked[1].predicted_ms / ranked[0].predicted_ms)
    assert 1 <= near < far


def test_a_middling_config_is_in_the_middle(model):
    learned = model.families[FAMILY.name]
    rows = learned.legal(UNSEEN, H100)
    cost = learned.order.predict(learned.features(UNSEEN, H100, rows))
    middle = cost[rows == median_config(learned, UNSEEN, H100).config_id]
    assert (cost < middle).sum() <= len(rows) / 2
    assert (cost > middle).sum() <= len(rows) / 2


def test_factors_are_exact_shapley_values(explained, model, model_folder):
    """As LightGBM itself says, exchanging the groups in every order."""
    booster = lightgbm.Booster(model_file=model_folder / "grouped_fprop.order.txt")
    chosen = explained.choice.candidate
    learned = model.families[FAMILY.name]
    comparison = compare(learned, UNSEEN, H100, chosen, explained.comparisons[-1].other)
    rows = np.array([chosen.config_id, comparison.other.config_id])
    ours, theirs = learned.features(UNSEEN, H100, rows)
    groups = [
        [learned.pool.feature_names.index(name) for name in part.features]
        for part in comparison.contributions
    ]
    assert sorted(itertools.chain(*groups)) == np.flatnonzero(ours != theirs).tolist()
    subsets = list(itertools.product((0, 1), repeat=len(groups)))
    mixed = np.array([ours] * len(subsets))
    for row, subset in zip(mixed, subsets, strict=True):
        for columns in itertools.compress(groups, subset):
            row[columns] = theirs[columns]
    cost = dict(zip(subsets, booster.predict(mixed), strict=True))
    shares = np.zeros(len(groups))
    orders = list(itertools.permutations(range(len(groups))))
    for order in orders:
        before = [0] * len(groups)
        for group in order:
            after = [*before]
            after[group] = 1
            shares[group] += cost[tuple(after)] - cost[tuple(before)]
            before = after
    shares /= len(orders)
    assert [math.log(c.ratio) for c in comparison.contributions] == pytest.approx(shares)
    assert math.prod(c.ratio for c in comparison.contributions) == pytest.approx(comparison.ratio)
    assert np.exp(cost[subsets[-1]] - cost[subsets[0]]) == pytest.approx(comparison.ratio)
    strengths = [abs(math.log(c.ratio)) for c in comparison.contributions]
    assert strengths == sorted(strengths, reverse=True)


def test_every_feature_of_every_family_has_a_meaning(model):
    """No feature that a config can change goes under "other"."""
    problems = {
        "grouped": "n=4 c=64 h=14 w=14 k=64 r=3 s=3 groups=8 padding=1",
        "depthwise": "n=4 c=64 h=14 w=14 k=64 r=3 s=3 groups=64 padding=1",
        "dense": "n=4 c=64 h=14 w=14 k=64 r=3 s=3 padding=1",
        "depthwise_large": "n=4 c=64 h=14 w=14 k=64 r=13 s=13 groups=64 padding=6",
        "depthwise_multiplied": "n=4 c=64 h=14 w=14 k=128 r=3 s=3 groups=64 padding=1",
        "anywidth": "n=4 c=72 h=14 w=14 k=72 r=3 s=3 groups=3 padding=1",
    }
    for name, family in CONVOLUTIONS.items():
        kind, _, direction = name.rpartition("_")
        words = problems.get(kind, problems[kind.partition("_")[0]])
        problem = Problem.parse(f"{words} direction={direction}")
        rows = np.flatnonzero(family.legal(problem, H100))
        features = family.features(problem, H100, rows)
        changing = np.flatnonzero((features != features[0]).any(axis=0))
        names = [family.feature_names[i] for i in changing]
        fields = family.configs.dtype.names
        assert [n for n in names if theme_of(n, fields) == OTHER] == [], name


def test_the_nearest_layers_are_measured_ones_in_order(explained, model):
    near = explained.nearest
    assert len(near) == NEAREST
    assert [n.distance for n in near] == sorted(n.distance for n in near)
    for neighbour in near:
        best = model.measured[str(neighbour.problem)]
        assert (neighbour.candidate, neighbour.time_ms) == (best.candidate, best.time_ms)
        floor = H100.roofline_s(neighbour.problem) * 1e3
        assert neighbour.roofline_share == pytest.approx(floor / best.time_ms)


def test_distance_is_in_doublings(model):
    layers = NearestLayers(model)
    known = Problem.parse(next(iter(model.measured)))

    def distance(problem: Problem) -> float:
        found = layers.nearest(problem, len(model.measured))
        return next(n.distance for n in found if n.problem == known)

    assert distance(known) == 0.0
    assert layers.nearest(known, 1)[0].problem == known
    assert distance(replace(known, n=2 * known.n)) == pytest.approx(1.0)
    assert distance(replace(known, n=2 * known.n, h=2 * known.h)) == pytest.approx(math.sqrt(2))
    assert distance(replace(known, dtype="bfloat16")) == pytest.approx(2.0)
    assert distance(replace(known, dilation=(3, 1))) == pytest.approx(1.0)


def test_a_measured_layer_says_so_and_is_its_own_neighbour(predictor, model):
    known = next(p for p in map(Problem.parse, model.measured) if predictor.choose(p, H100).family)
    found = confpred.explain_layer(known, predictor=predictor)
    assert found.choice.source == "measured"
    assert found.pytorch_ms == predictor.expected_ms(known, "h100", PYTORCH_OPERATOR) > 0
    assert found.nearest[0].problem == known
    assert "the fastest candidate measured for this layer" in str(found)


def test_where_pytorchs_operator_is_chosen_its_risk_is_named(predictor, model):
    careful = replace(model, pytorch=replace(model.pytorch, margins={UNSEEN.kind: 5.0}))
    found = confpred.explain_layer(UNSEEN, predictor=Predictor({"h100": careful}))
    assert found.choice.candidate == PYTORCH_OPERATOR
    assert found.comparisons == ()
    assert "PyTorch is chosen because the predicted gain is within the model's error" in str(found)


def test_without_a_model_or_a_kernel_there_is_less_to_say(predictor):
    guessed = confpred.explain_layer(UNSEEN, "a100", predictor=predictor)
    assert (guessed.comparisons, guessed.nearest, guessed.model) == ((), (), None)
    assert guessed.choice.source == "transferred"
    assert "The times are predicted from measurements on h100: " in str(guessed)
    assert "bound     none: no bound is calibrated" in str(guessed)
    assert "95 %" not in str(guessed)
    estimated = confpred.explain_layer(UNSEEN, "a100", predictor=Predictor({}))
    assert "rough estimates" in str(estimated)
    left = confpred.explain_layer(STRIDED, "h100", predictor=predictor)
    assert left.choice.source == "fallback"
    assert left.roofline_share is None
    assert "as no confpred kernel is legal" in str(left)


def test_the_page_names_what_counts(explained):
    page = str(explained)
    assert page.startswith(f"{UNSEEN} on h100\n")
    for choice in explained.choices:
        assert f"{choice.predicted_ms:.4f}" in page
    assert f"at most {explained.choice.regret_bound:.3f} times" in page
    assert f"reaches {explained.roofline_share:.0%} of it" in page
    assert all(str(n.problem) in page for n in explained.nearest)
    assert all(c.theme in page for c in explained.comparisons[-1].contributions)


def test_json_holds_the_whole(explained):
    content = json.loads(json.dumps(explained.to_json()))
    assert content["choices"] == [c.to_json() for c in explained.choices]
    assert content["regret_bound"] == explained.choice.regret_bound
    assert content["roofline"]["share"] == explained.roofline_share
    assert [c["ratio"] for c in content["comparisons"]] == [c.ratio for c in explained.comparisons]
    assert len(content["nearest"]) == NEAREST


def test_bad_questions_are_named(predictor):
    with pytest.raises(UnknownDevice, match="device='tpu'"):
        confpred.explain_layer(UNSEEN, "tpu", predictor=predictor)
    with pytest.raises(InvalidInput, match="top=0"):
        confpred.explain_layer(UNSEEN, "h100", top=0, predictor=predictor)
    with pytest.raises(InvalidInput, match="problem="):
        confpred.explain_layer("n=1", predictor=predictor)
