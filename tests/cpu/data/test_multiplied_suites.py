"""The suites of depthwise layers with a channel multiplier: made from timm's layers, and apart."""

from __future__ import annotations

import pytest
from layers import H100

from confpred.data.suites import read_suite
from confpred.families.registry import family_named
from confpred.problem.conv2d import DIRECTIONS

NAMES = ("training", "holdout")


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "multiplied"
    return {name: read_suite(folder / f"{name}.json").entries for name in NAMES}


def test_the_files_are_those_that_the_command_writes(script, made_again):
    made = made_again(script("multiplied_suites").main, "multiplied")
    assert sorted(made) == ["holdout.json", "training.json"]


def test_no_layer_and_no_network_of_the_holdout_is_trained_on(script, shipped):
    layers = [{entry.problem.layer() for entry in shipped[name]} for name in NAMES]
    networks = [{n for entry in shipped[name] for n in entry.networks} for name in NAMES]
    assert not layers[0] & layers[1]
    assert not networks[0] & networks[1]
    assert networks[0] == set(script("multiplied_suites").TRAINED)


def test_every_problem_has_a_kernel_and_directions_are_shared(script, shipped):
    for entries in shipped.values():
        problems = [entry.problem for entry in entries]
        assert len(set(problems)) == len(problems)
        for problem in problems:
            assert script("multiplied_suites").is_multiplied(problem)
            gradient = f"depthwise_multiplied_{problem.direction}"
            name = "depthwise_fprop" if problem.direction == "fprop" else gradient
            assert family_named(name).legal(problem, H100).any(), problem
        for direction in DIRECTIONS:
            assert 3 * sum(p.direction == direction for p in problems) == len(problems)
        assert {p.stride for p in problems} == {(1, 1), (2, 2)}
