"""`freeze`: what depends on weights alone is computed once, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from network_blocks import BLOCKS, FOLD, LAST, Around, image, made
from torch import Tensor, nn


def compiled(model: nn.Module, *, freeze: bool = True):
    return torch.compile(model, backend="confpred", options={"freeze": freeze})


@pytest.mark.parametrize("kind", ["bottleneck", "convnext", "functional"])
@torch.no_grad()
def test_networks_are_the_same_number(captured, kind) -> None:
    model = made(BLOCKS[kind]()).to(memory_format=LAST)
    call = compiled(model)
    for batch in (2, 2, 3):
        torch.testing.assert_close(call(image(batch)), model(image(batch)))
    for done in captured.passes:
        assert done.count(FOLD) == 0
        folded = [n for n in done.gm.graph.nodes if n.op == "placeholder" and "frozen" in n.name]
        places = [n for n in done.gm.graph.nodes if n.op == "placeholder"]
        assert all(places.index(n) in done.told["static"] for n in folded)
        assert folded or kind == "convnext"


@torch.no_grad()
def test_a_write_to_a_weight_is_not_seen_and_without_it_is(captured) -> None:
    model, x = made(BLOCKS["bottleneck"]()).to(memory_format=LAST), image()
    frozen, seeing = compiled(model), compiled(model, freeze=False)
    before = model(x)
    frozen(x)
    seeing(x)
    model.blocks[0].conv2[1].weight.mul_(3)
    torch.testing.assert_close(frozen(x), before)
    torch.testing.assert_close(seeing(x), model(x))
    assert not torch.allclose(model(x), before, rtol=1e-2)


@torch.no_grad()
def test_casts_of_autocast_are_frozen(captured) -> None:
    model, x = made(BLOCKS["functional"]()).to(memory_format=LAST), image()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(model)(x), model(x)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    casts = captured.of("inference").calls("aten._to_copy.default")
    given = [node.args[0] for node in casts if node.args[0].op == "placeholder"]
    assert {tuple(place.meta["val"].shape) for place in given} <= {(2, 3, 19, 17)}  # the image


@torch.no_grad()
def test_random_numbers_are_drawn_at_each_call(captured) -> None:
    """Those of a weight's size, too."""

    def forward(model: Around, x: Tensor) -> Tensor:
        return x.sum() + F.dropout(model.weight, 0.5) + torch.rand_like(model.weight)

    call, x = compiled(Around(forward, weight=nn.Parameter(torch.ones(50)))), image()
    first = call(x)
    assert not torch.equal(first, call(x))


@torch.no_grad()
def test_buffers_that_the_forward_writes_are_not_frozen(captured) -> None:
    def forward(model: Around, x: Tensor) -> Tensor:
        model.seen.mul_(2)
        return x * (model.seen + 1).view(3, 1, 1)

    model = Around(forward, seen=nn.Buffer(torch.ones(3)))
    call = compiled(model)
    for times in (1, 2, 3):
        found = call(image())
        torch.testing.assert_close(model.seen, torch.full((3,), 2.0**times))
        torch.testing.assert_close(found, image() * (2**times + 1))


@torch.no_grad()
def test_a_caller_may_write_to_what_was_returned(captured) -> None:
    """A frozen result is returned, too."""

    def forward(model: Around, x: Tensor) -> tuple[Tensor, Tensor]:
        double = model.weight * 2
        return double, x * double.view(3, 1, 1)

    call = compiled(Around(forward, weight=nn.Parameter(torch.ones(3))))
    for _ in range(2):
        double, product = call(image())
        torch.testing.assert_close(double, torch.full((3,), 2.0))
        torch.testing.assert_close(product, image() * 2)
        double.zero_()


@torch.no_grad()
def test_a_network_without_weights(captured) -> None:
    call = compiled(Around(lambda model, x: x + 1))
    torch.testing.assert_close(call(image()), image() + 1)
