"""Who wins, among families and their candidates: together as alone, and as without short cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from random_layers import problems

from confpred.families.protocol import Candidate
from confpred.model.folder import Model, NewestModels
from confpred.model.rank import (
    FINALISTS,
    STAGES,
    Gate,
    Pairs,
    order_candidates,
    rank_families,
)
from confpred.model.trees import Trees
from confpred.predict.choice import MAX_TOP
from confpred.predict.predictor import TOGETHER, Predictor
from confpred.problem.conv2d import DIRECTIONS, Problem

MODELS = NewestModels()
EVERY = [p for direction in DIRECTIONS for p in islice(problems(direction, seed=1), 45)]
EVERY += [  # of families that few random layers meet
    Problem.parse(f"{words} direction={direction}")
    for direction in DIRECTIONS
    for words in (
        "n=16 c=72 h=28 w=28 k=72 r=3 s=3 groups=3 padding=1",
        "n=16 c=24 h=28 w=28 k=24 r=31 s=31 groups=24 padding=15",
        "n=16 c=24 h=28 w=28 k=48 r=3 s=3 groups=24 padding=1",
    )
]
WHOLE = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def plain(model: Model, problem: Problem, names: list[str]) -> list[tuple[float, Candidate]]:
    """Each family's finalists, by the whole config table and one problem at a time."""
    found = []
    for name in names:
        family = model.families[name]
        if not family.serves(problem):
            continue
        rows = family.legal(problem, model.device)
        if len(rows):
            ranked, seconds = family.rank(problem, model.device, rows)
            best = zip(seconds[:FINALISTS].tolist(), ranked[:FINALISTS].tolist(), strict=True)
            found += [(value, Candidate(name, row)) for value, row in best]
    return sorted(found, key=lambda entry: (entry[0], entry[1].provider))


def test_together_is_as_alone(model):
    together = []
    for start in range(0, len(EVERY), TOGETHER):
        some = EVERY[start : start + TOGETHER]
        together += rank_families(model.families, None, some, model.device)
    for problem, ranking in zip(EVERY, together, strict=True):
        assert ranking == plain(model, problem, [*model.families]), str(problem)
    assert sum(map(bool, together)) > 75
    assert {c.provider for ranking in together for _, c in ranking} == set(model.families)


def test_many_choices_are_those_of_one_after_another(model):
    one_by_one, together = Predictor(MODELS), Predictor(MODELS)
    expected = [one_by_one.choose(problem, model.device) for problem in EVERY]
    assert together.choose_many(EVERY, model.device) == expected
    assert {choice.source for choice in expected} >= {"predicted", "fallback"}


def test_the_gate_leaves_families_out_and_nothing_else(model):
    serving = [[n for n, f in model.families.items() if f.serves(p)] for p in EVERY]
    opened = model.gate.open(EVERY, model.device, serving)
    rankings = rank_families(model.families, model.gate, EVERY, model.device)
    closed = 0
    for problem, served, names, ranking in zip(EVERY, serving, opened, rankings, strict=True):
        assert bool(names) == bool(served)
        assert set(names) <= set(served)
        assert ranking == (plain(model, problem, names) or plain(model, problem, served))
        closed += len(served) - len(names)
    assert closed > 10
    assert opened == [
        model.gate.open([p], model.device, [s])[0] for p, s in zip(EVERY, serving, strict=True)
    ]


def test_a_family_that_the_gate_does_not_know_competes(model):
    known = tuple(name for name in model.gate.families if name != "grouped_fprop")
    gate = replace(model.gate, families=known)
    problem = next(
        p for p in EVERY if p.direction == "fprop" and plain(model, p, ["grouped_fprop"])
    )
    names = [n for n, family in model.families.items() if family.serves(problem)]
    assert "grouped_fprop" in gate.open([problem], model.device, [names])[0]


class Wrong(Gate):
    """Opens one family, whatever comes of it."""

    def open(self, problems, device, serving):
        return [["depthwise_banded_fprop"] for _ in problems]


def test_where_no_open_family_has_a_candidate_the_others_compete():
    """The banded kernels cannot count the offsets in so large an image."""
    model = MODELS["h200"]
    large = Problem.parse("n=1 c=1024 h=1024 w=1024 k=1024 r=3 s=3 groups=1024 padding=1")
    small = replace(large, h=14, w=14)
    gate = Wrong(model.operation, model.gate.families, model.gate.lag)
    names = [n for n, family in model.families.items() if family.serves(large)]
    assert "depthwise_banded_fprop" in names
    assert not plain(model, large, ["depthwise_banded_fprop"])
    rankings = rank_families(model.families, gate, [small, large, small], model.device)
    assert rankings[0] == rankings[2] == plain(model, small, ["depthwise_banded_fprop"])
    assert rankings[1] == plain(model, large, names)


