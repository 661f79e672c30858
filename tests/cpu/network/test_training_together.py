"""Weights that are cast together, on the CPU: autocast's state is the CPU's here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import confpred
from confpred.network import training

BF16 = torch.bfloat16


class Network(nn.Module):
    """Two halves, of which the second may leave autocast."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Linear(8 * 36, 5)
        self.unused = nn.Linear(3, 3)
        self.leaves = leaves

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(1)
        if self.leaves:
            with torch.autocast("cpu", enabled=False):
                return self.second(x.float())
        return self.second(x)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast of the CPU in place of CUDA's, and CPU parameters in place of CUDA's."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: dtype("cpu"))
    monkeypatch.setattr(training, "current_device", lambda: 0)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    with torch.autocast("cpu", BF16):
        out = model(x)
    out.float().square().sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("leaves", [False, True])
def test_gradients_are_those_of_autocast(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Network(leaves).train(), torch.randn(4, 3, 8, 8)
    expected = copy.deepcopy(model)
    casts: list[int] = []
    real = training._CastTogether.apply
    monkeypatch.setattr(
        training._CastTogether, "apply", lambda *given: casts.append(len(given) - 1) or real(*given)
    )
    confpred.optimize(model, training=True)
    for _ in range(2):
        out, grads = gradients(model, x)
        right, wanted = gradients(expected, x)
        assert out.dtype is right.dtype
        torch.testing.assert_close(out, right)
        for name, grad in wanted.items():
            if grad is None:
                assert grads[name] is None
            else:
                assert grads[name].dtype is torch.float32
                torch.testing.assert_close(grads[name], grad, rtol=2e-2, atol=1e-2)
        with torch.no_grad():  # the copies of the next step are of these
            for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
                mine.mul_(0.5)
                other.mul_(0.5)
    assert casts == [6, 6]
    assert model.first[1].num_batches_tracked == expected.first[1].num_batches_tracked == 2
    assert not model.forward._running.copies


def test_without_autocast_nothing_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = confpred.optimize(Network(False).train(), training=True), torch.randn(4, 3, 8, 8)
    monkeypatch.setattr(training._CastTogether, "apply", None)
    model(x).sum().backward()
    assert model.first[0].weight.grad.dtype is torch.float32


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model = confpred.optimize(Network(False).train(), training=True)
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError):
        model(torch.randn(4, 3, 9, 9))
    running = model.forward._running
    assert not running.active
    assert not running.copies
    assert not running.counts
