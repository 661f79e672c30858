"""``confpred predict`` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import confpred, named, worked

from confpred.cli import cli
from confpred.data.suites import read_suite
from confpred.predict.predictor import Predictor
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem

HERE = str(Path(__file__).parent)  # a folder that is no model and has none
LAYER = "n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1"
STRIDED = LAYER + " stride=3"
DENSE = "n=32 c=32 h=56 w=56 k=32 r=3 s=3 padding=1"


@pytest.fixture
def smoke(repository: Path) -> Path:
    return repository / "datasets" / "suites" / "smoke.json"


def test_json_is_the_librarys_answer_to_the_bit(model_folder, smoke):
    words = ("--device", "h100", "--model", model_folder, "--top", 4, "--json")
    done = worked("predict", "--network", smoke, *words)
    predictor = Predictor.load(model_folder)
    problems = [entry.problem for entry in read_suite(smoke).entries]
    expected = [[c.to_json() for c in predictor.rank(p, "h100", 4)] for p in problems]
    assert json.loads(done.stdout) == {"choices": expected}


def test_table_has_a_line_a_choice(model_folder):
    words = ("--device", "h100", "--model", model_folder, "--top", 3)
    done = worked("predict", "--layer", LAYER, "--layer", STRIDED, *words)
    head, layer, *lines = done.stdout.splitlines()
    assert re.split("  +", head) == [
        "rank", "source", "provider", "ms", "PyTorch ms", "measured on", "bound", "confidence",
    ]  # fmt: skip
    assert [layer, lines[6]] == [str(Problem.parse(words)) for words in (LAYER, STRIDED)]
    assert all(line.startswith("      ") and "=" in line for line in lines[1:6:2])
    lines = [head, *lines[:6:2], *lines[7:]]
    assert [line[0] for line in lines[1:5]] == ["1", "2", "3", "1"]
    assert "predicted" in lines[1]
    assert "fallback" in lines[4]
    told = [line[lines[0].index("measured on") :].split() for line in lines[1:5]]
    assert [words[0] for words in told] == ["h100", "h100", "h100", "none"]
    assert told[0][2:4] == ["95", "%"]
    assert told[3] == ["none", "none"]
    assert lines[5].startswith(
        "model made-up-1: with 95 % confidence a choice is at most its bound"
    )
    bounds = [line[lines[0].index("bound") :].split() for line in lines[1:3]]
    assert float(bounds[0][0]) >= 1
    assert bounds[1] == []  # the second choice has none


LINE = "n=8 c=2048 w=4096 k=2048 s=4 groups=2048 padding=3 cut=3 layout=channels_first"
VOLUME = "n=8 c=54 d=16 h=56 w=56 k=54 t=3 r=3 s=3 groups=54 padding=1 stride=1x2x2"


@pytest.mark.parametrize("words", [LINE, VOLUME, f"{LAYER} rank=2"])
@pytest.mark.parametrize("command", ["predict", "explain"])
def test_the_words_say_the_rank(command, words) -> None:
    said = worked(command, "--device", "h100", "--layer", words).stdout
    assert str(ConvNd.parse(words)) in said
    same = worked(command, "--device", "h100", "--operation", "conv", "--layer", words).stdout
    assert said == same


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", LAYER, "--layer", LINE], "allowed: layers of one operation in a command"),
        (["--layer", f"{LAYER} layot=channels_first"], "allowed: a field such as layout"),
        (["--layer", f"{VOLUME} dilation=1x2"], "an integer, or 3 of them, as rank is 3"),
        (["--operation", "conv2d", "--layer", LINE], "a field"),
        (["--operation", "cov", "--layer", LINE], "conv2d or "),
    ],
)
def test_a_layer_of_another_rank_is_refused_by_its_field(words, message) -> None:
    named(confpred("predict", "--device", "h100", *words), message, 2)


def test_the_help_says_how_a_rank_is_asked_for() -> None:
    said = " ".join(worked("predict", "--help").stdout.split())
    for words in ("d=16", "t=3", "layout=channels_first", "cut=3", LINE, VOLUME):
        assert words in said


@pytest.mark.parametrize(
    ("device", "layer", "source", "measured_on", "remark"),
    [
        ("a100", LAYER, "transferred", "h100", "PyTorch's operator runs unless it is measured"),
        ("h100-pcie", LAYER, "transferred", "h100", "this architecture; not measured here"),
        ("h100", DENSE, "heuristic", None, "PyTorch's operator runs"),
    ],
)
def test_a_guess_is_marked_and_has_no_confidence(
    device, layer, source, measured_on, remark, model_folder
) -> None:
    words = ("--device", device, "--model", model_folder, "--layer", layer)
    said = confpred("predict", *words).stdout
    assert "95 %" not in said
    _, _, line, _, last = said.splitlines()
    assert last.startswith(f"{source}: ")
    assert last.endswith(remark)
    assert source in line
    (choice,) = json.loads(confpred("predict", *words, "--json").stdout)["choices"][0]
    told = [choice[name] for name in ("source", "measured_on", "confidence", "regret_bound")]
    assert told == [source, measured_on, None, None]
    assert f"{measured_on or 'none'}  " in line
    refused = json.loads(confpred("predict", *words, "--max-regret", "9", "--json").stdout)[
        "choices"
    ][0][0]
    assert (refused["source"], refused["provider"]) == ("fallback", "pytorch")


def test_a_bound_that_is_not_accepted_names_pytorchs_operator(model_folder):
    words = ("--device", "h100", "--model", model_folder, "--layer", LAYER)
    done = confpred("predict", *words, "--max-regret", "1", "--json")
    (choice,) = json.loads(done.stdout)["choices"][0]
    assert choice["provider"] == "pytorch"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "h100"), "give either --layer or --network"),
        (("--device", "h100", "--layer", LAYER, "--network", "/dev/null"), "give either"),
        (("--layer", LAYER), "Missing option '--device'"),
        (("--device", "tpu", "--layer", LAYER), "device='tpu' is not allowed; allowed: h100"),
        (("--device", "h100", "--layer", "n=1"), "c is missing"),
        (("--device", "h100", "--layer", "n=nan " + LAYER[5:]), "n='nan' is not allowed"),
        (("--device", "h100", "--layer", "32 images"), "layer='32' is not allowed"),
        (("--device", "h100", "--layer", LAYER, "--top", 0), "0 is not in the range 1<=x<=32"),
        (("--device", "h100", "--layer", "n=1,5 c=3"), "n='1,5' is not allowed"),
        (("--device", "h100", "--network", "none"), "'--network': File 'none' does not exist"),
        (("--device", "h100", "--layer", LAYER, "--model", "none"), "'--model': Directory 'none'"),
        (("--device", "h100", "--layer", LAYER, "--model", HERE), f"cannot read {HERE}/card.json"),
        (("--device", "h100", "--layer", LAYER, "--plan", "none"), "'--plan': Path 'none' does"),
    ],
)
def test_what_is_wrong_is_named(words, message):
    named(confpred("predict", *words), message)


def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        words = ("predict", "--device", "h100", "--layer", LAYER)
        done = confpred(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode != 0
    assert done.stderr.splitlines() == ["confpred: [Errno 28] No space left on device"]


def test_it_is_python_m_confpred_too() -> None:
    program, words = Path(sys.executable).with_name("confpred"), ("predict", "--device", "h9")
    one, other = (
        subprocess.run([*command, *words, "--layer", LAYER], capture_output=True, text=True)
        for command in ((program,), (sys.executable, "-m", "confpred"))
    )
    assert (one.returncode, one.stdout, one.stderr) == (2, "", other.stderr)
    assert one.stderr.startswith("confpred: device='h9' is not allowed")


@pytest.mark.parametrize("command", [
    "predict", "train", "evaluate", "devices", "explain", "report", "retrain", "drift", "plan",
    "plan export", "plan show", "plan check",
])  # fmt: skip
def test_help_teaches_by_example(command):
    done = CliRunner().invoke(cli, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert f"  confpred {command}" in done.output.partition("Usage:")[2].partition("\n")[2]
