"""Training: each direction of a convolution is chosen, norms update their statistics in place, and
outputs, gradients and buffers are those of eager mode."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from network_blocks import BLOCKS, images, made
from torch import Tensor, nn

from confpred.pytorch.backend import confpred as backend

LAST = torch.channels_last
CONV, BACKWARD = "confpred.conv2d.default", "confpred.conv2d_backward.default"
UPDATE, FUNCTIONAL = (
    "aten._batch_norm_with_update.default",
    "aten._batch_norm_with_update_functional.default",
)
COUNT, COPY = "aten._foreach_add_.Scalar", "aten.copy_.default"


def trained(model: nn.Module, x: Tensor, *, input_gradient: bool = True, steps: int = 2) -> None:
    """Compare some steps of a capture of `model` with those of `model`."""
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(steps):
        found = [_step(m, call, x + step, input_gradient) for m, call in
                 ((model, compiled), (other, other))]  # fmt: skip
        torch.testing.assert_close(*found)
        torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
        with torch.no_grad():
            for m in (model, other):
                for p in m.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.01)
                    p.grad = None


def _step(model: nn.Module, call, x: Tensor, input_gradient: bool) -> dict[str, Tensor | None]:
    x = x.detach().clone().requires_grad_(input_gradient)
    out = call(x)
    out.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"": out.detach(), "x": x.grad, **{n: g.clone() for n, g in found.items()}}


class Layer(nn.Module):
    """A convolution, a norm and an activation."""

    def __init__(self, groups: int = 2, bias: bool = True, **norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=bias, groups=groups)
        self.norm = nn.BatchNorm2d(8, **norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


def last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=LAST)


def image() -> Tensor:
    return torch.randn(4, 8, 6, 5, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=LAST
    )


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("frozen", [False, True])
def test_networks_train_as_in_eager_mode(captured, kind, frozen) -> None:
    model = made(BLOCKS[kind]()).train(not frozen)
    for module in model.modules():
        if type(module).__name__ == "DropPath":
            module.eval()
    trained(last(model), images().contiguous(memory_format=LAST))
    forward, backward = captured.of("forward"), captured.of("backward")
    assert forward.count(CONV) == backward.count(BACKWARD) > 0
    pixels = 4 if kind == "inverted residual" else 0  # convolutions of one pixel
    assert forward.count("aten.convolution.default") == pixels
    assert backward.count("aten.convolution_backward.default") == pixels
    if kind in ("bottleneck", "inverted residual"):
        norms = {"bottleneck": 7, "inverted residual": 6}[kind]
        assert forward.count(UPDATE) == (0 if frozen else norms)
        assert forward.count(COUNT) == (0 if frozen else 1)
    assert forward.count(FUNCTIONAL) == forward.count(COPY) == 0


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_each_direction_is_asked_for(captured, groups) -> None:
    trained(last(Layer(groups)), image())
    ((fprop, dgrad, wgrad),) = captured.asked
    assert [p.direction for p in (fprop, dgrad, wgrad)] == ["fprop", "dgrad", "wgrad"]
    assert (fprop.bias, fprop.activation, fprop.residual) == (True, "none", False)
    assert wgrad.bias == (groups > 1)
    assert not wgrad.deterministic


def test_an_image_without_a_gradient_is_not_asked_for_one(captured) -> None:
    trained(last(Layer()), image(), input_gradient=False)
    assert [p.direction for p in captured.asked[0]] == ["fprop", "wgrad"]
    (node,) = captured.of("backward").calls(BACKWARD)
    assert json.loads(node.args[3])["mask"] == [False, True, True]


def test_frozen_weights_are_not_asked_for_a_gradient(captured) -> None:
    model = last(Layer())
    model.conv.requires_grad_(False)
    trained(model, image())
    assert [p.direction for p in captured.asked[0]] == ["fprop", "dgrad"]


def test_deterministic_filters_are_asked_for(captured) -> None:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        trained(last(Layer()), image())
    finally:
        torch.backends.cudnn.deterministic = before
    assert [p.deterministic for p in captured.asked[0]] == [False, False, True]


@pytest.mark.parametrize(("won", "targets"), [
    ("fprop", (1, 0)), ("dgrad", (0, 1)), ("wgrad", (0, 1)), ("", (0, 0)),
])  # fmt: skip
def test_what_pytorch_wins_stays_pytorchs(captured, won, targets) -> None:
    captured.wins = lambda problem: problem.direction == won
    trained(last(Layer()), image())
    forward, backward = captured.of("forward"), captured.of("backward")
    assert (forward.count(CONV), backward.count(BACKWARD)) == targets
    if targets[1]:
        (node,) = backward.calls(BACKWARD)
        hints = json.loads(node.args[3])["hints"]
        providers = [hint["candidate"]["provider"] for hint in hints]
        assert providers == ["cudnn" if won == d else "pytorch" for d in ("dgrad", "wgrad")]


@pytest.mark.parametrize("options", [
    {}, {"momentum": 0.7}, {"affine": False}, {"eps": 0.5}, {"track_running_stats": False},
])  # fmt: skip
def test_norms_of_all_kinds(captured, options) -> None:
    trained(last(Layer(**options)), image(), steps=3)
    forward = captured.of("forward")
    plain = options in ({"affine": False}, {"track_running_stats": False})
    assert forward.count(UPDATE) == (not plain)
    assert forward.count(COPY) == (2 if options == {"affine": False} else 0)


def test_a_cumulative_average(captured) -> None:
    """Its factor is a number that depends on the count of batches, which Dynamo reads."""
    model = last(Layer(momentum=None))
    other, compiled = copy.deepcopy(model), torch.compile(model, backend=backend)
    for step in range(3):
        x = image() + step
        torch.testing.assert_close(compiled(x), other(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(F.relu(self.norm(self.conv(x)))))


def test_one_norm_twice_counts_two_batches(captured) -> None:
    model = last(Twice())
    trained(model, image())
    assert model.norm.num_batches_tracked == 4


class Reads(nn.Module):
    """The statistics are read after their update, and before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_mean * 2
        y = self.norm(x) + before.view(1, -1, 1, 1)
        return y + self.norm.running_mean.view(1, -1, 1, 1) * self.norm.num_batches_tracked


