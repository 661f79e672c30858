"""Networks whose images have their channels first, in half precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import confpred
from confpred.pytorch import layouts


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, captured: object) -> list[bool]:
    """Whether each graph was changed."""
    results: list[bool] = []
    original = layouts.to_channels_last

    def watched(*args: object) -> bool:
        results.append(original(*args))
        return results[-1]

    monkeypatch.setattr("confpred.pytorch.backend.to_channels_last", watched)
    return results


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16, padding=1), nn.BatchNorm2d(16), nn.ReLU6(),
    )  # fmt: skip
    return nn.Sequential(*layers).to(dtype)


def images(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1)).to(dtype)


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().norm() / b.float().norm())


@pytest.mark.parametrize("head", [False, True], ids=["image out", "flattened"])
def test_images_become_channels_last_and_results_keep_their_layout(
    found: list[bool], head: bool
) -> None:
    model = network()
    if head:
        model.extend([nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 36, 5).bfloat16()])
    model, x = model.eval(), images()
    with torch.no_grad():
        expected = model(x)
        confpred.optimize(model)
        out = model(x)
    assert found == [True]
    assert off(out, expected) < 0.02
    assert out.stride() == expected.stride()


def test_gradients_are_those_of_the_layout_before(found: list[bool]) -> None:
    model = network().train()
    twin = copy.deepcopy(model)
    confpred.optimize(model)
    ours, theirs = images().requires_grad_(), images().requires_grad_()
    model(ours).float().square().sum().backward()
    twin(theirs).float().square().sum().backward()
    assert found == [True]
    assert ours.grad is not None
    assert theirs.grad is not None
    assert off(ours.grad, theirs.grad) < 0.02
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        scale = max(1.0, float(other.grad.float().norm()))
        assert float((mine.grad - other.grad).float().norm()) / scale < 0.02


@pytest.mark.parametrize("kind", ["float32", "channels last", "bound"])
def test_other_graphs_keep_their_layout(found: list[bool], kind: str) -> None:
    class Bound(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_strided((2, 2, 2, 2), (8, 4, 2, 1))

    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    model, x = network(dtype).eval(), images(dtype)
    if kind == "channels last":
        x = x.to(memory_format=torch.channels_last)
    if kind == "bound":
        model.append(Bound())
    with torch.no_grad():
        expected = model(x)
        confpred.optimize(model)
        out = model(x)
    assert found == [False]
    assert off(out, expected) < 0.02
