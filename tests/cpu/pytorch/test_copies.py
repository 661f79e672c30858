"""Copies in captured graphs: which ones are dropped, and that nobody can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from network_blocks import CLONE, Around
from torch import Tensor, nn

from confpred.pytorch.backend import confpred as backend

ROWS = torch.contiguous_format


def counted(model: Around, x: Tensor) -> object:
    before = model.count.clone()
    model.count.add_(1)
    return x * before, before


#: A forward, and how many copies of it stay.
FORWARDS: dict[str, tuple[Callable[..., object], int]] = {
    "dropout": (lambda model, x: model.dropout(model.linear(x)).relu(), 0),
    "a result": (lambda model, x: x.relu().clone(), 0),
    "an input": (lambda model, x: x.clone(), 1),
    "a view of an input": (lambda model, x: x.view(-1)[2:].clone(), 1),
    "a view of a copy": (lambda model, x: x.clone().view(-1), 1),
    "two results": (lambda model, x: (x.relu().clone(), x.sigmoid()), 0),
    "a result twice": (lambda model, x: (y := x.relu(), y.clone()), 1),
    "two copies of one": (lambda model, x: (y := x.relu(), (y.clone(), y.clone()))[1], 1),
    "a copy of a copy": (lambda model, x: (y := x.relu(), y.clone().clone())[1], 0),
    "a part and a copy": (lambda model, x: (y := x.relu(), (y[0], y.clone()))[1], 1),
    "pieces": (lambda model, x: (p := x.relu().split(1), (p[0], p[0].clone()))[1], 1),
    "other strides": (lambda model, x: x.t().relu().clone(memory_format=ROWS), 1),
    "before a write": (counted, 1),
    "filled with an input": (lambda model, x: torch.empty_like(x).copy_(x).view(-1), 0),
    "filled with a result": (
        lambda model, x: (y := x.relu(), torch.empty_like(y).copy_(y).view(-1)), 0
    ),
    "there and back": (lambda model, x: x.relu().view(-1).view(3, 4), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_only_copies_that_can_be_told_from_their_source_stay(captured, name: str) -> None:
    function, stay = FORWARDS[name]
    layers = {"dropout": nn.Dropout(0.5), "linear": nn.Linear(4, 4)}
    model = Around(function, **layers, count=nn.Buffer(torch.zeros(4))).eval()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            found, right = compiled(x), twin(x)
            torch.testing.assert_close(found, right)
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
        # Whoever writes to one result must not see it in another one, or in the input.
        before = x.clone()
        for mine, its in zip(_leaves(found), _leaves(right), strict=True):
            mine.add_(1)
            its.add_(1)
        torch.testing.assert_close(_leaves(found), _leaves(right))
        torch.testing.assert_close(x, before)
    assert captured.of("inference").count(CLONE) == stay


def test_copies_of_training_are_dropped_too(captured) -> None:
    """Autograd copies what an activation in place needs; the graph has it anyway."""
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Linear(4, 4))
    twin = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(3, 4)
    torch.compile(model, backend=backend)(x).square().sum().backward()
    twin(x).square().sum().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    assert captured.of("forward").count(CLONE) == 0


def _leaves(out: object) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
