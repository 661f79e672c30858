"""Suite files: what is read is what was written, and a bad file says what is wrong with it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pyarrow as pa
import pytest

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import problem_columns, read
from confpred.data.suites import FORMAT, Entry, Suite, read_suite, write_suite
from confpred.errors import DataError, InvalidProblem, StorageError
from confpred.families.registry import families_of
from confpred.problem.conv2d import CONVOLUTION, DIRECTIONS, Problem
from confpred.problem.device import get_device

LAYER = {"n": 2, "c": 64, "h": 14, "w": 14, "k": 64, "r": 3, "s": 3, "groups": 8}


def test_round_trip(tmp_path):
    entries = (
        Entry(Problem(**LAYER), ("resnext", "regnet")),
        Entry(Problem(**LAYER, padding=(1, 2), bias=True, activation="relu", dtype="bfloat16")),
    )
    path = tmp_path / "made" / "suite.json"
    write_suite(Suite("both", entries), path)
    assert read_suite(path) == Suite("both", entries)
    assert [p.name for p in path.parent.iterdir()] == ["suite.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", 'lacks "format"'),
        ({"format": "confpred-suite/2"}, 'lacks "format"'),
        ({"name": 3}, '"name"'),
        ({"problems": {}}, '"problems" must be a list'),
        ({"problems": []}, "1 to 100000 problems"),
        ({"problems": [LAYER] * 100_001}, "1 to 100000 problems"),
        ({"problems": [LAYER, 7]}, r"problems\[1\] must be an object"),
        ({"problems": [LAYER | {"networks": "a"}]}, r"problems\[0\].networks"),
        ({"problems": [LAYER | {"networks": ["a,b"]}]}, r"problems\[0\].networks"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, content, message):
    path = tmp_path / "bad.json"
    if isinstance(content, dict):
        whole = {"format": FORMAT, "name": "x", "problems": [LAYER]} | content
        content = json.dumps(whole).encode()
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read_suite(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"c": 63}, "c=63"),
        ({"h": 0}, "h=0"),
        ({"n": float("nan")}, "n=nan"),
        ({"n": "2"}, "n='2'"),
        ({"activation": "tanh"}, "activation='tanh'"),
        ({"depth": 3}, "depth=3"),
    ],
)
def test_a_bad_problem_is_named_by_file_index_and_field(tmp_path, change, field):
    path = tmp_path / "bad.json"
    problems = [LAYER, LAYER | change]
    path.write_text(json.dumps({"format": FORMAT, "name": "x", "problems": problems}))
    with pytest.raises(InvalidProblem) as raised:
        read_suite(path)
    assert str(raised.value).startswith(f"{path}: problems[1].{field} is not allowed")


def test_a_place_that_cannot_be_read_or_written_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none\.json: No such file"):
        read_suite(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*suite\.json"):
        write_suite(Suite("x", (Entry(Problem(**LAYER)),)), tmp_path / "file" / "suite.json")


@pytest.fixture(scope="module")
def networks(repository):
    return json.loads((repository / "datasets" / "networks.json").read_text())["networks"]


@pytest.fixture(scope="module")
def shipped(repository):
    names = (*DIRECTIONS, "smoke")
    return {n: read_suite(repository / "datasets" / "suites" / f"{n}.json").entries for n in names}


def one_of(layer: dict) -> Problem:
    return Problem.from_json({name: layer[name] for name in layer if name != "count"} | {"n": 1})


@pytest.mark.slow(reason="legality of thousands of problems")
def test_the_suites_that_ship_hold_layers_that_their_networks_have(networks, shipped):
    """At the network's own input size or, for squares, at another one."""
    layers = {name: [one_of(layer) for layer in found] for name, found in networks.items()}
    device = get_device("h100")
    checked = resized = 0
    for entry in itertools.chain(*shipped.values()):
        problem = entry.problem
        served = any(f.legal(problem, device).any() for f in families_of(problem).values())
        # The one gap: no tile of `grouped_wgrad` fits outputs of 33 to 40 columns.
        gap = problem.direction == "wgrad" and 33 <= problem.q <= 40
        assert served or gap or not entry.networks, problem
        for name in entry.networks:
            same = [x for x in layers[name] if replace(problem.layer(), h=x.h, w=x.w) == x]
            if (problem.h, problem.w) not in [(x.h, x.w) for x in same]:
                assert problem.h == problem.w
                assert any((7 * problem.h) % x.h == 0 for x in same if x.h == x.w), name
                resized += 1
            checked += 1
    assert checked > resized > 300


@pytest.fixture
def make_suite(script):
    return script("make_suite")


def test_the_suites_that_ship_are_those_that_the_script_makes(make_suite, networks, shipped):
    users = make_suite.users_of_layers(networks)
    for direction in DIRECTIONS:
        entries = make_suite.training_entries(users, direction, seed=0)
        assert entries == shipped[direction]
        assert len({entry.problem for entry in entries}) == len(entries) == 940
    assert make_suite.smoke_entries() == shipped["smoke"]


def test_the_second_draw_adds_sizes_and_hardly_a_kernel(repository, make_suite, shipped):
    text = " ".join((repository / "datasets" / "README.md").read_text().split())
    variants = {
        count: [
            len({make_suite._compiled_in(entry.problem) for entry in shipped[direction][:count]})
            for direction in ("fprop", "dgrad", "wgrad")
        ]
        for count in (470, 940)
    }
    first, both = ("{}, {} and {}".format(*counts) for counts in variants.values())
    assert f"The first sets have {first} of them, both together {both}" in text


@pytest.mark.parametrize(("device", "draws"), [("h100", 1), ("h200", 2)])
def test_what_was_measured_is_in_the_suites(repository, shipped, device, draws):
    columns = problem_columns(CONVOLUTION)
    files = sorted((repository / "datasets" / device).glob("*.parquet"))
    table = pa.concat_tables(read(path, CONVOLUTION, columns) for path in files)
    rows = table.group_by(columns).aggregate([]).to_pylist()
    of_draws = [entry for d in DIRECTIONS for entry in shipped[d][: 470 * draws]]
    problems = {entry.problem for entry in of_draws}
    suites = repository / "datasets" / "suites"
    kinds = ("dense", "any_width", "large_filters", "multiplied")
    others = [suites / name / "training.json" for name in kinds]
    others.append(suites / "any_width" / "64.json")
    for path in (*others, *(suites / "further").glob("*.json")):
        problems |= {entry.problem for entry in read_suite(path).entries}
    assert len(rows) > 1000
    assert {problem_of_row(row, Problem) for row in rows} <= problems
