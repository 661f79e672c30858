"""Suite files: what is read is what was written, and a bad file says what is wrong with it."""

from __future__ import annotations

import json

import pytest

from confpred.device import get_device
from confpred.errors import DataError, InvalidProblem, StorageError
from confpred.families import all_families
from confpred.problem import Problem
from confpred.suite import FORMAT, Entry, Suite, read_suite, write_suite

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


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none\.json: No such file"):
        read_suite(tmp_path / "none.json")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*suite\.json"):
        write_suite(Suite("x", (Entry(Problem(**LAYER)),)), tmp_path / "file" / "suite.json")


def test_the_suites_that_ship_hold_layers_that_their_networks_have(repository):
    networks = json.loads((repository / "datasets" / "networks.json").read_text())["networks"]
    layers = {
        name: [Problem.from_json(_without(layer, "count") | {"n": 1}) for layer in found]
        for name, found in networks.items()
    }
    device = get_device("h100")
    sizes = ("c", "h", "w", "k", "r", "s", "stride", "padding", "dilation", "groups")
    checked = 0
    for suite in ("fprop", "dgrad", "smoke"):
        for entry in read_suite(repository / "datasets" / "suites" / f"{suite}.json").entries:
            problem = entry.problem
            served = any(f.legal(problem, device).any() for f in all_families().values())
            assert served or not entry.networks, problem
            for name in entry.networks:
                wanted = [getattr(problem, size) for size in sizes]
                assert wanted in [[getattr(x, size) for size in sizes] for x in layers[name]], name
                checked += 1
    assert checked > 300


def _without(fields: dict, name: str) -> dict:
    return {key: value for key, value in fields.items() if key != name}
