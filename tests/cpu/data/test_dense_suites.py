"""The suites of dense convolutions: made from the committed layers, and apart in their kinds."""

from __future__ import annotations

from collections import Counter

import pytest

from confpred.data.suites import read_suite
from confpred.problem.conv2d import DIRECTIONS, DTYPES

HELD_OUT = {"optical-flow", "pose", "super-resolution"}


@pytest.fixture(scope="module")
def scripts(script):
    return {name: script(f"dense_{name}") for name in ("layers", "suites", "written")}


@pytest.fixture(scope="module")
def networks(scripts):
    return scripts["layers"].read_networks()


@pytest.fixture(scope="module")
def shipped(repository):
    folder = repository / "datasets" / "suites" / "dense"
    return {name: read_suite(folder / f"{name}.json").entries for name in ("training", "holdout")}


def test_the_files_are_those_that_the_command_writes(scripts, made_again):
    made = made_again(scripts["suites"].main, "dense")
    assert sorted(made) == ["holdout.json", "training.json"]
    assert sum(map(len, made.values())) < 1_500_000


def test_another_seed_makes_other_problems_of_the_same_layers(scripts, networks, shipped):
    training, _ = scripts["suites"].suites(networks, seed=1)
    problems = {entry.problem for entry in training.entries}
    assert len(problems) == len(shipped["training"])
    assert len(problems & {entry.problem for entry in shipped["training"]}) < 400


def test_the_layers_are_written_as_they_were_read(scripts, networks, tmp_path):
    layers = scripts["layers"]
    path = tmp_path / "again.json"
    layers.write_networks(networks, {"timm": "1"}, path)
    assert layers.read_networks(path) == networks
    again, kept = (p.read_text().split("\n", 1)[1] for p in (path, layers.NETWORKS))
    assert again == kept
    assert layers.NETWORKS.stat().st_size < 1_000_000


def test_networks_that_are_written_down_are_in_the_file_as_they_are_written(scripts, networks):
    count = 0
    for kind, written in scripts["written"].WRITTEN.items():
        for name, parts in written.items():
            assert networks[name].kind == kind
            assert networks[name].layers == Counter(x for part in parts for x in part()), name
            count += 1
    assert len(networks) - count >= 40  # those of packages


def test_the_readme_counts_networks_and_problems(repository, networks, shipped):
    text = " ".join((repository / "datasets" / "README.md").read_text().split())
    kinds = {network.kind for network in networks.values()}
    assert len(networks) >= 30
    assert f"dense convolution layers of {len(networks)} networks of {len(kinds)} kinds" in text
    training, holdout = (f"{len(shipped[name]):,}" for name in ("training", "holdout"))
    assert f"{training} problems to train on and {holdout} of kinds that are held out" in text


def test_layers_and_problems_are_dense_and_their_networks_have_them(networks, shipped):
    layers = {
        name: {layer.problem.layer() for layer in network.layers}
        for name, network in networks.items()
    }
    assert {x.groups for found in layers.values() for x in found} == {1}
    for entries in shipped.values():
        problems = [entry.problem for entry in entries]  # valid, or they could not be read
        assert len(set(problems)) == len(problems)
        for entry in entries:
            assert entry.problem.groups == 1
            for name in entry.networks:
                assert entry.problem.layer() in layers[name], (name, entry.problem)


def epilogue(p):
    return p.bias, p.activation, p.residual


def test_an_epilogue_of_a_network_is_one_that_follows_the_layer_there(networks, shipped):
    problems = [layer.problem for network in networks.values() for layer in network.layers]
    seen = {(p.layer(), epilogue(p)) for p in problems}
    of_networks = [e.problem for entries in shipped.values() for e in entries if e.networks]
    fused = [
        p for p in of_networks if p.direction == "fprop" and epilogue(p) != (False, "none", False)
    ]
    assert len(fused) > 300
    assert {(p.layer(), epilogue(p)) for p in fused} <= seen


def test_no_layer_of_a_kind_that_is_held_out_is_trained_on(scripts, networks, shipped):
    assert set(scripts["suites"].HELD_OUT) == HELD_OUT
    held = [layer.problem for x in networks.values() if x.kind in HELD_OUT for layer in x.layers]
    trained = [entry.problem for entry in shipped["training"]]
    of_held, of_trained = (
        {(p.c, p.k, p.h, p.w, p.r, p.s, p.stride) for p in some} for some in (held, trained)
    )
    assert not of_held & of_trained
    kinds = {
        name: {networks[n].kind for e in shipped[name] for n in e.networks} for name in shipped
    }
    assert kinds["holdout"] == HELD_OUT
    assert kinds["training"] == {x.kind for x in networks.values()} - HELD_OUT


@pytest.mark.parametrize(("name", "each"), [("training", 400), ("holdout", 100)])
def test_directions_dtypes_and_batches_are_as_promised(shipped, name, each):
    problems = [entry.problem for entry in shipped[name]]
    directions = Counter(p.direction for p in problems)
    assert directions == dict(zip(DIRECTIONS, (2 * each, each, each), strict=True))
    dtypes = Counter(p.dtype for p in problems)
    assert set(dtypes) == set(DTYPES)
    assert dtypes["float16"] > 0.6 * len(problems)
    assert min(dtypes.values()) > 0.08 * len(problems)
    plain = sum(p.direction == "fprop" and not p.bias for p in problems)
    assert 0.8 * each < plain < 1.2 * each
    assert (min(p.n for p in problems), max(p.n for p in problems)) == (1, 128)
    assert max(p.minimum_bytes for p in problems) <= 2**30
