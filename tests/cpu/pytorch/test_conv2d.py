"""`confpred.conv2d` where no kernel of ours can run: PyTorch's operator, whatever is asked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import confpred
from confpred.errors import InvalidInput
from confpred.problem.conv2d import ACTIVATIONS
from confpred.pytorch.operators import written

GEOMETRIES = (
    {"padding": 1, "groups": 4},
    {"stride": 2, "padding": (1, 0), "groups": 8},
    {"stride": (1, 2), "padding": 2, "dilation": (2, 1)},
)


def tensors(groups: int = 1, **_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 9, 11, dtype=torch.float64)
    return x, torch.randn(16, 8 // groups, 3, 3, dtype=torch.float64), torch.randn(16).double()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_equals_pytorch(geometry, activation) -> None:
    x, weight, bias = tensors(**geometry)
    expected = F.conv2d(x, weight, bias, **geometry)
    residual = torch.randn_like(expected)
    if activation not in (None, "none"):
        plain = getattr(F, activation)(expected)
        expected = getattr(F, activation)(expected + residual)
    else:
        plain, expected = expected, expected + residual
    ours = confpred.conv2d(x, weight, bias, activation=activation, **geometry)
    torch.testing.assert_close(ours, plain)
    ours = confpred.conv2d(x, weight, bias, activation=activation, residual=residual, **geometry)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual", "all"])
def test_gradients_equal_pytorchs(geometry, wanted) -> None:
    x, weight, bias = tensors(**geometry)
    residual = torch.randn_like(F.conv2d(x, weight, bias, **geometry))
    named = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    for name, tensor in named.items():
        tensor.requires_grad_(wanted in (name, "all"))
    needed = [t for t in named.values() if t.requires_grad]
    ours = confpred.conv2d(x, weight, bias, activation="silu", residual=residual, **geometry)
    theirs = F.silu(F.conv2d(x, weight, bias, **geometry) + residual)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, needed, grad),
        torch.autograd.grad(theirs, needed, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_gradients_are_right_to_finite_differences() -> None:
    x, weight, bias = (t.requires_grad_() for t in tensors(groups=4))
    assert torch.autograd.gradcheck(
        lambda *t: confpred.conv2d(*t, stride=2, padding=1, groups=4),
        (x[:, :, :5, :5], weight, bias),
    )


def test_a_gradient_that_was_expanded_is_taken() -> None:
    x, weight, bias = (t.requires_grad_() for t in tensors(groups=4))
    confpred.conv2d(x, weight, bias, groups=4).sum().backward()
    ours = [t.grad.clone() for t in (x, weight, bias)]
    x.grad = weight.grad = bias.grad = None
    F.conv2d(x, weight, bias, groups=4).sum().backward()
    torch.testing.assert_close(ours, [x.grad, weight.grad, bias.grad])


def test_a_fused_operator_has_no_gradient() -> None:
    """`conv2d` never asks for one: it fuses nothing where gradients are needed."""
    x, weight, _ = tensors()
    weight.requires_grad_()
    out = torch.ops.confpred.conv2d(x, weight, None, None, [1, 1], [0, 0], [1, 1], 1, "relu")
    with pytest.raises(InvalidInput, match="where gradients are asked for"):
        out.sum().backward()


def test_traces_without_a_graph_break_forward_and_backward() -> None:
    x, weight, bias = tensors(groups=4)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        out = confpred.conv2d(x, weight, bias, padding=1, groups=4, activation="relu")
        return out.square().sum()

    weight.requires_grad_()
    (expected,) = torch.autograd.grad(loss(weight), weight)
    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(traced(weight), weight)
    torch.testing.assert_close(grad, expected)


def test_passes_pytorchs_checks_of_custom_operators() -> None:
    x, weight, bias = tensors(groups=4)
    geometry = ([1, 1], [1, 1], [1, 1], 4)
    last = torch.channels_last
    x, weight = x.to(memory_format=last), weight.to(memory_format=last)
    out = F.conv2d(x, weight, bias, padding=1, groups=4)
    torch.library.opcheck(torch.ops.confpred.conv2d, (x, weight, bias, out, *geometry, "relu"))
    pairs, sizes = ((1, 1), (1, 1), (1, 1), 4), tuple(weight.shape)
    call = written(sizes, pairs, "relu")
    torch.library.opcheck(torch.ops.confpred.conv2d_run, (x, weight, bias, out, call))
    for mask in ((True, True, True), (True, False, False), (False, True, False)):
        call = written(sizes, pairs, mask)
        torch.library.opcheck(torch.ops.confpred.conv2d_backward, (out, x, weight, call))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"activation": "tanh"}, "activation"),
        ({"activation": 3}, "activation"),
        ({"x": torch.zeros(2, 8, 9)}, "x"),
        ({"weight": torch.zeros(16)}, "weight"),
        ({"bias": torch.zeros(1, 16)}, "bias"),
        ({"residual": torch.zeros(3)}, "residual"),
        ({"stride": (1, 1, 1)}, "stride"),
        ({"padding": (1,)}, "padding"),
    ],
)
def test_wrong_arguments_are_named(arguments, field) -> None:
    x, weight, bias = tensors()
    with pytest.raises(InvalidInput) as caught:
        confpred.conv2d(**{"x": x, "weight": weight, "bias": bias, **arguments})
    assert caught.value.field == field


def test_what_pytorch_refuses_it_refuses_in_its_own_words() -> None:
    x, weight, _ = tensors()
    with pytest.raises(RuntimeError, match="groups=3"):
        confpred.conv2d(x, weight, groups=3)
    with pytest.raises(RuntimeError):
        confpred.conv2d(x, weight, residual=x)
