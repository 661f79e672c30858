"""Patterns of what may follow an operation, each on a graph of a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import activate
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from confpred.problem.activation import GRADIENTS, Gradient
from confpred.pytorch.rewrite.following import (
    Chain,
    follow,
    take_activation,
    take_norm,
    take_sum,
)
from confpred.pytorch.rewrite.passes import join_silu_gradients

aten = torch.ops.aten
ACTIVATIONS = {name: row for name, row in GRADIENTS.items() if row is not None}


def image() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


def begun(function: Callable[..., Any]) -> Chain:
    """Return a chain of the sine, which `function` gets with an image and a vector."""

    def run(x: Tensor, other: Tensor, vector: Tensor) -> Any:
        return function(x.sin(), other, vector)

    graph = make_fx(run, tracing_mode="fake")(image(), image(), torch.ones(3)).graph
    return Chain((only(graph, aten.sin.default),))


def only(graph: fx.Graph, target: Any) -> fx.Node:
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def norm(y: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    given = (vector, vector, vector, vector, 0.1, 1e-5)
    results: tuple[Tensor, Tensor, Tensor] = aten._native_batch_norm_legit_no_training(y, *given)
    return results


@pytest.mark.parametrize(("name", "in_place"), [
    *((name, False) for name in ACTIVATIONS),
    *((name, True) for name, row in ACTIVATIONS.items() if row.in_place),
])  # fmt: skip
def test_an_activation_is_found_with_its_gradient(name: str, in_place: bool) -> None:
    row = ACTIVATIONS[name]
    operator = getattr(aten, row.operator).default
    saves_output, numbers = row.saves_output, row.arguments
    if in_place:
        saves_output, numbers = True, row.in_place or ()

    def both(y: Tensor, other: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        out = activate(name, y)
        return out, operator(other, out if saves_output else y, *numbers)

    chain = begun(torch.func.functionalize(both))  # as AOTAutograd has it
    graph = chain.last.graph
    join_silu_gradients(graph)
    forward = only(graph, getattr(aten, row.forward or name).default)
    gradient = only(graph, operator)
    longer = take_activation(chain, gradient)
    assert (longer.activation, longer.last, longer.gradient) == (name, forward, gradient)
    # Without the gradient that reads it, too, nothing may be left out.
    assert (take_activation(chain).activation == "none") is not saves_output
    assert take_activation(chain, forward) is chain


@pytest.mark.parametrize(("name", "row"), ACTIVATIONS.items())
def test_a_gradient_is_that_of_the_function(name: str, row: Gradient) -> None:
    operator, x = getattr(aten, row.operator), (3 * image()).requires_grad_()
    out = activate(name, x)
    assert row.saves_output == hasattr(out.grad_fn, "_saved_result")
    (expected,) = torch.autograd.grad(out.sum(), x)
    for saved in (out, x) if row.saves_output else (x,):  # operators compute the argument again
        found = operator(torch.ones_like(x), saved.detach(), *row.arguments)
        torch.testing.assert_close(found, expected)
    forward = getattr(aten, row.forward or name)
    torch.testing.assert_close(forward(x, *row.forward_arguments), out)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x, v: F.hardtanh(y, 0.0, 5.0),
        lambda y, x, v: F.gelu(y, approximate="tanh"),
        lambda y, x, v: F.leaky_relu(y, 0.3),
        lambda y, x, v: F.elu(y),
        lambda y, x, v: (y, F.relu(y)),
    ],
    ids=["other bounds", "another GELU", "another slope", "no row", "read twice"],
)
def test_what_is_no_activation_of_the_table(function: Callable[..., Any]) -> None:
    chain = begun(function)
    assert take_activation(chain) is chain


@pytest.mark.parametrize(
    ("saved", "numbers"), [(0, (0.01, True)), (1, (0.01, False)), (1, (0.1, True))]
)
def test_a_gradient_of_what_was_not_saved(saved: int, numbers: tuple[float, bool]) -> None:
    """An input that is said to be the result, the other way round, and another slope."""

    def both(y: Tensor, other: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        out = F.leaky_relu(y)
        return out, aten.leaky_relu_backward(other, (y, out)[saved], *numbers)

    chain = begun(both)
    gradient = only(chain.last.graph, aten.leaky_relu_backward.default)
    assert take_activation(chain, gradient) is chain


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda y, x, v: y + x, 1),
        (lambda y, x, v: x + y, 0),
        (lambda y, x, v: aten.alias(y) + x, 1),
        (lambda y, x, v: y.clone() + x, 1),
        (lambda y, x, v: y + y, None),
        (lambda y, x, v: y + aten.alias(y), None),
        (lambda y, x, v: torch.add(y, x, alpha=2), None),
        (lambda y, x, v: y + v.view(1, 3, 1, 1), None),
        (lambda y, x, v: y + 1.5, None),
        (lambda y, x, v: y + x.double(), None),
        (lambda y, x, v: x.contiguous() + y, None),  # the sum has another layout
        (lambda y, x, v: (y, y + x), None),
        (lambda y, x, v: y * x, None),
    ],
)
def test_a_sum(function: Callable[..., Any], place: int | None) -> None:
    chain = begun(function)
    longer = take_sum(chain)
    if place is None:
        assert longer is chain
    else:
        assert longer.sum == (longer.last, place)
        assert longer.residual.op == "placeholder"


def test_a_sum_in_float32_with_a_residual_in_half_precision() -> None:
    """As an operator computes it that reads half precision."""
    chain = begun(lambda y, x, v: x.half() + y)
    assert take_sum(chain) is chain
    longer = take_sum(chain, torch.float16)
    assert longer.sum == (longer.last, 0)
    assert take_sum(chain, torch.bfloat16) is chain


@pytest.mark.parametrize(
    ("function", "is_taken"),
    [
        (lambda y, x, v: norm(y, v)[0], True),
        (lambda y, x, v: norm(x, y.mean((0, 2, 3)))[0], False),
        (lambda y, x, v: norm(y, v)[:2], False),
        (lambda y, x, v: (norm(y, v)[0], y), False),
    ],
    ids=["alone", "of another", "its statistics", "read twice"],
)
def test_a_norm(function: Callable[..., Any], is_taken: bool) -> None:
    longer = take_norm(begun(function))
    assert (len(longer.nodes) == 3) is is_taken
    assert take_norm(longer) is longer  # one is folded


def test_patterns_follow_in_order_and_leave_what_is_claimed() -> None:
    chain = begun(lambda y, x, v: F.relu(norm(y, v)[0] + x))
    patterns = (take_norm, take_sum, take_activation)
    whole = follow(chain, patterns, ())
    assert [str(node.target) for node in whole.nodes[1::2]] == [
        "aten._native_batch_norm_legit_no_training.default",
        "aten.add.Tensor",
    ]
    assert whole.activation == "relu"
    assert follow(chain, patterns, claimed=whole.nodes[3:]) == take_norm(chain)
    assert follow(chain, (take_activation,), ()) is chain
