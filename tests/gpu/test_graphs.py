"""CUDA graphs of captured passes: what cannot be recorded leaves nothing behind, pools of memory,
and allocators that know no pools."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hazards.base import Net, Run, assert_same
from layers_on_gpu import ours_first
from shared import python_says
from torch import Tensor, nn

import confpred
from confpred.pytorch import ways
from confpred.pytorch.run.graphs import memory_of_inference


@pytest.fixture(autouse=True)
def ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger="confpred")
    with ours_first():
        yield
    torch._dynamo.reset()


@torch.library.custom_op("hazards::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    """Wait for the device, which no recording allows."""
    torch.cuda.synchronize()
    return x * 2


@waits.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


waits.register_autograd(lambda ctx, grad: grad * 2)


class Waits(nn.Module):
    def __init__(self, operator: Any = waits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.grouped, self.drop = nn.Conv2d(64, 64, 3, groups=8), nn.Dropout(0.5)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.operator(self.grouped(x)))
        return out


def wide(seed: int = 0) -> Tensor:
    numbers = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(2, 64, 14, 14, device="cuda", generator=numbers)
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("training", [False, True])
def test_a_recording_that_fails_leaves_nothing_behind(training: bool, caplog) -> None:
    """Neither in PyTorch's random numbers nor in its allocator."""
    model = Waits().cuda().train()
    expected = Waits().cuda().eval()(wide())
    confpred.optimize(model)
    reserved = []
    for _ in range(6):
        with torch.set_grad_enabled(training):
            out = model(wide())
        if training:
            out.sum().backward()
        kept = out != 0
        assert kept.float().mean().sub(0.5).abs() < 0.05
        assert_same(out.detach()[kept], 2 * expected.detach()[kept], 1e-2)
        assert torch.rand(3, device="cuda").unique().numel() == 3
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] == reserved[-1]
    said = [r.getMessage() for r in caplog.records if "cannot be recorded" in r.getMessage()]
    assert len(said) == len(set(said)) > 0
    other = confpred.optimize(Waits(nn.Identity()).cuda().train())
    with torch.no_grad():
        outs = [other(wide()) for _ in range(4)]
    assert all(not torch.equal(outs[-1], out) for out in outs[:-1])


def test_memory_is_taken_again_when_models_are_gone() -> None:
    """Graphs of later models are recorded, in another pool."""
    reserved = []
    for _ in range(6):
        model, trained = (Run("cuda", True).network(train=train) for train in (False, True))
        run = Run("cuda", True)
        run.infer(run.optimize(model))
        run.train(run.optimize(trained))
        del model, trained
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert not memory_of_inference(0).graphs
    assert reserved[-1] <= reserved[1]


def test_parameters_that_move_are_followed() -> None:
    """Each step puts other memory behind them; after a few they are copied in."""
    models = [Run("cuda", False).network(train=True) for _ in range(2)]
    confpred.optimize(models[0])
    for seed in range(14):
        found = []
        for model in models:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.99
            run = Run("cuda", False)
            found.append(run.step(model, run.floats(seed)))
        assert_same(*found, 2e-2)


@torch.no_grad()
@pytest.mark.parametrize("inductor", [None, False])
def test_strides_of_inputs_and_results_stay(inductor: bool | None) -> None:
    """Inputs that are slices, memory that is read by strides of a program's own, and results that
    repeat their memory are the same in each call, replayed or not."""

    class Strided(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            own = x.as_strided((2, 2), (2, 1)) + 1.0
            first = y.sum((1, 2, 3))
            return own, first[:1].expand(2), (y[:, 1:] * 2.0).transpose(2, 3)

    eager, model = Strided(), confpred.optimize(Strided(), inductor=inductor)
    for seed in range(4):
        x, y = wide(seed)[0, 0].flatten()[:16].view(2, 8)[:, ::2], wide(seed)[:, 3:40:2]
        for actual, expected in zip(model(x, y), eager(x, y), strict=True):
            assert actual.stride() == expected.stride()
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("training", [False, True])
def test_a_network_that_was_timed_is_replayed(training: bool) -> None:
    """By the faster of its two programs; the steps that were timed are not seen."""
    found = []
    for optimized in (False, True):
        run = Run("cuda", optimized)
        model = run.optimize(run.network(train=training), verify="network")
        found.append(run.train(model, steps=3) if training else run.infer(model, 3))
    assert_same(found[1], found[0], 2e-2)
    told = confpred.status(model)
    assert "are kept: " in told.verified[0]
    assert all("replayed" in text for text in told.replay)


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, confpred
from hazards.base import Run, assert_same
from layers_on_gpu import ours_first
from shared import python_says
with ours_first() as ours:
    both = []
    for optimized in (False, True):
        run = Run("cuda", optimized)
        trained = run.optimize(run.network(train=True))
        both.append([run.train(trained, steps=4), run.infer(run.optimize(run.network()), 4)])
    assert any(ours.chosen)
assert_same(both[1], both[0], 2e-2)
print("the same")
"""


@pytest.mark.parametrize("setting", [
    {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    {"CUDA_LAUNCH_BLOCKING": "1"},
], ids=str)  # fmt: skip
def test_a_process_with_another_allocator(setting: dict[str, str]) -> None:
    paths = [os.path.abspath(path) for path in (".", "tests", "tests/gpu")]
    assert python_says("-c", PROGRAM, *paths, **setting).strip().endswith("the same")


def test_a_pass_that_waits_for_a_backward_pass_says_so_once(caplog) -> None:
    model = confpred.optimize(Run("cuda", True).network(Net, train=True))
    run, outs = Run("cuda", True), []
    for seed in range(5):
        outs.append(model(run.floats(seed)))
    said = [r.getMessage() for r in caplog.records if "wait for their backward" in r.getMessage()]
    assert said == [
        "the forward pass runs without a CUDA graph while tensors that an earlier call saved wait"
        " for their backward pass"
    ]


def test_a_ways_memory_does_not_depend_on_the_ways_before_it() -> None:
    """Workspaces of products, which a recording gives back, are in that of each way.

    Each tensor is below 1 MiB: larger ones share segments of 20 MiB, in which an earlier way leaves
    room for a later one or none.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
    subject = ways.Subject(model, (torch.randn(256, 256, device="cuda"),))
    every = {name: ways.WAYS[name] for name in ("eager", "again", "optimize")}
    alone = ways.measure(
        subject, {"eager": every["eager"], "optimize": every["optimize"]}, rounds=1
    )
    after = ways.measure(subject, every | {"once more": every["optimize"]}, rounds=1)
    peaks = [after[name]["peak_mb"] for name in ("eager", "again")]
    assert peaks[0] == pytest.approx(peaks[1], abs=4)
    peaks = [
        alone["optimize"]["peak_mb"],
        *(after[n]["peak_mb"] for n in ("optimize", "once more")),
    ]
    assert peaks == pytest.approx([peaks[0]] * 3, abs=4)
    assert min(peaks) > 8  # a workspace
