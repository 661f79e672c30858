"""The suites of grouped layers of any group width: made from timm's layers, and apart."""

from __future__ import annotations

from collections import Counter

import pytest
from layers import ANY_WIDTH, CONVOLUTIONS, H100

from confpred.data.suites import read_suite
from confpred.problem.conv2d import DIRECTIONS


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "any_width"
    return {name: read_suite(folder / f"{name}.json").entries for name in ("training", "holdout")}


def test_the_files_are_those_that_the_command_writes(script, made_again):
    made = made_again(script("any_width_suites").main, "any_width")
    assert sorted(made) == ["64.json", "holdout.json", "training.json"]


def test_layers_of_64_channels_a_group_are_of_no_benchmarks_network(script, repository):
    suite = repository / "datasets" / "suites" / "any_width" / "64.json"
    left_out = set(script("any_width_suites").LEFT_OUT)
    for entry in read_suite(suite).entries:
        assert {entry.problem.c, entry.problem.k} == {64 * entry.problem.groups}
        assert not left_out & set(entry.networks)


def test_the_holdout_shares_no_layer_and_no_network(script, shipped):
    training, holdout = shipped.values()
    names = [{name for entry in entries for name in entry.networks} for entries in shipped.values()]
    assert names[0] == set(script("any_width_suites").TRAINED)
    assert len(names[0]) == 30
    assert len(names[1]) >= 30
    assert not names[0] & names[1]
    assert not {e.problem.layer() for e in training} & {e.problem.layer() for e in holdout}


@pytest.mark.parametrize("name", ["training", "holdout"])
def test_no_family_but_those_of_any_width_has_kernels(shipped, name):
    problems = [entry.problem for entry in shipped[name]]
    assert len(problems) == len(set(problems)) >= 150
    for problem in problems:
        serving = {n for n, family in CONVOLUTIONS.items() if family.legal(problem, H100).any()}
        assert serving == {f"anywidth_{problem.direction}"}, problem


@pytest.mark.parametrize("name", ["training", "holdout"])
def test_there_is_something_of_everything(shipped, name):
    problems = [entry.problem for entry in shipped[name]]
    directions = Counter(p.direction for p in problems)
    assert set(directions) == set(DIRECTIONS)
    assert all(count >= len(problems) // 4 for count in directions.values())
    depths = {(p.group_width, p.k // p.groups) for p in problems}
    assert {width for width, _ in depths} >= {24, 112, 128}
    assert any(width != depth for width, depth in depths)
    assert {p.stride for p in problems} >= {(1, 1), (2, 2)}
    assert {p.dtype for p in problems} == {"float16", "bfloat16"}
    assert {p.activation for p in problems if p.direction == "fprop"} >= {"none", "relu", "silu"}
    assert {p.residual for p in problems if p.direction == "fprop"} == {True, False}
    assert {p.deterministic for p in problems if p.direction == "wgrad"} == {True, False}


def test_configs_of_a_problem_are_some_hundreds(shipped):
    counts = [
        int(ANY_WIDTH[f"anywidth_{p.direction}"].legal(p, H100).sum())
        for p in (entry.problem for entry in shipped["holdout"])
    ]
    assert 100 < sorted(counts)[len(counts) // 2] < 600
    assert max(counts) < 800
