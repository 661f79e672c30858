"""The suites of large depthwise filters: apart, and of layers as networks have them."""

from __future__ import annotations

from collections import Counter

import pytest
from layers import CONVOLUTIONS, H100

from confpred.data.suites import read_suite
from confpred.problem.conv2d import DIRECTIONS

NAMES = ("training", "holdout")


@pytest.fixture(scope="module")
def scripts(script):
    return script("large_filter_suites")


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "large_filters"
    return {name: read_suite(folder / f"{name}.json").entries for name in NAMES}


def test_the_files_are_those_that_the_command_writes(scripts, made_again):
    assert sorted(made_again(scripts.main, "large_filters")) == ["holdout.json", "training.json"]


def test_no_layer_and_no_network_of_the_holdout_is_trained_on(scripts, shipped):
    layers = [{entry.problem.layer() for entry in shipped[name]} for name in NAMES]
    networks = [{n for entry in shipped[name] for n in entry.networks} for name in NAMES]
    assert not layers[0] & layers[1]
    assert not networks[0] & networks[1]
    assert networks[1] == set(scripts.HELD_OUT)
    assert networks[0] | networks[1] == set(scripts.NETWORKS)


def test_layers_are_those_of_publications(scripts):
    found = {name: list(network.layers()) for name, network in scripts.NETWORKS.items()}
    assert [(p.c, p.h, p.r, p.s) for p in found["replknet_31b"]] == [
        (128, 56, 31, 31), (256, 28, 29, 29), (512, 14, 27, 27), (1024, 7, 13, 13),
    ]  # fmt: skip
    assert [(p.c, p.h, p.r, p.s) for p in found["slak_t"]][:4] == [
        (124, 56, 51, 5), (124, 56, 5, 51), (249, 28, 49, 5), (249, 28, 5, 49),
    ]  # fmt: skip
    assert all((p.p, p.q) == (p.h, p.w) for layers in found.values() for p in layers)


def test_every_problem_has_a_kernel_and_directions_are_shared(shipped):
    for entries in shipped.values():
        problems = [entry.problem for entry in entries]
        assert len(set(problems)) == len(problems)
        for problem in problems:
            family = CONVOLUTIONS[f"depthwise_large_{problem.direction}"]
            assert family.legal(problem, H100).any(), problem
        shares = Counter(problem.direction for problem in problems)
        assert min(shares[direction] for direction in DIRECTIONS) >= len(problems) / 5
        assert {1, 64} <= {problem.n for problem in problems}


def test_the_readme_counts_networks_and_problems(repository, scripts, shipped):
    text = " ".join((repository / "datasets" / "README.md").read_text().split())
    counts = {name: len(shipped[name]) for name in NAMES}
    held = len(scripts.HELD_OUT)
    trained = len(scripts.NETWORKS) - held
    told = f"{counts['training']} problems to train on, of {trained} networks, and"
    assert f"{told} {counts['holdout']} of {held} others" in text
