"""Words of newcomers: names that PyTorch has, slips of the pen, and narrow terminals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import confpred, named, worked

from confpred.cli import models
from confpred.client import transfer
from confpred.errors import InvalidProblem, UnknownDevice
from confpred.predict.choice import LAUNCH_MS
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, get_device

LAYER = "n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20"
TINY = "n=1 c=2 h=3 w=3 k=2 r=1 s=1 groups=2"
WIDEST = 120


@pytest.mark.parametrize(("words", "fields"), [
    ("dtype=half", {"dtype": "float16"}), ("dtype=fp16", {"dtype": "float16"}),
    ("dtype=torch.float16", {"dtype": "float16"}), ("dtype=torch.bfloat16", {"dtype": "bfloat16"}),
    ("dtype=bf16", {"dtype": "bfloat16"}), ("dtype=fp32 groups=160", {"dtype": "float32"}),
    ("padding=1,1", {"padding": (1, 1)}), ("padding=1x2", {"padding": (1, 2)}),
    ("padding=same", {"padding": (1, 1)}), ("padding=valid", {"padding": (0, 0)}),
    ("padding=same dilation=2,1", {"padding": (2, 1)}),
])  # fmt: skip
def test_words_as_pytorch_has_them(words: str, fields: dict[str, object]) -> None:
    base = LAYER.replace(" groups=20", "") if "groups=" in words else LAYER
    problem = Problem.parse(f"{base} {words}")
    assert {name: getattr(problem, name) for name in fields} == fields


@pytest.mark.parametrize("words", ["stride=2 padding=same", "dilation=1 padding=same"])
def test_a_padding_that_cannot_be_worked_out_is_refused(words: str) -> None:
    layer = LAYER.replace("r=3", "r=2") if "dilation" in words else LAYER
    with pytest.raises(InvalidProblem, match="padding='same' is not allowed; allowed: numbers"):
        Problem.parse(f"{layer} {words}")


def test_a_slip_of_the_pen_gets_a_suggestion() -> None:
    layer = ("--device", "h100", "--layer")
    named(confpred("predict", *layer, f"{LAYER} pading=1"), "allowed: a field such as padding")
    named(confpred("predit"), "No such command 'predit'; allowed: predict")
    named(confpred("predict", "--device", "h10", "--layer", LAYER), "allowed: h100")


def test_an_unknown_device_is_refused_in_a_line_that_fits() -> None:
    for name in ("zzz", "MIG 1g", "rtx4091"):
        with pytest.raises(UnknownDevice) as caught:
            get_device(name)
        assert len(str(caught.value)) <= WIDEST


def test_a_gpu_of_the_machine_and_a_model_of_gpu_are_told_apart() -> None:
    said = confpred("predict", "--device", "cuda:0", "--layer", LAYER)
    named(said, "the GPU model to answer for, such as h100")
    named(confpred("drift", "--device", "h100"), "a GPU of this machine, such as cuda:0")
    for command, word in (("predict", "MODEL"), ("drift", "CUDA")):
        assert f"--device, --gpu {word}" in worked(command, "--help").stdout or (
            f"--device {word}" in worked(command, "--help").stdout
        )


def test_tables_fit_a_terminal(repository: Path) -> None:
    smoke = repository / "datasets" / "suites" / "smoke.json"
    told = worked("predict", "--device", "h100", "--network", smoke, "--top", 3).stdout
    for text in (told, worked("devices").stdout):
        assert max(map(len, text.splitlines())) <= WIDEST


@pytest.mark.parametrize(("name", "allowed"), [
    ("a.jpg", "a name that ends in .png or .svg"), ("new/a.png", "a folder that exists"),
])  # fmt: skip
def test_a_plot_is_what_its_name_says_where_it_says(
    tmp_path: Path, name: str, allowed: str
) -> None:
    path = tmp_path / name
    named(confpred("explain", "--gpu", "h100", "--layer", LAYER, "--plot", path), allowed, 2)
    assert list(tmp_path.iterdir()) == []


def test_alike_faults_have_one_exit_code(tmp_path: Path) -> None:
    """The machine's own faults, such as no GPU, have 1."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{")
    ask = ("predict", "--device", "h100", "--layer", LAYER)
    for words in (
        ("predict", "--device", "h100", "--network", wrong),
        ("predict", "--device", "h100", "--network", tmp_path / "missing"),
        (*ask, "--model", tmp_path), (*ask, "--model", tmp_path / "missing"),
        (*ask, "--plan", wrong), (*ask, "--top", 0), (*ask[:3], "--layer", "n=1"),
    ):  # fmt: skip
        assert confpred(*words).returncode == 2
    assert confpred("drift").returncode == 1


def test_a_picture_is_no_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n")
    named(confpred("serve", "--config", tmp_path / "x.png"), "x.png is not TOML (JSON is .json): ")


def test_drift_without_a_gpu_does_not_speak_of_sampling() -> None:
    done = confpred("drift")
    named(done, "confpred: measuring needs an NVIDIA GPU", 1)
    assert "sampling" not in done.stderr


def test_no_launch_is_expected_to_take_less_than_the_least(repository: Path) -> None:
    predictor, problem = Predictor.load(), Problem.parse(TINY)
    for choice in predictor.rank(problem, "h100", 32):
        assert choice.predicted_ms >= LAUNCH_MS
        assert choice.pytorch_ms >= LAUNCH_MS
    assert predictor.rank(problem, "a100", 1)[0].predicted_ms >= LAUNCH_MS
    told = worked("explain", "--gpu", "h100", "--layer", TINY).stdout
    assert "bound     none, out of distribution" in told
    assert f"a launch takes {LAUNCH_MS} ms" in told
    assert "reaches 0% of it" not in told


def test_shells_complete_devices() -> None:
    words = {"COMP_WORDS": "confpred predict --device h1", "COMP_CWORD": "3"}
    how = {"_CONFPRED_COMPLETE": "bash_complete", **words}
    done = confpred(
        prelude="import sys; sys.argv[0] = 'confpred'", env=os.environ | how
    )  # fmt: skip
    offered = [line.partition(",")[2] for line in done.stdout.splitlines()]
    assert offered == [key for key in KNOWN if key.startswith("h1")]


def test_a_report_is_not_silent(model_folder: Path, tmp_path: Path) -> None:
    done = worked("report", model_folder, "--out", tmp_path / "report.html")
    lines = done.stderr.splitlines()
    assert any("reading" in line for line in lines)
    assert any("importances in made-up-1" in line for line in lines)


def test_a_model_that_is_here_is_not_pulled_again(tmp_path: Path, monkeypatch) -> None:
    """No service is needed: its list is given, and has what ships."""
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(tmp_path / "models"))
    (shipped,) = (m for m in models._here() if (m["device"], m["operation"]) == ("h100", "conv2d"))
    offered = {name: shipped[name] for name in ("device", "digest", "in_use")}
    monkeypatch.setattr(transfer, "models_at", lambda url: [offered])
    done = worked("models", "pull", "--url", "http://127.0.0.1:1", "--device", "h100")
    assert done.stdout == f"{shipped['folder']}: here already, and in use\n"
    assert not (tmp_path / "models").exists()
