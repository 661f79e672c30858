"""`confpred.prepare` of a small network, which needs no GPU; starting from it does (tests/gpu)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import confpred
from confpred.cuda import bundles
from confpred.cuda.compiler import compile_kernel
from confpred.cuda.epilogue import epilogue_kernel
from confpred.errors import InvalidInput, StorageError, UnknownDevice
from confpred.network.bundle import epilogue_kernels
from confpred.predict.bundles import open_bundle
from confpred.predict.plans import read_plan
from confpred.predict.predictor import Predictor


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    for bundle in bundles._opened:
        bundles.close_kernels(bundle)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False),
        nn.BatchNorm2d(64),
        nn.SiLU(),
    ).half()


IMAGES = torch.zeros(8, 3, 56, 56, dtype=torch.half)


def test_a_network_is_prepared_without_a_gpu(tmp_path: Path) -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = confpred.prepare(model, IMAGES, out=tmp_path / "bundle", device="h100")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert read_plan(tmp_path / "bundle" / "plan.json", "h100") == plan
    dense, depthwise = plan.choices
    assert (dense.family, dense.problem.activation, dense.problem.groups) == (None, "relu", 1)
    assert (depthwise.problem.activation, depthwise.problem.groups) == ("silu", 64)
    predictor = open_bundle(tmp_path / "bundle", "h100")
    assert predictor.choose(depthwise.problem, "h100").candidate == depthwise.candidate
    follows = epilogue_kernel(64, "float16", bias=True, residual=False, activation="relu")
    assert epilogue_kernels([dense]) == [follows]
    for spec in (follows, *plan.specs()):
        assert bundles.bundled(spec, "sm_90a") == compile_kernel(spec, "sm_90a").cubin


def test_a_training_step_has_gradients_and_nothing_fused(tmp_path: Path) -> None:
    plan = confpred.prepare(network(), IMAGES, tmp_path / "b", device="h100", training=True)
    found = {(c.problem.groups, c.problem.direction) for c in plan.choices}
    assert found >= {(64, "fprop"), (64, "dgrad"), (64, "wgrad"), (1, "fprop"), (1, "wgrad")}
    assert {c.problem.activation for c in plan.choices} == {"none"}
    expected = Predictor.load().choose_many([c.problem for c in plan.choices], "h100")
    assert [c.candidate for c in plan.choices] == [c.candidate for c in expected]


def test_what_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"model='ReLU' is not allowed.* with convolutions"):
        confpred.prepare(nn.ReLU(), IMAGES, tmp_path / "b", device="h100")
    with pytest.raises(UnknownDevice, match="device='tpu'"):
        confpred.prepare(network(), IMAGES, tmp_path / "b", device="tpu")
    assert not (tmp_path / "b").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(StorageError, match="full"):
        confpred.prepare(network(), IMAGES, tmp_path / "full", device="h100")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_without_a_gpu_the_device_has_to_be_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInput, match=r"device=None is not allowed.* such as h100"):
        confpred.prepare(network(), IMAGES, tmp_path / "b")
    with pytest.raises(InvalidInput, match="device=None"):
        confpred.load_bundle(tmp_path / "b")
