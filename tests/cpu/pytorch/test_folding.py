"""The operators of rewritten graphs on the CPU: against PyTorch, and by PyTorch's own checks."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.families.protocol import Candidate
from confpred.launch.assignment import Assignment
from confpred.problem.conv2d import Problem
from confpred.problem.limits import Limits
from confpred.pytorch.run.choosing import Constraints
from confpred.pytorch.run.convolve import Call
from confpred.pytorch.run.fold import fold

LAST = torch.channels_last
GEOMETRY = ((2, 1), (1, 0), (1, 2), 2)


def parts(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(2, 6, 9, 8, generator=g).to(dtype).contiguous(memory_format=LAST),
        "filter": torch.randn(4, 3, 3, 2, generator=g).to(dtype).contiguous(memory_format=LAST),
        "gamma": torch.randn(4, generator=g), "beta": torch.randn(4, generator=g),
        "mean": torch.randn(4, generator=g), "variance": torch.rand(4, generator=g) + 0.1,
        "bias": torch.randn(4, generator=g),
    }  # fmt: skip


def conv(p: dict[str, Tensor], bias: Tensor | None = None) -> Tensor:
    stride, padding, dilation, groups = GEOMETRY
    return F.conv2d(p["x"], p["filter"], bias, stride, padding, dilation, groups)


@pytest.mark.parametrize("without", [(), ("gamma",), ("beta",), ("gamma", "beta"), ("bias",)])
def test_a_folded_convolution_is_convolution_and_norm(without) -> None:
    p = parts()
    given = {k: None if k in without else v for k, v in p.items()}
    gamma, beta, bias = given["gamma"], given["beta"], given["bias"]
    weight, shift = fold(
        [gamma], [beta], [p["mean"]], [p["variance"]], [bias], [p["filter"]], [1e-3],
        ["float32"],
    )  # fmt: skip
    expected = F.batch_norm(conv(p, bias), p["mean"], p["variance"], gamma, beta, eps=1e-3)
    stride, padding, dilation, groups = GEOMETRY
    found = F.conv2d(p["x"], weight, shift, stride, padding, dilation, groups)
    torch.testing.assert_close(found, expected)
    assert weight.is_contiguous(memory_format=LAST)


def test_a_norm_without_a_filter_is_scale_and_shift_in_float32() -> None:
    p = parts(dtype=torch.float16)
    scale, shift = fold(
        [p["gamma"]], [p["beta"]], [p["mean"]], [p["variance"]], [None], [None], [1e-5],
        ["float16"],
    )  # fmt: skip
    assert scale.dtype is shift.dtype is torch.float32
    x = torch.randn(3, 4, 2, 2)
    expected = F.batch_norm(x, p["mean"], p["variance"], p["gamma"], p["beta"])
    torch.testing.assert_close(x * scale[:, None, None] + shift[:, None, None], expected)


def test_many_norms_are_those_of_each() -> None:
    layers = [parts(seed) for seed in range(80)]  # more than one launch takes
    names = ("gamma", "beta", "mean", "variance", "bias", "filter")
    columns = [[p[name] for p in layers] for name in names]
    columns[5] = [None if i % 3 == 0 else f for i, f in enumerate(columns[5])]
    together = fold(*columns, [1e-5] * 80, ["float32"] * 80)
    for i in range(80):
        alone = fold(*([c[i]] for c in columns), [1e-5], ["float32"])
        assert all(map(torch.equal, together[2 * i : 2 * i + 2], alone))


def test_a_fold_is_exact_to_rounding() -> None:
    """It is computed in float32 and rounded once, whatever the dtype of the weights."""
    p = parts(dtype=torch.bfloat16)
    weight, _ = fold(
        [p["gamma"]], [p["beta"]], [p["mean"]], [p["variance"]], [None], [p["filter"]], [1e-5],
        ["bfloat16"],
    )  # fmt: skip
    scale = p["gamma"].double() / (p["variance"].double() + 1e-5).sqrt()
    exact = p["filter"].double() * scale[:, None, None, None]
    assert ((weight.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-9).all()


class Normed(torch.nn.Module):
    """Convolution and norm, whose input is as large as its statistics say."""

    def __init__(self, variance: float, **changed: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False).half()
        self.norm = torch.nn.BatchNorm2d(16)
        self.to(memory_format=LAST).eval().requires_grad_(False)
        self.x = (torch.randn(4, 16, 6, 5) * variance**0.5 / 4).half().to(memory_format=LAST)
        self.norm.running_var.fill_(variance)
        for name, value in changed.items():  # of the first channel
            (self.conv.weight if name == "filter" else getattr(self.norm, name))[0] = value

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


@pytest.mark.parametrize(("network", "is_folded", "inductor"), [
    (Normed(1.0), True, True), (Normed(1e4), True, False), (Normed(1e6), False, True),
    (Normed(1e8), False, False), (Normed(1.0, running_var=1e8), False, False),
    (Normed(1e-12, running_var=0.0, weight=1e7), False, False),  # beyond 65504
    (Normed(1e4, weight=0.0), True, False), (Normed(1e4, weight=1e-9), True, False),
    (Normed(1e4, filter=0.0), True, False),
    (Normed(1e4, running_var=0.0, filter=1e-7), True, False),
])  # fmt: skip
def test_what_float16_cannot_hold_is_not_folded(captured, network, is_folded, inductor) -> None:
    """Filters of small elements are rounded more coarsely; those of a channel that contributes
    next to nothing may be."""
    x, options = network.x, {"inductor": inductor}
    exact = copy.deepcopy(network).double()(x.double())
    with torch.no_grad():
        eager = network(x)
        result = torch.compile(network, backend="confpred", options=options)(x)
    (call,) = captured.of("inference").calls("confpred.conv2d.default")
    assert (call.args[2] is None) is is_folded
    far, eagerly_far = ((y.double() - exact).norm() for y in (result, eager))
    assert far <= 1.2 * eagerly_far


def test_calls_are_written_and_read() -> None:
    constraints = Constraints(Limits(workspace_bytes=5, tf32=False), 1.5)
    problem = Problem(1, 8, 3, 4, 16, 1, 1, stride=(2, 1), padding=(1, 0), groups=2)
    hints = (Assignment(problem, Candidate("cudnn", 3)), Assignment(replace(problem, n=2)))
    call = Call(GEOMETRY, "relu", (True, False, True), hints, constraints)
    assert Call.read(call.text()) == call
    assert pickle.loads(pickle.dumps(hints[0])) == hints[0]  # noqa: S301
    assert Call.read(Call(GEOMETRY).text()) == Call(GEOMETRY)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_conv2d_passes_pytorchs_checks(scaled, residual) -> None:
    p = parts()
    scale = p["gamma"] if scaled else None
    added = torch.randn_like(conv(p)) if residual else None
    call = Call(GEOMETRY, "silu").text()
    given = (p["x"], p["filter"], scale, p["bias"], added, call)
    torch.library.opcheck(torch.ops.confpred.conv2d, given)
    found = torch.ops.confpred.conv2d(*given)
    if scale is None:
        expected = conv(p, p["bias"])
    else:
        expected = conv(p) * scale[:, None, None] + p["bias"][:, None, None]
    torch.testing.assert_close(found, F.silu(expected if added is None else expected + added))


@pytest.mark.parametrize("mask", [
    (True, True, True), (True, False, False), (False, True, False), (False, True, True),
    (True, False, True), (False, False, True),
])  # fmt: skip
def test_conv2d_backward_passes_pytorchs_checks(mask) -> None:
    p = parts()
    grad = torch.randn_like(conv(p))
    given = (grad, p["x"], p["filter"], Call(GEOMETRY, mask=mask).text())
    torch.library.opcheck(torch.ops.confpred.conv2d_backward, given)
    stride, padding, dilation, groups = GEOMETRY
    expected = torch.ops.aten.convolution_backward(
        grad, p["x"], p["filter"], [4], stride, padding, dilation, False, (0, 0), groups, mask
    )
    found = torch.ops.confpred.conv2d_backward(*given)
    for wanted, mine, other in zip(mask, found, expected, strict=True):
        if wanted:
            torch.testing.assert_close(mine, other)
        else:
            assert mine.numel() == 0


def test_scale_shift_and_fold_pass_pytorchs_checks() -> None:
    p = parts()
    given = (p["x"][:, :4], p["gamma"], p["beta"], None, "relu")
    torch.library.opcheck(torch.ops.confpred.scale_shift, given)
    lists = ([p["gamma"], None], [p["beta"], None], [p["mean"]] * 2, [p["variance"]] * 2)
    given = (*lists, [p["bias"], None], [p["filter"], None], [1e-5, 1e-3], ["float16", "float32"])
    torch.library.opcheck(torch.ops.confpred.fold, given)
