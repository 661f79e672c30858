"""`confpred.conv2d` where no kernel of ours can run: PyTorch's operator, whatever is asked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
    given = [t.requires_grad_() for t in tensors(groups=4)]

    def ours(*t: torch.Tensor) -> torch.Tensor:
        return confpred.conv2d(*t, stride=2, padding=1, groups=4)

    assert torch.autograd.gradgradcheck(ours, given, fast_mode=True)
    assert torch.autograd.gradcheck(ours, given, fast_mode=True, check_batched_grad=True)


def test_negative_and_conjugate_views_keep_their_signs() -> None:
    x, weight, bias = tensors(groups=4)
    views = [torch.complex(t, t).conj().imag for t in (x, weight, bias)]
    assert all(view.is_neg() for view in views)
    residual = torch.complex(*[F.conv2d(x, weight, bias, groups=4)] * 2).conj().imag
    for wanted in (False, True):
        for t in views:
            t.requires_grad_(wanted)
        found = confpred.conv2d(*views, groups=4, activation="silu", residual=residual)
        expected = F.silu(F.conv2d(*views, groups=4) + residual)
        torch.testing.assert_close(found, expected)
    mine, other = (torch.autograd.grad(t.sum(), views) for t in (found, expected))
    torch.testing.assert_close(mine, other)


def test_transforms_of_torch_func() -> None:
    x, weight, bias = tensors(groups=4)

    def loss(function, weight):
        return function(x, weight, bias, groups=4).square().sum()

    grads = [torch.func.grad(loss, argnums=1)(f, weight) for f in (confpred.conv2d, F.conv2d)]
    torch.testing.assert_close(*grads)
    many = torch.stack([weight, 2 * weight])
    found = [torch.func.vmap(lambda w, f=f: f(x, w, bias, groups=4))(many)
             for f in (confpred.conv2d, F.conv2d)]  # fmt: skip
    torch.testing.assert_close(*found)
    tangent = torch.randn_like(weight)
    found = [torch.func.jvp(lambda w, f=f: f(x, w, bias, groups=4), (weight,), (tangent,))
             for f in (confpred.conv2d, F.conv2d)]  # fmt: skip
    torch.testing.assert_close(*found)


def test_odd_tensors_equal_pytorch() -> None:
    """Slices, expanded tensors, gaps, an empty batch, one row, a window larger than the image."""
    wide = torch.randn(3, 20, 9, 11)
    odd = {
        "a gap between channels": wide[:, 1:17:2], "an offset": wide[1:, 3:11],
        "expanded": wide[:1, :8].expand(2, 8, 9, 11), "empty": wide[:0, :8],
        "one row": wide[:, :8, :1], "transposed": wide[:, :8].mT,
        "channels last, a part": wide.contiguous(memory_format=torch.channels_last)[:, 5:13],
    }  # fmt: skip
    weight = torch.randn(8, 2, 3, 3)
    for name, x in odd.items():
        for wanted in (False, True):
            weight.requires_grad_(wanted)
            found = confpred.conv2d(x, weight, padding=1, groups=4, activation="relu")
            expected = F.relu(F.conv2d(x, weight, padding=1, groups=4))
            torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}")
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        confpred.conv2d(wide[:, :8, :2, :2], weight, groups=4)


def test_mixed_dtypes_are_refused_as_pytorch_does() -> None:
    x, weight, _ = tensors()
    with pytest.raises(RuntimeError) as theirs:
        F.conv2d(x, weight.float())
    with pytest.raises(RuntimeError) as ours:
        confpred.conv2d(x, weight.float())
    assert str(ours.value) == str(theirs.value)


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
