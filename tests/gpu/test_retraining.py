"""`confpred retrain` and `confpred drift` on the GPU at hand, and choices of another's model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from command_line import confpred as confpred_runs

import confpred
from confpred.cuda import driver
from confpred.data.suites import Suite, read_suite, write_suite
from confpred.predict.predictor import Predictor
from confpred.problem import device as devices
from confpred.problem.device import Device
from confpred.pytorch.run import choosing
from confpred.retraining.offers import to_judge_by, to_learn_from


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path


def test_retrain_measures_trains_and_comes_to_a_verdict(places: Path, repository: Path) -> None:
    whole = read_suite(repository / "datasets/suites/fprop.json")
    few = (*to_learn_from(whole)[:40], *to_judge_by(whole)[:20])
    write_suite(Suite("few", few), places / "few.json")
    session = ("--suite", places / "few.json", "--folder", places / "session")
    words = ("retrain", "--device", "cuda:0", "--budget", "60s")
    done = confpred_runs(*words, *session, timeout=280)
    assert done.returncode in (0, 3), done.stderr
    assert "published: " in done.stdout
    assert (places / "models").exists() == (done.returncode == 0)
    assert json.loads((places / "session/session.json").read_text())["done"]


def test_drift_times_the_model_of_this_gpu_again(device: Device) -> None:
    if device.key not in Predictor.load().models:
        pytest.skip(f"no model of {device.key}")
    done = confpred_runs("drift", "--count", "12", "--json", timeout=280)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["holds"] else 1), done.stderr
    assert 0.5 < found["ratio"] < 2
    assert len(found["retimed"]) >= 8


def test_a_choice_transferred_within_an_architecture_runs_and_is_measured(
    places: Path, monkeypatch, device: Device
) -> None:
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(places / "cache"))
    board = replace(device, key="test-board", product="NVIDIA Test Board")
    devices.remember("0", asdict(board))
    monkeypatch.setattr(driver, "device_of", lambda _: board)
    confpred.use_predictor(Predictor.load())
    x = torch.randn(32, 128, 56, 56, device="cuda", dtype=torch.half)
    x = x.to(memory_format=torch.channels_last)
    weight = torch.randn(128, 8, 3, 3, device="cuda", dtype=torch.half)
    weight = weight.to(memory_format=torch.channels_last)
    found = []
    with torch.no_grad(), choosing.watch_choices(found.append):
        confpred.conv2d(x, weight, padding=1, groups=16)
        layer = torch.nn.Conv2d(128, 128, 3, padding=1, groups=16, bias=False)
        layer.weight.data = weight
        confpred.optimize(layer, verify=3)(x)
    assert [found[0].source, found[-1].source] == ["transferred", "measured"]
    assert choosing.runs_kernel(found[0])
    assert not replace(found[0], is_near=False).is_launched  # as of another architecture
