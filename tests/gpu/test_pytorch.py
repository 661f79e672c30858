"""`confpred.conv2d` as its users call it."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import activate
from hazards.programs import capture
from layers import CONVOLUTIONS
from layers_on_gpu import (
    LAST,
    LAYERS,
    SHAPE,
    Layer,
    OursFirst,
    close,
    in_float64,
    make_layer,
    ours_first,
    served_by,
)
from shared import python_says

import confpred
from confpred.predict.choice import Choice
from confpred.predict.plan import read_plan
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import ACTIVATIONS, Problem
from confpred.problem.device import Device
from confpred.pytorch.backend import confpred as confpred_backend
from confpred.pytorch.run.convolve import Call, Geometry


@pytest.fixture(autouse=True)
def ours() -> Iterator[OursFirst]:
    """Kernels of ours serve every layer that they can."""
    with ours_first() as predictor:
        yield predictor


@pytest.fixture
def layer() -> Layer:
    return make_layer(SHAPE, 64)


def in_float64_too(
    mine: Sequence[torch.Tensor],
    leaves: Iterable[torch.Tensor | None],
    grad: torch.Tensor,
    kwargs: dict[str, Any],
    follow: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
) -> torch.Tensor:
    """Compare the gradients of the `leaves` that need one, with what follows the convolution.

    Returns:
        The output in float64.
    """
    exact = [
        None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in leaves
    ]
    right = follow(F.conv2d(*exact, **kwargs))
    needed = [t for t in exact if t is not None and t.requires_grad]
    for a, b in zip(mine, torch.autograd.grad(right, needed, grad.double()), strict=True):
        close(a, b)
    return right.detach()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_equals_pytorch(name, dtype, activation, ours) -> None:
    kwargs, channels = LAYERS[name]
    x, weight, bias = make_layer(kwargs, channels, dtype)
    residual = None
    for _ in range(2):  # without and with a residual
        exact = F.conv2d(*in_float64(x, weight, bias), **kwargs)
        if residual is not None:
            exact = exact + residual.double()
        exact = activate(activation, exact)
        out = confpred.conv2d(x, weight, bias, activation=activation, residual=residual, **kwargs)
        close(out, exact)
        assert out.dtype is dtype
        assert out.is_contiguous(memory_format=LAST)
        residual = torch.randn_like(out)
    assert served_by("fprop", ours)
    assert None not in ours.chosen


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("depthwise")])
def test_depthwise_layers_in_float32(name, ours) -> None:
    kwargs, channels = LAYERS[name]
    leaves = [t.requires_grad_() for t in make_layer(kwargs, channels, torch.float32)]
    out = confpred.conv2d(*leaves, **kwargs)
    grad = torch.randn_like(out)
    mine = torch.autograd.grad(out, leaves, grad)
    close(out.detach(), in_float64_too(mine, leaves, grad, kwargs))
    assert ours.chosen
    assert all(name and name.startswith("depthwise") for name in ours.chosen)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "x weight bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_equal_pytorchs(name, wanted, ours) -> None:
    kwargs, channels = LAYERS[name]
    named = dict(zip(("x", "weight", "bias"), make_layer(kwargs, channels), strict=True))
    needed = wanted.split()
    leaves = [named[key].requires_grad_() for key in needed]
    out = confpred.conv2d(*named.values(), activation="silu", **kwargs)
    grad = torch.randn_like(out)
    mine = torch.autograd.grad(out, leaves, grad)
    in_float64_too(mine, named.values(), grad, kwargs, F.silu)
    assert served_by("dgrad", ours) == ("x" in needed)
    assert served_by("wgrad", ours) == ("weight" in needed)
    assert None not in ours.chosen


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.contiguous(),  # NCHW
        lambda g: g.to(memory_format=LAST),
        lambda g: g[:1].expand_as(g),
        lambda g: g.flatten()[:1].expand(g.numel()).view(g.shape),  # as .sum() makes it
        lambda g: torch.cat((g, g), 1)[:, : g.shape[1]],  # with gaps
    ],
    ids=["nchw", "channels last", "one image", "one number", "gaps"],
)
def test_gradients_of_any_layout_are_taken(layer, change) -> None:
    x, weight, bias = (t.requires_grad_() for t in layer)
    out = confpred.conv2d(x, weight, bias, **SHAPE)
    grad = change(torch.randn_like(out))
    mine = torch.autograd.grad(out, (x, weight, bias), grad)
    in_float64_too(mine, (x, weight, bias), grad, SHAPE)


@pytest.mark.parametrize("name", LAYERS)
def test_deterministic_gradients_repeat_to_the_bit(name) -> None:
    kwargs, channels = LAYERS[name]
    x, weight, bias = (t.requires_grad_() for t in make_layer(kwargs, channels))
    out = confpred.conv2d(x, weight, bias, **kwargs)
    grad = torch.randn_like(out)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            torch.autograd.grad(out, (x, weight, bias), grad, retain_graph=True) for _ in range(20)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_cudnns_switch_asks_for_deterministic_gradients_too(layer, monkeypatch) -> None:
    asked: list[bool] = []

    class Listening(OursFirst):
        def choose(self, problem: Any, device: str | Device, **others: Any) -> Choice:
            if problem.direction == "wgrad":
                asked.append(problem.deterministic)
            return super().choose(problem, device, **others)

    confpred.use_predictor(Listening())
    x, weight, _ = layer
    out = confpred.conv2d(x, weight.requires_grad_(), **SHAPE)
    for deterministic in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
        torch.autograd.grad(out.sum(), weight, retain_graph=True)
    assert asked == [False, True]


def test_a_pin_is_followed_and_said(layer, tmp_path, caplog, device) -> None:
    x, weight, _ = layer
    problem = Problem.parse("n=4 c=64 h=29 w=28 k=64 r=3 s=3 padding=1 groups=8")
    choice = Predictor({}).rank(problem, device, 3)[-1]
    pin = {
        "device": device.key,
        "problem": problem.to_json(),
        "provider": choice.provider,
        "config": dict(choice.config),
    }
    path = tmp_path / "pins.json"
    path.write_text(json.dumps({"format": "confpred-pins/1", "pins": [pin]}))
    confpred.use_predictor(Predictor({}, read_plan(path)))
    with caplog.at_level(logging.DEBUG, logger="confpred.pytorch.run.choosing"):
        out = confpred.conv2d(x, weight, **SHAPE)
    assert choice.family in caplog.text
    assert "(pinned)" in caplog.text
    close(out, F.conv2d(*in_float64(x, weight), **SHAPE))


@pytest.mark.parametrize(
    ("x_change", "kwargs"),
    [
        (lambda x: x.contiguous(), {}),  # NCHW
        (lambda x: x.float(), {}),  # a dtype without a kernel at this width
        (lambda x: x, {"stride": 3}),  # a stride without a kernel
        (lambda x: x[:, :, 1:], {}),  # a view with gaps
        (lambda x: x[:0], {}),
    ],
    ids=["nchw", "float32", "stride", "view", "empty"],
)
def test_everything_else_goes_to_pytorch(layer, x_change, kwargs) -> None:
    x, weight, bias = layer
    x = x_change(x)
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    out = confpred.conv2d(x, weight, bias, **SHAPE, **kwargs)
    torch.testing.assert_close(out, F.conv2d(x, weight, bias, **SHAPE, **kwargs))


def test_without_a_model_pytorch_serves(layer, caplog) -> None:
    confpred.use_predictor(Predictor({}))
    x, weight, bias = layer
    with caplog.at_level(logging.DEBUG, logger="confpred.pytorch.run.choosing"):
        out = confpred.conv2d(x, weight, bias, **SHAPE)
    assert "falling back to PyTorch for" in caplog.text
    assert "no model for this device" in caplog.text
    close(out, F.conv2d(x, weight, bias, **SHAPE))


def test_runs_on_the_current_stream(layer) -> None:
    x, weight, _ = layer
    expected = confpred.conv2d(x, weight, **SHAPE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would overtake this
        doubled = x * 2
        out = confpred.conv2d(doubled, weight, **SHAPE)
    stream.synchronize()
    close(out, 2 * expected)


@pytest.mark.parametrize("name", LAYERS)
def test_filter_gradients_on_many_streams_keep_their_workspaces_apart(name) -> None:
    """Each thread computes on a stream of its own, all at once, with one ready launch."""
    kwargs, channels = LAYERS[name]
    layers = [make_layer(kwargs, channels, seed=seed) for seed in range(6)]
    call = Call(pairs(kwargs), mask=(False, True, True)).text()

    def filter_grad(
        grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.confpred.conv2d_backward(grad, x, weight, call)[1:]

    grads = [torch.randn_like(F.conv2d(x, w, b, **kwargs)) for x, w, b in layers]
    expected = []
    for (x, w, b), grad in zip(layers, grads, strict=True):
        exact = [t.double().requires_grad_() for t in (w, b)]
        out = F.conv2d(x.double(), *exact, **kwargs)
        expected.append(torch.autograd.grad(out, exact, grad.double()))

    def launch(index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x, weight, _ = layers[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [filter_grad(grads[index], x, weight) for _ in range(30)]
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(layers)) as threads:
        for found, right in zip(threads.map(launch, range(len(layers))), expected, strict=True):
            for mine in found:
                for a, b in zip(mine, right, strict=True):
                    close(a, b)


def pairs(kwargs: dict[str, Any]) -> Geometry:
    """Return the geometry of a layer's arguments."""
    found = (kwargs.get("stride", 1), kwargs.get("padding", 0), kwargs.get("dilation", 1))
    stride, padding, dilation = ((v, v) if isinstance(v, int) else v for v in found)
    return stride, padding, dilation, kwargs["groups"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_training_step_is_captured_by_a_cuda_graph(name) -> None:
    kwargs, channels = LAYERS[name]
    x, weight, bias = (t.requires_grad_() for t in make_layer(kwargs, channels))

    def step() -> tuple[torch.Tensor, ...]:
        out = confpred.conv2d(x, weight, bias, activation="relu", **kwargs)
        return torch.autograd.grad(out.square().sum(), (x, weight, bias))

    graph, grads = capture(step)
    for _ in range(3):  # a workspace that was left dirty would be seen in the second replay
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        one = torch.ones((), device="cuda")
        in_float64_too(grads, (x, weight, bias), one, kwargs, lambda y: F.relu(y).square().sum())


def test_compiles_without_a_graph_break(layer) -> None:
    x, weight, bias = layer

    def block(x: torch.Tensor) -> torch.Tensor:
        out = confpred.conv2d(x, weight, bias, activation="relu", **SHAPE)
        return confpred.conv2d(out, weight, bias, activation="hardswish", residual=x, **SHAPE)

    for backend in (confpred_backend, "inductor"):
        torch._dynamo.reset()
        close(torch.compile(block, fullgraph=True, backend=backend)(x), block(x))


@pytest.mark.parametrize("name", ["width 8", "depthwise"])
def test_compiles_forward_and_backward(name, ours) -> None:
    kwargs, channels = LAYERS[name]
    x, weight, bias = (t.requires_grad_() for t in make_layer(kwargs, channels))

    def block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return confpred.conv2d(x, weight, bias, activation="silu", **kwargs) * 2

    torch._dynamo.reset()
    ours.chosen.clear()
    compiled = torch.compile(block, fullgraph=True, backend=confpred_backend)
    out = compiled(x, weight, bias)
    grad = torch.randn_like(out)
    mine = torch.autograd.grad(out, (x, weight, bias), grad)
    assert served_by("dgrad", ours)
    assert served_by("wgrad", ours)
    right = in_float64_too(mine, (x, weight, bias), grad, kwargs, lambda y: 2 * F.silu(y))
    close(out.detach(), right)


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_trains_where_a_compiled_program_becomes_cuda_graphs(name, inductor, ours) -> None:
    """PyTorch warms these up in their own pool, and refuses memory that stays there: the workspace
    of a filter's gradient."""
    kwargs, channels = LAYERS[name]
    leaves = [t.requires_grad_() for t in make_layer(kwargs, channels)]

    def block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return confpred.conv2d(x, weight, bias, **kwargs).relu()

    torch._dynamo.reset()
    options = {"inductor": inductor}
    compiled = torch.compile(block, fullgraph=True, backend=confpred_backend, options=options)
    for seed in range(5):  # warmed up, captured, and replayed
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            for leaf, new in zip(leaves, make_layer(kwargs, channels, seed=seed), strict=True):
                leaf.copy_(new)
        out = compiled(*leaves)
        grad = torch.ones_like(out)
        mine = torch.autograd.grad(out, leaves, grad)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        right = F.conv2d(*exact, **kwargs).relu()
        close(out.detach(), right.detach())
        theirs = torch.autograd.grad(right, exact, grad.double())
        for a, b in zip(mine, theirs, strict=True):
            assert (a.double() - b).norm() <= 5e-2 * b.norm()  # a sum near 0 has another sign
    assert all(served_by(direction, ours) for direction in ("fprop", "dgrad", "wgrad"))


def test_passes_pytorchs_checks_of_custom_operators(layer) -> None:
    x, weight, bias = layer
    geometry = pairs(SHAPE)
    out = confpred.conv2d(x, weight, bias, **SHAPE)
    operators = torch.ops.confpred
    checks = ("test_schema", "test_faketensor")  # the operators have no formula for gradients
    scale = torch.rand(64, device="cuda") + 0.5
    for given in (
        (x, weight, None, bias, None, Call(geometry, "silu").text()),
        (x, weight, None, bias, out, Call(geometry, "gelu").text()),
        (x, weight, None, None, None, Call(geometry).text()),
        (x, weight, scale, scale, out, Call(geometry, "relu").text()),
    ):
        torch.library.opcheck(operators.conv2d, given, test_utils=checks)
    given = (x, scale, scale, out[:, :, :29, :28], "relu6")
    torch.library.opcheck(operators.scale_shift, given, test_utils=checks)
    torch.use_deterministic_algorithms(True)  # the operator is run twice and compared
    try:
        for mask in ((True, True, True), (True, False, False), (False, True, False)):
            given = (out, x, weight, Call(geometry, mask=mask).text())
            torch.library.opcheck(operators.conv2d_backward, given, test_utils=checks)
    finally:
        torch.use_deterministic_algorithms(False)


def test_under_autocast(layer) -> None:
    x, weight, bias = layer
    floats = [t.float().requires_grad_() for t in layer]
    with torch.autocast("cuda", dtype=torch.float16):
        out = confpred.conv2d(*floats, residual=x.float(), **SHAPE)
    assert out.dtype is torch.float16
    close(out.detach(), confpred.conv2d(x, weight, bias, **SHAPE) + x)
    out.sum().backward()
    assert all(t.grad.dtype is torch.float32 for t in floats)


_FIRST_STEP = """
    import sys, torch, confpred
    from confpred.cuda import compiler
    sys.path.insert(0, sys.argv[1])
    from layers_on_gpu import OursFirst
    confpred.use_predictor(OursFirst())
    compiled = []
    compile_ = compiler._compile
    compiler._compile = lambda *a: compiled.append(a) or compile_(*a)
    x = torch.randn(4, 64, 28, 28, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(64, 8, 3, 3, device="cuda", dtype=torch.float16).requires_grad_()
    confpred.conv2d(x, w, padding=1, groups=8).sum().backward()
    torch.cuda.synchronize()
    print(len(compiled))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    program = ("-c", textwrap.dedent(_FIRST_STEP), Path(__file__).parent)
    cache = {"CONFPRED_CACHE_DIR": str(tmp_path)}
    first, second = (int(python_says(*program, **cache)) for _ in range(2))
    directions = {name.rpartition("_")[2] for name in CONVOLUTIONS}
    assert first >= len(directions)
    assert second == 0