def test_the_first_of_a_ranking_are_the_same_however_many_are_wanted(model):
    for problem in EVERY[::5]:
        (most,) = rank_families(model.families, model.gate, [problem], model.device, MAX_TOP)
        assert [s for s, _ in most] == sorted(s for s, _ in most)
        assert len({candidate for _, candidate in most}) == len(most)
        for wanted in (1, 2, 7):
            (some,) = rank_families(model.families, model.gate, [problem], model.device, wanted)
            assert some[:wanted] == most[:wanted], (str(problem), wanted)
            assert len(some) >= min(wanted, len(most))


def pairs_of(model: Model, count: int = 10**6) -> tuple[Trees, Pairs, np.ndarray]:
    """Return the ensemble of a family, its candidates for a layer, and their costs."""
    family = next(f for f in model.families.values() if plain(model, WHOLE, [f.family.name]))
    rows = family.legal(WHOLE, model.device)[:count]
    features = family.pool.features(family.family, WHOLE, model.device, rows)
    return family.order, Pairs([0], [0, len(rows)], rows, features), family.order.predict(features)


def test_families_serve_what_they_were_measured_on(model):
    """Grouped kernels could compute dense layers, and cuDNN's plans grouped ones."""
    sizes = "n=8 c=64 h=28 w=28 k=64 r=3 s=3 padding=1"
    served = {8: {"grouped"}, 64: {"depthwise", "grouped"}, 1: {"cudnn", "dense", "im2col"}}
    for groups, kinds in served.items():
        problem = Problem.parse(f"{sizes} groups={groups}")
        (options,) = rank_families(model.families, None, [problem], model.device, MAX_TOP)
        found = {candidate.provider.partition("_")[0] for _, candidate in options}
        dense = groups == 1 and "cudnn" not in model.families
        assert found <= (set() if dense else kinds)
        assert found or dense


def test_few_candidates_are_ordered_by_the_whole_ensemble(model):
    trees, pairs, cost = pairs_of(model, FINALISTS)
    ((found, costs),) = order_candidates(trees, pairs)
    order = np.lexsort((pairs.rows, cost))
    assert found.tolist() == order.tolist()
    assert costs == pytest.approx(cost[order])  # sums of parts, which may be rounded otherwise


@pytest.mark.parametrize("wanted", [1, 10**6])
def test_a_candidates_cost_depends_on_no_other(model, wanted):
    """Whether a stage leaves candidates out, and whose they are, changes no bit of the others'."""
    trees, pairs, _ = pairs_of(model)
    ((every, costs),) = order_candidates(trees, pairs, wanted)
    best = np.sort(every[: FINALISTS // 2])
    both = Pairs(
        [0, 1],
        [0, len(best), len(best) + len(pairs.rows)],
        np.concatenate([pairs.rows[best], pairs.rows]),
        np.concatenate([pairs.features[best], pairs.features]),
    )
    (few, mine), (same, theirs) = order_candidates(trees, both, wanted)
    assert best[few].tolist() == every[: len(best)].tolist()
    assert (same - len(best)).tolist() == every.tolist()
    assert mine.tolist() == costs[: len(best)].tolist()
    assert theirs.tolist() == costs.tolist()


def test_those_that_a_stage_leaves_out_come_after_the_others(model):
    trees, pairs, cost = pairs_of(model)
    ((finalists, costs),) = order_candidates(trees, pairs)
    ((every, others),) = order_candidates(trees, pairs, 10**6)
    assert len(finalists) == FINALISTS < STAGES[0][1] < len(every) == len(pairs.rows)
    for _, most in STAGES:
        for wanted in (most, most + 1):
            ((found, theirs),) = order_candidates(trees, pairs, wanted)
            assert len(found) >= wanted
            assert found.tolist() == every[: len(found)].tolist()
            assert theirs.tolist() == others[: len(found)].tolist()
    assert others.tolist() == sorted(others)
    assert cost[finalists] == pytest.approx(costs)
    assert min(cost) >= min(costs) - 0.05  # the best is hardly ever left out
