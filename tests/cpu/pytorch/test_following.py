"""Patterns of what may follow an operation, each on a graph of a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from confpred.problem.conv2d import ACTIVATIONS
from confpred.pytorch.rewrite.following import (
    Chain,
    activation_after,
    follow,
    norm_after,
    sum_after,
)
from confpred.pytorch.rewrite.passes import gradients_of_silu
from confpred.pytorch.run.activations import OPERATORS

aten = torch.ops.aten


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


def test_every_activation_has_its_operators() -> None:
    assert {"none", *OPERATORS} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_activation_is_found_with_its_gradient(name: str) -> None:
    row = OPERATORS[name]

    def both(y: Tensor, other: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        out = getattr(F, name)(y)
        saved = out if row.saves_result else y
        return out, row.gradient(other, saved, *row.gradient_arguments)

    chain = begun(torch.func.functionalize(both))  # as AOTAutograd has it
    graph = chain.last.graph
    gradients_of_silu(graph)
    forward, gradient = only(graph, row.forward), only(graph, row.gradient)
    longer = activation_after(chain, gradient)
    assert (longer.activation, longer.last, longer.gradient) == (name, forward, gradient)
    # Without the gradient that reads it, too, nothing may be left out.
    reads_argument = not row.saves_result
    assert (activation_after(chain).activation == "none") is reads_argument
    assert activation_after(chain, forward) is chain


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_is_that_of_the_function(name: str) -> None:
    row, x = OPERATORS[name], (3 * image()).requires_grad_()
    out = getattr(F, name)(x)
    (expected,) = torch.autograd.grad(out.sum(), x)
    for saved in (out, x) if row.saves_result else (x,):  # operators compute the argument again
        found = row.gradient(torch.ones_like(x), saved.detach(), *row.gradient_arguments)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(row.forward(x, *row.arguments), out)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x, v: F.hardtanh(y, 0.0, 5.0),
        lambda y, x, v: F.gelu(y, approximate="tanh"),
        lambda y, x, v: F.elu(y),
        lambda y, x, v: (y, F.relu(y)),
    ],
    ids=["other bounds", "another GELU", "no row", "read twice"],
)
def test_what_is_no_activation_of_the_table(function: Callable[..., Any]) -> None:
    chain = begun(function)
    assert activation_after(chain) is chain


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
    longer = sum_after(chain)
    if place is None:
        assert longer is chain
    else:
        assert longer.sum == (longer.last, place)
        assert longer.residual.op == "placeholder"


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
    longer = norm_after(begun(function))
    assert (len(longer.nodes) == 3) is is_taken
    assert norm_after(longer) is longer  # one is folded


def test_patterns_follow_in_order_and_leave_what_is_claimed() -> None:
    chain = begun(lambda y, x, v: F.relu(norm(y, v)[0] + x))
    patterns = (norm_after, sum_after, activation_after)
    whole = follow(chain, patterns, ())
    assert [str(node.target) for node in whole.nodes[1::2]] == [
        "aten._native_batch_norm_legit_no_training.default",
        "aten.add.Tensor",
    ]
    assert whole.activation == "relu"
    assert follow(chain, patterns, claimed=whole.nodes[3:]) == norm_after(chain)
    assert follow(chain, (activation_after,), ()) is chain
