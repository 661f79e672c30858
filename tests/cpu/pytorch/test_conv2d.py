"""`confpred.conv2d` where no kernel of ours can run: PyTorch's operator, whatever is asked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from activations import activate

import confpred
from confpred.errors import InvalidInput
from confpred.problem.conv2d import ACTIVATIONS

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
    given = tensors(**geometry)
    plain = F.conv2d(*given, **geometry)
    residual = torch.randn_like(plain)
    found = confpred.conv2d(*given, activation=activation, **geometry)
    torch.testing.assert_close(found, activate(activation, plain))
    found = confpred.conv2d(*given, activation=activation, residual=residual, **geometry)
    torch.testing.assert_close(found, activate(activation, plain + residual))


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
    torch.testing.assert_close(*(torch.autograd.grad(y, needed, grad) for y in (ours, theirs)))


def test_a_gradient_that_was_expanded_is_taken() -> None:
    x, weight, bias = (t.requires_grad_() for t in tensors(groups=4))
    confpred.conv2d(x, weight, bias, groups=4).sum().backward()
    ours = [t.grad.clone() for t in (x, weight, bias)]
    x.grad = weight.grad = bias.grad = None
    F.conv2d(x, weight, bias, groups=4).sum().backward()
    torch.testing.assert_close(ours, [x.grad, weight.grad, bias.grad])


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


def test_gradients_of_gradients_and_batches_of_gradients() -> None:
    x, weight, bias = tensors(groups=4)
    given = [t.requires_grad_() for t in (x[:, :, :5, :5].clone(), weight, bias)]

    def ours(*t: torch.Tensor) -> torch.Tensor:
        return confpred.conv2d(*t, stride=2, padding=1, groups=4)

    assert torch.autograd.gradgradcheck(ours, given, fast_mode=True)
    assert torch.autograd.gradcheck(ours, given, fast_mode=True, check_batched_grad=True)


def test_transforms_of_torch_func() -> None:
    x, weight, bias = tensors(groups=4)

    def loss(function, weight):
        return function(x, weight, bias, groups=4).square().sum()

    many, tangent = torch.stack([weight, 2 * weight]), torch.randn_like(weight)
    for transformed in (
        lambda f: torch.func.grad(loss, argnums=1)(f, weight),
        lambda f: torch.func.vmap(lambda w: f(x, w, bias, groups=4))(many),
        lambda f: torch.func.jvp(lambda w: f(x, w, bias, groups=4), (weight,), (tangent,)),
    ):
        torch.testing.assert_close(transformed(confpred.conv2d), transformed(F.conv2d))


def test_small_tensors_equal_pytorch() -> None:
    """No image, one row, a filter larger than the image; `tests/hazards` has views of all kinds."""
    wide, weight = torch.randn(3, 8, 9, 11), torch.randn(8, 2, 3, 3, requires_grad=True)
    for x in (wide[:0], wide[:, :, :1]):
        found = confpred.conv2d(x, weight, padding=1, groups=4, activation="relu")
        torch.testing.assert_close(found, F.relu(F.conv2d(x, weight, padding=1, groups=4)))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        confpred.conv2d(wide[:, :, :2, :2], weight, groups=4)


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
    with pytest.raises(RuntimeError, match="expected scalar type"):
        confpred.conv2d(x, weight.float())