def test_statistics_that_the_forward_reads(captured) -> None:
    trained(Reads(), image(), steps=3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def test_tied_weights(captured) -> None:
    trained(last(Tied()), image())
    assert captured.of("backward").count(BACKWARD) == 2


class Counts(nn.Module):
    """Buffers that are counted up in other ways than a norm's."""

    def __init__(self, dtype: torch.dtype, change) -> None:
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.ones(8, 1, 1)), change
        self.register_buffer("count", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.count)
        return x * self.weight


@pytest.mark.parametrize("change", [
    lambda c: c.add_(1), lambda c: c.add_(1, alpha=2), lambda c: c.add_(2), lambda c: c.sub_(1),
    lambda c: c.copy_(c + 1.0), lambda c: c.add_(1).add_(1), lambda c: c[1].add_(1),
    lambda c: c.copy_(c + c.new_ones(3)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("gradients", [True, False])
def test_other_counts(captured, change, dtype, gradients) -> None:
    model = Counts(dtype, change)
    if gradients:
        trained(model, image(), steps=3)
        return
    other, compiled = copy.deepcopy(model), torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            compiled(image())
            other(image())
    assert torch.equal(model.count, other.count)


def test_a_flag_that_is_counted_up(captured) -> None:
    trained(Counts(torch.bool, lambda c: c.copy_(c + 1)), image())


@pytest.mark.parametrize("gradients", [True, False])
def test_inputs_that_the_forward_writes_are_told(captured, gradients) -> None:
    model = last(Layer().train())
    compiled = torch.compile(model, backend=backend)
    with torch.set_grad_enabled(gradients):
        compiled(image())
    done = captured.of("forward" if gradients else "inference")
    places = [n for n in done.gm.graph.nodes if n.op == "placeholder"]
    written = [tuple(places[i].meta["val"].shape) for i in done.told["written"]]
    assert sorted(written) == [(), (8,), (8,)]
    static = [tuple(places[i].meta["val"].shape) for i in done.told["static"]]
    assert len(static) == 7
    assert done.told["visible"] == (1 if gradients else None)


def test_a_norm_in_training_without_gradients(captured) -> None:
    model = last(Layer().train())
    other, compiled = copy.deepcopy(model), torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(image()), other(image()))
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))


def test_nothing_is_fused_where_gradients_are_recorded(captured) -> None:
    """The gradient of an activation, or of a norm, needs its input."""
    trained(last(Layer()).eval(), image())
    assert captured.of("forward").count("confpred.fold.default") == 0
    assert captured.asked[0][0].activation == "none"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(captured, dtype) -> None:
    model = last(Layer())
    other, compiled = copy.deepcopy(model), torch.compile(model, backend=backend)
    found = []
    for m, call in ((model, compiled), (other, other)):
        with torch.autocast("cpu", dtype):
            out = call(image())
        out.float().square().mean().backward()
        found.append([out.detach(), *(p.grad for p in m.parameters())])
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    assert {p.dtype for p in captured.asked[0]} == {str(dtype).removeprefix("torch.")}


def test_gradients_of_gradients_are_refused_in_words(captured) -> None:
    model = last(Layer())
    x = image().requires_grad_()
    out = torch.compile(model, backend=backend)(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()
