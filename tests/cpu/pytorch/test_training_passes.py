"""Training: each direction of a convolution is chosen, norms update their statistics in place, and
outputs, gradients and buffers are those of eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_blocks import BACKWARD, BLOCKS, CONV, FOLD, LAST, PLAIN, Around, images, made
from torch import Tensor, fx, nn

from confpred.problem.norm import BatchNorm
from confpred.problem.record import Record
from confpred.pytorch.backend import confpred as backend
from confpred.pytorch.rewrite import passes
from confpred.pytorch.run.convolve import Call

UPDATE, FUNCTIONAL = (
    "aten._batch_norm_with_update.default",
    "aten._batch_norm_with_update_functional.default",
)
COUNT, COPY = "aten._foreach_add_.Scalar", "aten.copy_.default"


def trained(
    model: nn.Module, x: Tensor, *, input_gradient: bool = True, steps: int = 2, **options: Any
) -> None:
    """Compare some steps of a capture of `model` with those of `model`."""
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
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


def called(model: nn.Module, gradients: bool, steps: int = 3) -> None:
    """Compare calls of a capture of `model` and their buffers with those of `model`."""
    other, compiled = copy.deepcopy(model), torch.compile(model, backend=backend)
    with torch.set_grad_enabled(gradients):
        for step in range(steps):
            torch.testing.assert_close(compiled(image() + step), other(image() + step))
            torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))


def layer(groups: int = 2, **norm) -> nn.Module:
    """Return a convolution, a norm and an activation."""
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(8, 8, 3, padding=1, groups=groups),
              "norm": nn.BatchNorm2d(8, **norm)}  # fmt: skip
    return Around(lambda m, x: F.silu(m.norm(m.conv(x))), **layers).to(memory_format=LAST)


def norms_are_pytorchs(problem: Record) -> bool:
    return not isinstance(problem, BatchNorm)


def test_parameters_are_converted_together_and_gradients_as_they_are_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers are the same to the bit."""
    forward, backward = passes.convert_together, passes.leave_conversions
    graphs: dict[str, list[str]] = {}
    dtypes: list[Any] = []

    def targets(graph: fx.Graph) -> list[str]:
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def convert(parameters: Any, graph: fx.Graph) -> None:
        forward(parameters, graph)
        graphs["forward"] = targets(graph)

    def leave(left: Any, compiled: bool, graph: fx.Graph) -> None:
        backward(left, compiled, graph)
        graphs["backward"] = targets(graph)
        dtypes.append(left)

    monkeypatch.setattr(passes, "convert_together", convert)  # the same, and looks at the graph
    monkeypatch.setattr(passes, "leave_conversions", leave)  # the same, and looks at the graph
    model = made(BLOCKS["inverted residual"]()).train()
    other = copy.deepcopy(model)
    found = []
    for m, call in ((model, torch.compile(model, backend=backend)), (other, other)):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(images())
        out.float().square().mean().backward()
        found.append([out.detach(), *(p.grad for p in m.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    assert graphs["forward"].count("confpred.convert.default") == 1
    assert graphs["forward"].count("aten._to_copy.default") <= 1  # of the images
    assert not {"confpred.convert.default", "aten._to_copy.default"} & {*graphs["backward"]}
    assert set(dtypes[0].values()) == {torch.float32}
    convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert len(dtypes[0]) >= convolutions


def image() -> Tensor:
    return torch.randn(4, 8, 6, 5, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=LAST
    )


@pytest.mark.slow(reason="Inductor compiles programs in C++")
@pytest.mark.parametrize("kind", ["bottleneck", "inverted residual"])
def test_inductor_computes_what_is_left(captured, kind) -> None:
    model = made(BLOCKS[kind]()).train().to(memory_format=LAST)
    for module in model.modules():
        if type(module).__name__ in ("DropPath", "Dropout"):
            module.eval()
    x = images().contiguous(memory_format=LAST)
    trained(model, x, inductor=True)
    assert captured.of("forward").count(CONV) == captured.of("backward").count(BACKWARD) > 0
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(captured.of("forward").told["written"]) == 3 * len(norms)
    for freeze in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            model.eval(), backend=backend, options={"inductor": True, "freeze": freeze},
            dynamic=not freeze,
        )  # fmt: skip
        with torch.no_grad():
            for batch in (2, 3) if not freeze else (2,):
                torch.testing.assert_close(compiled(x[:batch]), model(x[:batch]))


@pytest.mark.slow(reason="Inductor compiles programs in C++")
@pytest.mark.parametrize(("groups", "sums"), [(1, 1), (2, 0)])
def test_inductor_sums_gradients_of_biases_and_lays_filters_out(captured, groups, sums) -> None:
    """A kernel of grouped layers sums them on its way."""
    model = Around(lambda m, x: m.conv(x).relu(), conv=nn.Conv2d(8, 8, 3, groups=groups))
    trained(made(model).train(), image(), inductor=True)
    backward = captured.of("backward")
    assert backward.count("aten.sum.dim_IntList") == sums
    (kernel,) = captured.of("forward").calls(CONV)
    assert kernel.args[1].meta["val"].is_contiguous(memory_format=LAST)
    (kernel,) = backward.calls(BACKWARD)
    assert kernel.args[2].meta["val"].is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(("kind", "frozen"), [
    *((kind, False) for kind in BLOCKS), ("bottleneck", True),
])  # fmt: skip
def test_networks_train_as_in_eager_mode(captured, kind, frozen) -> None:
    captured.wins = norms_are_pytorchs
    model = made(BLOCKS[kind]()).train(not frozen)
    for module in model.modules():
        if type(module).__name__ == "DropPath":
            module.eval()
    trained(model.to(memory_format=LAST), images().contiguous(memory_format=LAST))
    forward, backward = captured.of("forward"), captured.of("backward")
    assert forward.count(CONV) == backward.count(BACKWARD) > 0
    pixels = 2 if kind == "inverted residual" else 0  # convolutions of one pixel
    assert forward.count(PLAIN) == pixels
    assert backward.count("aten.convolution_backward.default") == pixels
    if kind in ("bottleneck", "inverted residual"):
        norms = {"bottleneck": 4, "inverted residual": 3}[kind]
        assert forward.count(UPDATE) == (0 if frozen else norms)
        assert forward.count(COUNT) == (0 if frozen else 1)
    assert forward.count(FUNCTIONAL) == forward.count(COPY) == 0


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_each_direction_is_asked_for(captured, groups) -> None:
    trained(layer(groups), image())
    (fprop, dgrad, wgrad), norms = captured.asked
    assert [p.direction for p in (fprop, dgrad, wgrad)] == ["fprop", "dgrad", "wgrad"]
    assert [p.direction for p in norms] == ["forward", "backward"]
    assert (fprop.bias, fprop.activation, fprop.residual) == (True, "none", False)
    assert wgrad.bias == (groups > 1)
    assert not wgrad.deterministic


def test_an_image_without_a_gradient_is_not_asked_for_one(captured) -> None:
    trained(layer(), image(), input_gradient=False)
    assert [p.direction for p in captured.asked[0]] == ["fprop", "wgrad"]
    (node,) = captured.of("backward").calls(BACKWARD)
    assert Call.read(node.args[3]).mask == (False, True, True)


def test_frozen_weights_are_not_asked_for_a_gradient(captured) -> None:
    model = layer()
    model.conv.requires_grad_(False)
    trained(model, image())
    assert [p.direction for p in captured.asked[0]] == ["fprop", "dgrad"]


def test_deterministic_filters_are_asked_for(captured) -> None:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        trained(layer(), image())
    finally:
        torch.backends.cudnn.deterministic = before
    assert [p.deterministic for p in captured.asked[0]] == [False, False, True]


@pytest.mark.parametrize(("won", "targets"), [
    ("fprop", (1, 0)), ("dgrad", (0, 1)), ("wgrad", (0, 1)), ("", (0, 0)),
])  # fmt: skip
def test_what_pytorch_wins_stays_pytorchs(captured, won, targets) -> None:
    captured.wins = lambda problem: problem.direction == won
    trained(layer(), image())
    forward, backward = captured.of("forward"), captured.of("backward")
    assert (forward.count(CONV), backward.count(BACKWARD)) == targets
    if targets[1]:
        (node,) = backward.calls(BACKWARD)
        providers = [hint and hint.candidate.provider for hint in Call.read(node.args[3]).hints]
        assert providers == ["cudnn" if won == d else "pytorch" for d in ("dgrad", "wgrad")]


@pytest.mark.parametrize("options", [
    {}, {"momentum": 0.7}, {"affine": False}, {"eps": 0.5}, {"track_running_stats": False},
])  # fmt: skip
def test_norms_of_all_kinds(captured, options) -> None:
    captured.wins = norms_are_pytorchs
    trained(layer(**options), image(), steps=3)
    forward = captured.of("forward")
    plain = options in ({"affine": False}, {"track_running_stats": False})
    assert forward.count(UPDATE) == (not plain)
    assert forward.count(COPY) == (2 if options == {"affine": False} else 0)


def test_a_cumulative_average(captured) -> None:
    """Its factor is a number that depends on the count of batches, which Dynamo reads."""
    called(layer(momentum=None), gradients=True)


def test_a_norm_in_training_without_gradients(captured) -> None:
    called(layer(), gradients=False)


def test_statistics_that_the_forward_reads(captured) -> None:
    """After their update, and before it."""

    def forward(m: Around, x: Tensor) -> Tensor:
        before = m.norm.running_mean * 2
        y = m.norm(x) + before.view(1, -1, 1, 1)
        return y + m.norm.running_mean.view(1, -1, 1, 1) * m.norm.num_batches_tracked

    trained(Around(forward, norm=nn.BatchNorm2d(8)), image(), steps=3)


def counts(dtype: torch.dtype, change) -> nn.Module:
    """Return a module whose buffer is counted up in other ways than a norm's."""
    count, weight = nn.Buffer(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.ones(8, 1, 1))
    return Around(lambda m, x: (change(m.count), x * m.weight)[1], count=count, weight=weight)


@pytest.mark.parametrize("change", [
    lambda c: c.add_(1), lambda c: c.add_(1, alpha=2), lambda c: c.add_(2), lambda c: c.sub_(1),
    lambda c: c.copy_(c + 1.0), lambda c: c.add_(1).add_(1), lambda c: c[1].add_(1),
    lambda c: c.copy_(c + c.new_ones(3)),
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "gradients"), [(torch.int64, True), (torch.float32, False)])
def test_other_counts(captured, change, dtype, gradients) -> None:
    if gradients:
        trained(counts(dtype, change), image(), steps=3)
    else:
        called(counts(dtype, change), gradients=False)


def test_a_flag_that_is_counted_up(captured) -> None:
    trained(counts(torch.bool, lambda c: c.copy_(c + 1)), image())


@pytest.mark.parametrize("gradients", [True, False])
def test_inputs_that_the_forward_writes_are_told(captured, gradients) -> None:
    model = layer().train()
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


def test_nothing_is_fused_where_gradients_are_recorded(captured) -> None:
    """The gradient of an activation, or of a norm, needs its input."""
    trained(layer().eval(), image())
    assert captured.of("forward").count(FOLD) == 0
    assert captured.asked[0][0].activation == "none"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(captured, dtype) -> None:
    model = layer()
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
    model = layer()
    x = image().requires_grad_()
    out = torch.compile(model, backend=backend)(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()
