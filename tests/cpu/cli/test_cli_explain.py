"""``confpred explain`` as a user meets it."""

from __future__ import annotations

import json

import pytest
from command_line import confpred, named, worked

from confpred.data.suites import read_suite
from confpred.errors import install_command
from confpred.predict.explain import explain_layer
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem

LAYER = "n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1"


def test_the_page_is_the_librarys(model_folder):
    done = worked("explain", "--gpu", "h100", "--model", model_folder, "--layer", LAYER, "--top", 3)
    predictor = Predictor.load(model_folder)
    expected = explain_layer(Problem.parse(LAYER), "h100", top=3, predictor=predictor)
    assert done.stdout == f"{expected}\n"


def test_json_of_a_network_has_every_layer(model_folder, repository):
    smoke = repository / "datasets" / "suites" / "smoke.json"
    done = worked("explain", "--gpu", "h100", "--model", model_folder, "--network", smoke, "--json")
    content = json.loads(done.stdout)["explanations"]
    assert [c["problem"] for c in content] == [
        entry.problem.to_json() for entry in read_suite(smoke).entries
    ]


@pytest.mark.slow(reason="matplotlib draws, twelve times")
@pytest.mark.parametrize(
    ("name", "begins"), [("why.png", b"\x89PNG"), ("why.svg", b"<?xml"), ("why", b"\x89PNG")]
)
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_a_plot_is_written_whole_and_the_same_again(model_folder, tmp_path, name, begins, gpu):
    path = tmp_path / name
    words = ("--gpu", gpu, "--model", model_folder, "--layer", LAYER, "--plot", path)
    worked("explain", *words)
    first = path.read_bytes()
    assert first.startswith(begins)
    if name == "why.svg":
        assert b"FLOP / byte" in first
        assert confpred("explain", *words).returncode == 2  # it is not replaced unasked
        assert confpred("explain", *words, "--force").returncode == 0
        assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "h100"), "give either --layer or --network"),
        (("--gpu", "h100", "--layer", LAYER, "--top", 99), "99 is not in the range 1<=x<=32"),
        (
            ("--gpu", "h100", "--layer", LAYER, "--layer", LAYER, "--plot", "x.png"),
            "--plot shows one layer; 2 were given",
        ),
        (("--gpu", "h100", "--layer", LAYER, "--plot", "/tmp"), "plot='/tmp' is not allowed"),
    ],
)
def test_what_is_wrong_is_named(words, message):
    named(confpred("explain", *words), message)


def test_only_a_plot_needs_matplotlib(model_folder, tmp_path):
    prelude = "import sys; sys.modules['matplotlib'] = None"
    words = ("--gpu", "h100", "--model", model_folder, "--layer", LAYER)
    assert confpred("explain", *words, prelude=prelude).returncode == 0
    done = confpred("explain", *words, "--plot", tmp_path / "why.png", prelude=prelude)
    assert done.returncode == 1
    assert f"this needs matplotlib: {install_command('train')}" in done.stderr
