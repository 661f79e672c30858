"""The hold-out and the third draw: made from committed layers, and apart from each other."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from confpred.data.suites import read_suite
from confpred.families.registry import families_of
from confpred.problem.conv2d import DIRECTIONS, DTYPES
from confpred.problem.device import get_device


@pytest.fixture(scope="module")
def scripts(script):
    return {name: script(name) for name in ("make_holdout", "make_further", "make_suite")}


@pytest.fixture(scope="module")
def suites(repository):
    """All problems by folder and direction; the first two draws are in no folder."""
    folder = repository / "datasets" / "suites"
    files = [(name, direction) for name in ("", "holdout", "further") for direction in DIRECTIONS]
    files += [("further", name) for name in ("float32", "banded_wgrad")]
    return {
        (name, file): read_suite(folder / name / f"{file}.json").entries for name, file in files
    }


def of(suites, name):
    return [entry for (folder, _), found in suites.items() if folder == name for entry in found]


@pytest.mark.slow(reason="thousands of problems are drawn")
@pytest.mark.parametrize(("name", "words"), [("holdout", ["build"]), ("further", [])])
def test_the_files_are_those_that_the_command_writes(scripts, made_again, name, words):
    made = made_again(scripts[f"make_{name}"].main, name, *words)
    lacking = scripts["make_further"].LACKING if name == "further" else ()
    assert sorted(made) == sorted(f"{each}.json" for each in (*DIRECTIONS, *lacking))


def test_the_hold_out_shares_no_layer_and_no_network_with_training(suites):
    held, trained = of(suites, "holdout"), of(suites, "") + of(suites, "further")
    assert not {e.problem.layer() for e in held} & {e.problem.layer() for e in trained}
    assert all(e.networks for e in held)
    names, known = ({name for e in some for name in e.networks} for some in (held, trained))
    assert not names & known
    elsewhere = {name for name in names if "@" in name}  # known at another size
    assert {name.partition("@")[0] for name in elsewhere} <= known
    assert len(names - elsewhere) >= 15
    assert len(names) >= 30


def test_the_hold_out_has_what_the_issue_of_honesty_needs(suites):
    held = [e.problem for e in of(suites, "holdout")]
    assert len(held) == len(set(held)) >= 300
    for direction in DIRECTIONS:
        own = [p for p in held if p.direction == direction]
        kinds = Counter("depthwise" if p.group_width == 1 else "grouped" for p in own)
        assert min(kinds.values()) >= 40
        assert {p.dtype for p in own} == set(DTYPES)
    assert sum(bool(p.n & (p.n - 1)) for p in held) > 0.4 * len(held)
    assert sum(p.h % 7 != 0 and p.h % 8 != 0 for p in held) > 0.5 * len(held)
    assert {p.group_width for p in held} == {1, 4, 8, 16, 32, 64}
    assert any(p.deterministic for p in held)
    assert any(p.activation != "none" for p in held)


def test_nearly_every_problem_of_the_hold_out_has_a_kernel_on_both_devices(suites):
    """The others are grouped filter gradients that no tile fits, and are PyTorch's."""
    for key in ("h100", "h200"):
        device, held = get_device(key), of(suites, "holdout")
        unserved = [
            e.problem
            for e in held
            if not any(f.legal(e.problem, device).any() for f in families_of(e.problem).values())
        ]
        assert {p.direction for p in unserved} <= {"wgrad"}
        assert not any(p.group_width == 1 for p in unserved)
        assert len(unserved) < 0.05 * len(held)
        assert len(held) - len(unserved) >= 300


def test_the_third_draw_is_as_large_as_the_first_two_and_of_the_hold_outs_kernels(scripts, suites):
    further = [entry for each in DIRECTIONS for entry in suites["further", each]]
    before = of(suites, "")
    assert len(further) >= len(before) == 2820
    problems = {e.problem for e in further}
    assert len(problems) == len(further)
    assert not problems & {e.problem for e in before}
    make = scripts["make_suite"]

    def kernels(entries):
        return {(e.problem.direction, make._compiled_in(e.problem)) for e in entries}

    assert kernels(further) == kernels(of(suites, "holdout"))
    by_direction = Counter(e.problem.direction for e in further)
    assert by_direction["wgrad"] > 1.2 * by_direction["fprop"]
    assert sum(bool(e.problem.n & (e.problem.n - 1)) for e in further) > 0.3 * len(further)


def test_the_layers_of_the_hold_out_are_recorded_with_their_networks(scripts, suites):
    networks = json.loads(scripts["make_holdout"].NETWORKS.read_text())
    assert {"timm", "torchvision"} < networks.keys()
    make = scripts["make_holdout"]
    users = make.users_of_layers(networks["networks"], make.trained_layers())
    for entry in of(suites, "holdout"):
        assert users[entry.problem.layer()] == entry.networks
