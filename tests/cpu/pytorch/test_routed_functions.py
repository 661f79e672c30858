"""While enabled, PyTorch's functions are what they were, to all that PyTorch's users do with them.

On the CPU nothing of ours runs; tests/gpu has the same where it does.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import confpred

OWN = (F.conv1d, F.conv2d, F.conv_transpose2d)
conv1d, conv2d, conv_transpose2d = OWN


@pytest.fixture(autouse=True)
def routed() -> Iterator[None]:
    torch.manual_seed(0)
    with confpred.enabled():
        assert F.conv2d is not conv2d
        yield


def operands(
    dtype: torch.dtype = torch.float64, dims: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, filter and bias of a layer of 8 channels in 4 groups."""
    x, weight = torch.randn(2, 8, *(7, 6)[:dims]), torch.randn(8, 2, *(3, 3)[:dims])
    return x.to(dtype), weight.to(dtype), torch.randn(8).to(dtype)


class Net(nn.Module):
    """Each kind of layer that is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.same = nn.Conv2d(8, 8, 3, padding="same", groups=8, dilation=2)
        self.circular = nn.Conv2d(8, 8, 3, padding=1, groups=2, padding_mode="circular")
        self.dense = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1, groups=4)
        self.line = nn.Conv1d(8, 8, 3, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.dense(self.circular(self.same(self.first(x)))))
        return self.line(x.flatten(2))


def by_pytorch(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    confpred.disable()
    try:
        return net(x)
    finally:
        confpred.enable()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"padding": 1, "stride": 2},
        {"padding": [1, 0], "stride": [2, 1]},
        {"padding": (2, 1), "dilation": (2, 1)},
        {"padding": [1], "stride": (2,), "dilation": torch.Size([1])},
        {"padding": "same", "dilation": 2},
        {"padding": "valid"},
    ],
)
def test_conv2d(geometry, dtype) -> None:
    x, weight, bias = operands(dtype)
    for given in (x, x[0], x.contiguous(memory_format=torch.channels_last), x[:0]):
        expected = conv2d(given, weight, bias, groups=4, **geometry)
        assert torch.equal(F.conv2d(given, weight, bias, groups=4, **geometry), expected)
        assert torch.equal(torch.conv2d(given, weight, bias, groups=4, **geometry), expected)
        named = {"input": given, "weight": weight, "bias": bias, "groups": 4}
        assert torch.equal(F.conv2d(**named, **geometry), expected)


@pytest.mark.parametrize("geometry", [{}, {"padding": "same"}, {"stride": [2], "padding": (1,)}])
def test_conv1d(geometry) -> None:
    x, weight, bias = operands(dims=1)
    for given in (x, x[0]):
        expected = conv1d(given, weight, bias, groups=4, **geometry)
        assert torch.equal(F.conv1d(given, weight, bias, groups=4, **geometry), expected)
        named = {"input": given, "weight": weight, "bias": bias, "groups": 4}
        assert torch.equal(torch.conv1d(**named, **geometry), expected)


@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"stride": 2, "output_padding": 1},
        {"stride": [2, 3], "padding": (1, 0), "output_padding": [0, 2], "dilation": (1, 2)},
    ],
)
def test_conv_transpose2d(geometry) -> None:
    x, weight, bias = operands()
    wide = torch.cat((bias, bias))[:8]
    for given in (x, x[0]):
        expected = conv_transpose2d(given, weight, wide, groups=4, **geometry)
        ours = F.conv_transpose2d(given, weight, wide, groups=4, **geometry)
        assert torch.equal(ours, expected)
        named = {"input": given, "weight": weight, "bias": wide, "groups": 4}
        assert torch.equal(torch.conv_transpose2d(**named, **geometry), expected)
    in_order = (x, weight, wide, 2, 1, 1, 4, 1)
    assert torch.equal(F.conv_transpose2d(*in_order), conv_transpose2d(*in_order))


def test_modules() -> None:
    net, x = Net().double(), torch.randn(2, 8, 7, 6, dtype=torch.float64)
    assert torch.equal(net(x), by_pytorch(net, x))
    assert torch.equal(net(x[:1]), by_pytorch(net, x[:1]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: (x, w.double(), b), "same|Double|double|type"),
        (lambda x, w, b: (x, w[:, :1], b), "groups=4"),
        (lambda x, w, b: (x[0, 0], w, b), "3D|4D"),
        (lambda x, w, b: (x, w, b[:3]), "bias"),
        (lambda x, w, b: (x.to_sparse(), w, b), "(?i)sparse|layout"),
    ],
)
def test_errors_are_pytorchs(change, words) -> None:
    arguments = change(*operands(torch.float32))
    with pytest.raises((RuntimeError, NotImplementedError), match=words) as theirs:
        conv2d(*arguments, 1, 0, 1, 4)
    with pytest.raises(type(theirs.value)) as ours:
        F.conv2d(*arguments, groups=4)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


class Logged(torch.Tensor):
    """A subclass that sees the calls with it."""

    seen: list[object] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_sees_pytorchs_own_functions() -> None:
    x, weight, bias = operands()
    out = F.conv2d(x.as_subclass(Logged), weight, bias, groups=4)
    assert type(out) is Logged
    assert Logged.seen[-1] is conv2d
    assert torch.equal(out.as_subclass(torch.Tensor), conv2d(x, weight, bias, groups=4))
    F.conv2d(x, weight.as_subclass(Logged), bias, groups=4)
    F.conv_transpose2d(x.as_subclass(Logged), weight, bias, groups=4)
    assert Logged.seen[-1] is conv_transpose2d


def test_a_function_mode_sees_pytorchs_own_functions() -> None:
    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seeing():
        F.conv2d(*operands(), groups=4)
    assert seen[-1] is conv2d


def test_transforms() -> None:
    x, weight, bias = operands()

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, bias, padding=1, groups=4)

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return conv2d(x, weight, bias, padding=1, groups=4)

    batch = torch.randn(3, *weight.shape, dtype=weight.dtype)
    close = torch.testing.assert_close
    for change in (
        lambda f: torch.func.vmap(f, (None, 0))(x, batch),
        lambda f: torch.func.grad(lambda w: f(x, w).square().sum())(weight),
        lambda f: torch.func.jvp(f, (x, weight), (x, weight)),
        lambda f: torch.func.vmap(
            torch.func.grad(lambda w, x: f(x[None], w).sum()), (None, 0)
        )(weight, x),
        lambda f: torch.func.hessian(lambda w: f(x, w).square().sum())(weight),
    ):  # fmt: skip
        close(change(ours), change(theirs))


def test_forward_mode_and_gradients_of_gradients() -> None:
    x, weight, bias = operands()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(F.conv2d(dual, weight, bias, groups=4)).tangent
    torch.testing.assert_close(tangent, conv2d(torch.ones_like(x), weight, groups=4))
    given = [t.requires_grad_() for t in (x[:1, :, :4, :4].clone(), weight, bias)]
    for function in (
        lambda *t: F.conv2d(*t, padding=1, groups=4),
        lambda *t: F.conv_transpose2d(*t, stride=2, output_padding=1, groups=4),
    ):
        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, fast_mode=True)
    line = [t.requires_grad_() for t in operands(dims=1)]
    function = lambda *t: F.conv1d(*t, groups=4)  # noqa: E731
    assert torch.autograd.gradcheck(function, line, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, line, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, images())])
def test_torchscript(make) -> None:
    net = Net()
    made = make(net)
    assert torch.equal(made(images()), by_pytorch(net, images()))
    text = str(made.inlined_graph)
    assert "aten::conv2d" in text or "aten::_convolution" in text
    file = io.BytesIO()
    torch.jit.save(made, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(images()), made(images()))


def images() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 8 * 7 * 6).view(2, 8, 7, 6)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict) -> None:
    net = Net()
    program = torch.export.export(net, (images(),), strict=strict)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {
        "aten.conv2d.default",
        "aten.conv2d.padding",
        "aten.conv1d.default",
        "aten.conv_transpose2d.input",
    } <= targets
    assert torch.equal(program.module()(images()), by_pytorch(net, images()))


def for_any_batch(way: str, net: nn.Module, x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """`net` as a program that is traced with `x`, of images whose number it leaves open."""
    if way in ("eager", "aot_eager"):
        torch._dynamo.mark_dynamic(x, 0)
        return torch.compile(net, fullgraph=True, backend=way)
    if way in ("make_fx", "functionalize"):
        weights = dict(net.named_parameters())

        def function(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(net, weights, (x,))

        traced = torch.func.functionalize(function) if way == "functionalize" else function
        return partial(make_fx(traced, tracing_mode="symbolic")(weights, x), weights)
    sizes = ({0: torch.export.Dim("n", min=2, max=64)},)
    return torch.export.export(net, (x,), dynamic_shapes=sizes, strict=way == "strict").module()


@pytest.mark.parametrize(
    "way", ["eager", "aot_eager", "make_fx", "functionalize", "strict", "not strict"]
)
def test_programs_for_any_batch(way) -> None:
    layers = Net()
    net = nn.Sequential(layers.first, layers.same, layers.dense, layers.up)
    program = for_any_batch(way, net, images())
    for batch in (2, 3, 5):
        x = torch.randn(batch, 8, 7, 6)
        torch.testing.assert_close(program(x), by_pytorch(net, x))


def test_a_symbolic_trace_records_pytorchs_own_function() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, groups=4) + torch.conv2d(x, weight, None, 1, 0, 1, 4)

    traced = torch.fx.symbolic_trace(function)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets[:2] == [conv2d, conv2d]
    x, weight, _ = operands()
    assert torch.equal(traced(x, weight), function(x, weight))
    net = Net()
    assert torch.equal(torch.fx.symbolic_trace(net)(images()), net(images()))


def test_shapes_without_numbers() -> None:
    x, weight, bias = (t.to("meta") for t in operands())
    out = F.conv2d(x, weight, bias, stride=2, groups=4)
    assert (out.device.type, out.shape) == ("meta", (2, 8, 3, 2))
    with torch._subclasses.FakeTensorMode():
        out = Net()(torch.empty(2, 8, 7, 6))
    assert type(out) is torch._subclasses.FakeTensor
    assert out.shape == Net()(images()).shape


def test_operations_are_counted_as_before() -> None:
    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            net(images()).sum().backward()
        return counter.get_total_flops()

    net = Net()
    ours = count()
    confpred.disable()
    theirs = count()
    confpred.enable()
    assert ours == theirs > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend) -> None:
    net = Net()
    expected = by_pytorch(net, images())
    (grad,) = torch.autograd.grad(expected.square().sum(), net.first.weight)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    out = compiled(images())
    torch.testing.assert_close(out, expected)
    (ours,) = torch.autograd.grad(out.square().sum(), net.first.weight)
    torch.testing.assert_close(ours, grad)


def pickled(net: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(net))  # noqa: S301


def test_copies_and_pickles() -> None:
    net = Net()
    for other in (copy.deepcopy(net), pickled(net)):
        assert torch.equal(other(images()), net(images()))
        assert torch.equal(by_pytorch(other, images()), net(images()))
    traced = torch.fx.symbolic_trace(lambda x, weight: F.conv2d(x, weight, groups=4))
    x, weight, _ = operands()
    assert torch.equal(pickled(traced)(x, weight), traced(x, weight))


@pytest.mark.slow(reason="fresh processes compile")
@pytest.mark.parametrize("first", ["plain", "enabled"])
def test_programs_compile_whatever_was_compiled_first(first) -> None:
    """In a new process: what `torch.compile` knows of functions is decided at its first use."""
    script = f"""
        import torch, confpred
        from torch import nn
        def compiles():
            layers = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4), nn.Conv2d(8, 8, 3))
            torch.compile(layers, fullgraph=True, backend="aot_eager")(torch.zeros(1, 8, 7, 7))
        if {first == "enabled"}:
            with confpred.enabled():
                compiles()
        compiles()
        with confpred.enabled():
            compiles()
        compiles()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
