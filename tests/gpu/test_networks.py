"""`confpred.optimize` on a GPU: whole networks compute what they did, by kernels of ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from cpu.network.network_blocks import (
    Bottleneck,
    ConvNeXtBlock,
    DropPath,
    InvertedResidual,
    Network,
    made,
)
from layers_on_gpu import LAST, OursFirst, capture, ours_first, served_by
from torch import nn

import confpred
from confpred.families.registry import all_families
from confpred.network.instance_forward import InstanceForward
from confpred.predict.plans import read_plan
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device

NETWORKS = {
    "inverted residual": lambda: (InvertedResidual(64), InvertedResidual(64, nn.ReLU6)),
    "bottleneck": lambda: (Bottleneck(64, 64), Bottleneck(64, 64, stride=2)),
    "convnext": lambda: (ConvNeXtBlock(64), nn.GELU(), ConvNeXtBlock(64)),
}


@pytest.fixture(autouse=True)
def ours() -> Iterator[OursFirst]:
    with ours_first() as predictor:
        yield predictor


def network(name: str, dtype: torch.dtype = torch.float16) -> nn.Module:
    """A network in evaluation."""
    torch.manual_seed(0)
    return made(Network(*NETWORKS[name](), channels=64)).cuda().to(dtype)


def images(dtype: torch.dtype = torch.float16, batch: int = 4, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(batch, 3, 63, 57, device="cuda")
    return x.to(dtype).to(memory_format=LAST)


def exactly(model: nn.Module) -> nn.Module:
    """The same network, not optimized, in float64."""
    return confpred.revert(copy.deepcopy(model)).double()


def off(a: torch.Tensor, exact: torch.Tensor) -> float:
    """The distance of `a` from `exact`, as a part of its norm."""
    assert a.shape == exact.shape
    return ((a.double() - exact.double()).norm() / exact.double().norm()).item()


def as_good(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """`mine` is about as near to `exact` as PyTorch's result in the same dtype."""
    assert mine.dtype is theirs.dtype
    assert off(mine, exact) <= 2 * off(theirs, exact) + 5e-3


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_inference(name, given, ours) -> None:
    model, x = network(name), images()
    keys = list(model.state_dict())
    exact = exactly(model)(x.double())
    with torch.inference_mode():
        theirs = model(x)
        assert confpred.optimize(model, x if given else None) is model
        for _ in range(2):
            as_good(model(x), theirs, exact)
        assert served_by("fprop", ours)
        for batch in (1, 7):
            other = images(batch=batch, seed=2)
            assert off(model(other), exactly(model)(other.double())) < 2e-2
        assert off(model(x.contiguous()), exact) < 2e-2
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", NETWORKS)
def test_inference_under_autocast(name, ours) -> None:
    model, x = network(name, torch.float32), images(torch.float32)
    exact = exactly(model)(x.double())
    with torch.inference_mode(), torch.autocast("cuda", torch.float16):
        theirs = model(x)
        confpred.optimize(model)
        as_good(model(x), theirs, exact)
    assert served_by("fprop", ours)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_captured_is_replayed(name) -> None:
    model, x = confpred.optimize(network(name)), images()
    with torch.inference_mode():
        graph, out = capture(lambda: model(x))
        for seed in (2, 3):
            x.copy_(images(seed=seed))
            graph.replay()
            assert off(out, exactly(model)(x.double())) < 2e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_what_changes_is_folded_again(name) -> None:
    model, x = confpred.optimize(network(name)), images()
    with torch.inference_mode():
        before = model(x)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(1.2)
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.add_(0.1)
    with torch.inference_mode():
        after = model(x)
        assert off(after, before) > 2e-2
        assert off(after, exactly(model)(x.double())) < 2e-2
    state = {k: v * 0.9 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    with torch.inference_mode():
        assert off(model(x), exactly(model)(x.double())) < 2e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_a_copy_is_optimized_and_lives_alone(name, ours) -> None:
    model, x = confpred.optimize(network(name)), images()
    with torch.inference_mode():
        before = model(x)
    other = copy.deepcopy(model)
    ours.chosen.clear()
    with torch.inference_mode():
        confpred.use_predictor(ours)  # every shape is chosen for again
        assert off(other(x), before) < 1e-3
        assert served_by("fprop", ours)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    with torch.inference_mode():
        assert off(model(x), before) < 1e-3
        assert off(other(x), exactly(other)(x.double())) < 2e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_compiles_without_a_graph_break(name, ours) -> None:
    model, x = network(name), images()
    exact = exactly(model)(x.double())
    with torch.inference_mode():
        theirs = model(x)
    confpred.optimize(model)
    torch._dynamo.reset()
    ours.chosen.clear()
    with torch.no_grad():
        as_good(torch.compile(model, fullgraph=True)(x), theirs, exact)
    assert served_by("fprop", ours)


@pytest.mark.parametrize("name", NETWORKS)
def test_training_compiles_without_a_graph_break(name, ours) -> None:
    models = [network(name, torch.float32).train() for _ in range(2)]
    exact = network(name, torch.float32).double().train()
    x = images(torch.float32)
    confpred.optimize(models[0], training=True)
    torch._dynamo.reset()
    ours.chosen.clear()
    for module in (m for model in (*models, exact) for m in model.modules()):
        if isinstance(module, DropPath):
            module.eval()  # what is random differs
    outs = []
    for model in (torch.compile(models[0], fullgraph=True), models[1]):
        with torch.autocast("cuda", torch.float16):
            outs.append(model(x))
        outs[-1].float().square().sum().backward()
    as_good(*(out.detach() for out in outs), exact(x.double()).detach())
    assert all(served_by(direction, ours) for direction in ("fprop", "dgrad", "wgrad"))


@pytest.mark.parametrize("name", NETWORKS)
def test_reverts(name) -> None:
    model, x = network(name), images()
    strides = [p.stride() for p in model.parameters()]
    with torch.inference_mode():
        before = model(x)
        confpred.revert(confpred.optimize(model, x))
        assert off(model(x), before) < 1e-2  # of filters in another layout than before
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert [p.stride() for p in model.parameters()] == strides


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_training(name, autocast, ours) -> None:
    """Outputs, gradients and statistics of two steps, with a change of the weights between them."""
    dtype = torch.float32 if autocast else torch.float16
    models = [network(name, dtype).train() for _ in range(2)]
    exact = network(name, dtype).double().train()
    confpred.optimize(models[0], training=True)
    assert any(isinstance(m.__dict__.get("forward"), InstanceForward) for m in models[0].modules())
    for model in (*models, exact):
        for module in model.modules():
            if isinstance(module, DropPath):
                module.eval()  # what is random differs
    for seed in (1, 2):
        x = images(dtype, seed=seed)
        outs = []
        for model in (*models, exact):
            model.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=autocast and model is not exact):
                outs.append(model(x.double() if model is exact else x))
            outs[-1].float().square().sum().backward()
        as_good(*(out.detach() for out in outs))
        for mine, theirs, right in zip(
            *(model.parameters() for model in (*models, exact)), strict=True
        ):
            assert mine.grad.dtype is mine.dtype
            scale = max(right.grad.norm().item(), 1e-2 * right.numel() ** 0.5)
            error = [(p.grad.double() - right.grad).norm().item() for p in (mine, theirs)]
            assert error[0] <= 2 * error[1] + 5e-2 * scale
        buffers = zip(*(model.buffers() for model in models), strict=True)
        for mine, theirs in buffers:
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            for parameter in (p for model in (*models, exact) for p in model.parameters()):
                parameter.mul_(0.9)
    assert all(served_by(direction, ours) for direction in ("fprop", "dgrad", "wgrad"))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_explanation_is_what_runs(name, device: Device, tmp_path) -> None:
    predictor = Predictor.load()
    confpred.use_predictor(predictor)
    model, x = network(name), images(batch=64)
    found = confpred.explain(model, x, device=device)
    assert any(row.provider in all_families() for row in found.rows)
    for row in found.rows:
        if row.provider in all_families():
            choice = predictor.choose(row.problem, device)
            assert (row.provider, row.reason) == (choice.provider, "predicted")
    confpred.optimize(model)
    path = tmp_path / "plan.json"
    with torch.inference_mode(), confpred.record_plan(path):
        model(x)
    ran = {c.problem: c.provider for c in read_plan(path, device).choices}
    told = {r.problem: r.provider for r in found.rows if r.provider in all_families()}
    assert told.items() <= ran.items()
