"""`confpred benchmark`: a network of a file or of timm, on the CPU as a trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from slow import slow_but
from timm_networks import timm

from confpred.cli.benchmark import benchmark

NETWORK = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

def fails():
    raise ValueError("not today")

def number():
    return 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(NETWORK)
    return path


def _run(*words: object) -> Result:
    return CliRunner().invoke(benchmark, [*map(str, words)])


@pytest.mark.parametrize("mode", slow_but([[]], [[], ["--train"]], "four ways of training"))
def test_a_network_of_a_file_is_timed_in_every_way(mine: Path, mode: list[str]) -> None:
    words = ("--shape", "2x3x8x8", "--device", "cpu", "--dtype", "bfloat16", "--rounds", "1")
    done = _run(f"{mine}:build", *words, *mode, "--compare", "inductor=False", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found["ways"]) == ["eager", "again", "optimize", "inductor=False"]
    assert all(way["ms"] > 0 for way in found["ways"].values())
    assert found["training"] is bool(mode)


@pytest.mark.parametrize(
    ("function", "shape", "told"),
    [
        ("build", "2x3x9x9", "a step on inputs of 2x3x9x9 (--shape) fails: mat1 and mat2"),
        ("biuld", "2x3x8x8", "build"),
        ("fails", "2x3x8x8", "ValueError: not today"),
        ("number", "2x3x8x8", "torch.nn.Module"),
        ("build", "2x0", "32x3x224x224"),
    ],
)
def test_what_cannot_be_timed_is_said(mine: Path, function: str, shape: str, told: str) -> None:
    done = _run(f"{mine}:{function}", "--shape", shape, "--device", "cpu")
    assert done.exit_code != 0
    assert told in str(done.exception) + done.output


@pytest.mark.parametrize(
    ("network", "told"),
    [("timm:resnet51", "resnet50"), ("nowhere.py:build", "FILE.py:FUNCTION"), ("mine", "timm:")],
)
def test_a_network_that_is_not_there_is_named(network: str, told: str) -> None:
    timm()
    done = _run(network, "--device", "cpu")
    assert told in str(done.exception)


def test_without_a_gpu_explain_is_offered() -> None:
    assert "confpred.explain" in str(_run("timm:resnet50").exception)


def test_a_device_that_is_none_is_named() -> None:
    assert "device='gpu' is not allowed" in str(_run("timm:resnet50", "--device", "gpu").exception)
