"""``confpred explain`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from confpred.data.suites import read_suite
from confpred.errors import install_command
from confpred.predict.explain import explain_layer
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem

LAYER = "n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1"


def explain(*words: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{prelude}\nfrom confpred.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "explain", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_page_is_the_librarys(model_folder):
    done = explain("--gpu", "h100", "--model", model_folder, "--layer", LAYER, "--top", 3)
    assert done.returncode == 0, done.stderr
    predictor = Predictor.load(model_folder)
    expected = explain_layer(Problem.parse(LAYER), "h100", top=3, predictor=predictor)
    assert done.stdout == f"{expected}\n"


def test_json_of_a_network_has_every_layer(model_folder, repository):
    smoke = repository / "datasets" / "suites" / "smoke.json"
    done = explain("--gpu", "h100", "--model", model_folder, "--network", smoke, "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)["explanations"]
    assert [c["problem"] for c in content] == [
        entry.problem.to_json() for entry in read_suite(smoke).entries
    ]


@pytest.mark.slow(reason="matplotlib is imported and draws in fresh processes")
@pytest.mark.parametrize(
    ("name", "begins"), [("why.png", b"\x89PNG"), ("why.svg", b"<?xml"), ("why", b"\x89PNG")]
)
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_a_plot_is_written_whole_and_the_same_again(model_folder, tmp_path, name, begins, gpu):
    path = tmp_path / name
    words = ("--gpu", gpu, "--model", model_folder, "--layer", LAYER, "--plot", path)
    done = explain(*words)
    assert done.returncode == 0, done.stderr
    first = path.read_bytes()
    assert first.startswith(begins)
    if name == "why.svg":
        assert b"FLOP / byte" in first
        assert explain(*words).returncode == 2  # it is not replaced unasked
        assert explain(*words, "--force").returncode == 0
        assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "h100"), "give either --layer or --network"),
        (("--layer", LAYER), "Missing option '--device'"),
        (("--gpu", "tpu", "--layer", LAYER), "device='tpu' is not allowed; allowed: h100"),
        (("--gpu", "h100", "--layer", "n=1"), "c is missing"),
        (("--gpu", "h100", "--layer", LAYER, "--top", 99), "99 is not in the range 1<=x<=32"),
        (
            ("--gpu", "h100", "--layer", LAYER, "--layer", LAYER, "--plot", "x.png"),
            "--plot shows one layer; 2 were given",
        ),
        (("--gpu", "h100", "--layer", LAYER, "--plot", "/tmp"), "plot='/tmp' is not allowed"),
    ],
)
def test_what_is_wrong_is_named(words, message):
    done = explain(*words)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_only_a_plot_needs_matplotlib(model_folder, tmp_path):
    prelude = "import sys; sys.modules['matplotlib'] = None"
    words = ("--gpu", "h100", "--model", model_folder, "--layer", LAYER)
    assert explain(*words, prelude=prelude).returncode == 0
    done = explain(*words, "--plot", tmp_path / "why.png", prelude=prelude)
    assert done.returncode == 1
    assert f"this needs matplotlib: {install_command('train')}" in done.stderr


def test_help_teaches_by_example():
    done = explain("--help")
    assert "  confpred explain " in done.stdout.partition("Usage:")[2].partition("\n")[2]
