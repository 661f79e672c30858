"""Lines that lie channels last, where PyTorch computes them: dense ones are images of height 1, as
PyTorch copies lines; whatever else is copied is copied by the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_blocks import BACKWARD, CLONE, CONV, PLAIN, Around
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.pytorch import backend
from confpred.pytorch.run.convolve import Call, backward, forward

HALF = torch.bfloat16
ADD = "aten.add.Tensor"


def line(dtype: torch.dtype = HALF, channels: int = 8) -> Tensor:
    """Return lines with their channels last."""
    x = torch.randn(2, 9, channels, generator=torch.Generator().manual_seed(0))
    return x.to(dtype).mT


class Ranks(TorchDispatchMode):
    """Notes the dimensions of what PyTorch's convolutions read."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.dims.append(args[0].dim())
        return func(*args, **(kwargs or {}))


PLAIN_ONE = ((1,), (1,), (1,), 1)


@pytest.mark.parametrize(("x", "geometry", "dims"), [
    (line(), PLAIN_ONE, 4), (line(), ((2,), (4,), (2,), 1), 4),
    (line().contiguous(), PLAIN_ONE, 3), (line(torch.float32), PLAIN_ONE, 3),
    (line(), ((1,), (1,), (1,), 4), 3),
])  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
def test_dense_lines_in_half_precision_are_images(x, geometry, dims, transposed) -> None:
    *axes, groups = geometry
    shape = (8, 6 * 4 // groups, 3) if transposed else (24, 8 // groups, 3)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    call = Call(geometry, mask=(True, True, True), output_padding=(0,) if transposed else ())
    bias = torch.randn(call.biases(weight)).to(x.dtype)
    with Ranks() as seen:
        out = forward(x, weight, bias, None, call)
        grads = backward(torch.ones_like(out), x, weight, call)
    assert seen.dims == [dims, dims]
    operands = [t.float().contiguous().requires_grad_() for t in (x, weight, bias)]
    names = dict(zip(("stride", "padding", "dilation"), axes, strict=True))
    expected = (F.conv_transpose1d if transposed else F.conv1d)(*operands, groups=groups, **names)
    expected.sum().backward()
    wanted = [expected, *(t.grad for t in operands)]
    for found, reference in zip([out, *grads], wanted, strict=True):
        torch.testing.assert_close(found.float(), reference, rtol=2e-2, atol=2e-1)
    if dims == 4:
        assert out.mT.is_contiguous()
        assert all(t.mT.is_contiguous() for t in grads[:2])


def test_a_cut_line_is_an_image() -> None:
    x, weight = line(), torch.randn(8, 8, 3, generator=torch.Generator().manual_seed(1)).to(HALF)
    call = Call(((1,), (2,), (1,), 1), mask=(True, True, False), cut=2)
    with Ranks() as seen:
        out = forward(x, weight, None, None, call)
        grads = backward(torch.ones_like(out), x, weight, call)
    assert seen.dims == [4, 4]
    operands = [t.float().requires_grad_() for t in (x, weight)]
    expected = F.conv1d(*operands, padding=2)[..., :-2]
    expected.sum().backward()
    wanted = [expected, *(t.grad for t in operands)]
    for found, reference in zip([out, *grads[:2]], wanted, strict=True):
        torch.testing.assert_close(found.float(), reference, rtol=2e-2, atol=2e-1)


class Residual(nn.Module):
    """Blocks that are summed with their inputs: a depthwise layer, and a dense one."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1, groups=8) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(torch.tanh(inner(torch.tanh(x))))
        return x


def depthwise_images(problem: Any) -> bool:
    """Return whether a kernel is chosen: for depthwise lines that lie channels last alone."""
    return isinstance(problem, Problem) and problem.groups == 8


def step(captured: Any, model: nn.Module, x: Tensor, training: bool, **options: Any) -> None:
    """Compare a captured step with PyTorch's."""
    captured.wins, found = depthwise_images, []
    for call in (model, torch.compile(model, backend="confpred", options=options)):
        model.zero_grad()
        given = x.clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            out = call(given)
        if training:
            out.float().square().sum().backward()
        grads = [t.grad for t in (given, *model.parameters()) if training]
        found.append([out, *(grad.clone() for grad in grads)])
    for plain, ours in zip(*found, strict=True):
        assert ours.is_contiguous() == plain.is_contiguous()
        assert (ours - plain).float().norm() < 3e-2 * plain.float().norm()


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_network_of_lines_is_copied_in_and_out(captured, launches, training, inductor) -> None:
    """Kernels of depthwise layers read channels last. Dense layers of PyTorch's stay there, and so
    do sums with what was channels first."""
    step(captured, Residual().to(HALF), line().contiguous(), training, inductor=inductor)
    ahead = captured.of("forward" if training else "inference")
    assert PLAIN not in ahead.targets()
    assert ahead.count(CONV) == 6
    if not inductor:
        assert ahead.count(CLONE) == 2
    if training:
        assert captured.of("backward").count(BACKWARD) == 6
    assert all(p.groups == 8 for p in launches)
    assert len(launches) == (9 if training else 3)


def test_inductor_adds_the_bias_of_an_image(captured, launches) -> None:
    step(captured, Residual(1).to(HALF), line().contiguous(), True, inductor=True)
    ahead = captured.of("forward")
    depthwise, dense = ahead.calls(CONV)
    assert (depthwise.args[3] is None, dense.args[3] is None) == (False, True)
    assert ahead.count(ADD) == 2


def test_other_lines_of_pytorchs_are_copied_by_the_graph(captured, launches) -> None:
    """PyTorch's copy of a grouped line takes several times as long."""
    layers = {"a": nn.Conv1d(8, 8, 3, groups=8), "b": nn.Conv1d(8, 8, 3, groups=2)}
    model = Around(lambda m, x: m.b(torch.tanh(m.a(x))), **layers).to(HALF)
    step(captured, model, line().contiguous(), False)
    assert captured.of("inference").targets()[-2:] == [CLONE, PLAIN]


def test_inductor_follows_an_image_in_inference(captured, launches, monkeypatch) -> None:
    """It adds the bias, and the norm, the sum and the activation behind it."""
    # Inductor compiles for a GPU, which is not here.
    monkeypatch.setattr(backend.Compiler, "_inductor_device", lambda *_: get_device("h200"))
    torch.manual_seed(0)
    layers = {"a": nn.Conv1d(8, 8, 3, padding=1, groups=8), "b": nn.Conv1d(8, 8, 3, padding=1)}
    norm = nn.BatchNorm1d(8).eval()
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    nn.init.normal_(norm.running_mean)
    model = Around(lambda m, x: F.silu(m.norm(m.b(torch.tanh(m.a(x)))) + x), norm=norm, **layers)
    step(captured, model.to(HALF), line().contiguous(), False, inductor=True)
    ahead = captured.of("inference")
    assert [call.args[3] is None for call in ahead.calls(CONV)] == [False, True]
    assert PLAIN not in ahead.targets()
