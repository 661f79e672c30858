"""A GPU that no model knows, from start to end: measured, kept, found, exported; and planted
faults, each of which costs its candidate."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted_jobs
import pytest
import torch
from command_line import confpred as command
from torch import nn

import confpred
from benchmarks.networks.unknown_board import models_hidden
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import kernels_of
from confpred.predict.choice import Choice
from confpred.predict.plan import read_plan
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device
from confpred.problem.limits import UNLIMITED
from confpred.pytorch.run import choosing, tuning
from confpred.pytorch.run.tuning import Tuner
from confpred.sampler import kept, run

#: Depthwise and half-precision: cuDNN is slow here on every GPU.
LAYER = Problem(32, 256, 56, 56, 256, 7, 7, groups=256, padding=3)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Device]:
    """The GPU at hand under another name, and no model at all."""
    with models_hidden(tmp_path / "cache") as made:
        yield made
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(256, 256, 7, padding=3, groups=256), nn.ReLU(), nn.Conv2d(256, 256, 1)]
    model = nn.Sequential(*layers).cuda().half().eval()
    return model.to(memory_format=torch.channels_last)


def images() -> torch.Tensor:
    x = torch.randn(32, 256, 56, 56, device="cuda", dtype=torch.half)
    return x.to(memory_format=torch.channels_last)


@torch.no_grad()
def test_a_board_is_measured_once_and_its_answers_are_exported(
    board: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, "confpred")
    x, model = images(), network()
    plain = copy.deepcopy(model)
    confpred.optimize(model, x, tune=60)
    torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)
    first = confpred.status(model)
    assert set(first.providers) & set(kernels_of(LAYER)), first
    assert any(text.startswith("tune: measured ") for text in first.remarks), first
    assert caplog.text.count("tune=0 turns it off") == 1

    def sampled(*_: Any, **__: Any) -> None:
        raise AssertionError("what is kept is measured again")

    monkeypatch.setattr(run, "sample", sampled)
    for tune in (None, 0):
        torch._dynamo.reset()
        again, begun = copy.deepcopy(plain), time.monotonic()
        confpred.optimize(again, x, tune=tune)
        print(f"a capture with tune={tune} took {time.monotonic() - begun:.1f} s")
        second = confpred.status(again)
        assert second.providers == first.providers
        assert any("confpred retrain --kept" in text for text in second.remarks), second
        torch.testing.assert_close(again(x), plain(x), rtol=2e-2, atol=2e-2)
    seen: list[Choice] = []
    with choosing.watch_choices(seen.append):
        out = confpred.conv2d(
            x, plain[0].weight, plain[0].bias, padding=3, groups=256, activation="relu"
        )
    torch.testing.assert_close(out, plain[:2](x), rtol=2e-2, atol=2e-2)
    assert [choice.source for choice in seen] == ["measured"]

    out = tmp_path / "plan.json"
    done = command("plan", "export", "--device", board.key, "--kept", "--out", out)
    assert done.returncode == 0, done.stderr
    assert {choice.source for choice in read_plan(out).choices} == {"measured"}


def ask(board: Device, tuner: Tuner) -> Choice:
    token = choosing.measuring.set(tuner.on(0))
    try:
        (choice,) = choosing.choose_many([LAYER], board)
    finally:
        choosing.measuring.reset(token)
    return choice


@pytest.mark.parametrize("fault", ["hang", "fault", "wrong"])
def test_a_planted_fault_costs_its_candidate(
    board: Device, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    faulty, *_ = tuning.candidates(LAYER, board, UNLIMITED)
    monkeypatch.setenv("FAULTY", str(faulty.config_id))
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setattr(tuning, "JOB", planted_jobs.JOB)
    choice = ask(board, Tuner(90.0))
    assert choice.source == "measured"
    assert choice.candidate not in (faulty, PYTORCH_OPERATOR)
    times = kept.times_in(choosing.kept_folder(board, CONVOLUTION), CONVOLUTION)
    timed = [measured.candidate for measured in times[LAYER] if measured.ms < math.inf]
    assert faulty not in timed
    assert torch.ones(3, device="cuda").sum().item() == 3  # this process lives
