"""Norms of groups of channels as one operator a direction: which are found, and that the graph
computes what PyTorch does. The operators run by PyTorch's own here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_blocks import LAST, Around, ConvNeXtBlock
from torch import Tensor, nn
from torch._decomp.decompositions import _fused_rms_norm_backward

import confpred
from confpred.launch.assignment import Assignment
from confpred.problem.activation import activated
from confpred.problem.norm import EPS
from confpred.problem.norm_of_groups import AFFINE, NORM, Norm
from confpred.pytorch.run import choosing, norms

aten = torch.ops.aten
WIDTH = 12
HALF = torch.bfloat16


@pytest.fixture
def served(captured: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures as on a GPU, beside a model of norms that takes all of them."""
    monkeypatch.setattr(choosing, "is_known", lambda operation: True)  # without a model
    return captured


@pytest.fixture
def fused_rms_norm() -> Iterator[None]:
    """The operator that only PyTorch's CUDA has a kernel for."""

    def forward(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
        mean = x.float().square().mean(-1, keepdim=True)
        scale = torch.rsqrt(mean + (torch.finfo(torch.float32).eps if eps is None else eps))
        y = x.float() * scale
        return (y if weight is None else y * weight).to(x.dtype), scale

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", forward, "CPU")
    library.impl("_fused_rms_norm_backward", _fused_rms_norm_backward, "CPU")
    yield
    library._destroy()


def images(dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(batch, WIDTH, 6, 5) * 2 + 1
    return x.to(dtype).contiguous(memory_format=LAST)


def conv() -> nn.Conv2d:
    """Return a convolution; before a norm, the gradient of a bias would be noise."""
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)


def network(function: Callable[..., Any], dtype: torch.dtype = torch.float32, **layers: Any) -> Any:
    """Return a network between two convolutions; norms' weights are in float32, and not 1 and 0."""
    torch.manual_seed(0)
    given = {"first": conv().to(dtype), "last": conv().to(dtype), **layers}
    for p in (p for layer in layers.values() for p in layer.parameters() if p.dim() == 1):
        nn.init.uniform_(p, 0.5, 1.5)
    model = Around(lambda m, x: m.last(function(m, m.first(x))), **given)
    return model.to(memory_format=LAST)


def compare(
    model: nn.Module, x: Tensor, training: bool, tolerance: float = 1e-4, **options: Any
) -> None:
    """Compare a capture with eager mode: outputs, gradients and buffers, and how outputs lie."""
    model, other = model.train(training), copy.deepcopy(model).train(training)
    call = torch.compile(model, backend="confpred", options=options)
    found: list[list[Tensor]] = []
    for m, run in ((model, call), (other, other)):
        y = x.detach().clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            out = run(y)
        if training:
            out.float().square().mean().backward()
            grads = (t.grad for t in (y, *m.parameters()) if t.grad is not None)
        found.append([out.detach(), *(grads if training else ()), *m.buffers()])
    for a, b in zip(*found, strict=True):
        assert a.stride() == b.stride() or not a.dim()
        scale = b.abs().max().float() or 1
        torch.testing.assert_close(a.float() / scale, b.float() / scale, rtol=0, atol=tolerance)


def asked(served: Any) -> list[Norm]:
    return [p for problems in served.asked for p in problems if isinstance(p, Norm)]


def left(served: Any) -> list[str]:
    """Return the norms of PyTorch's that run."""
    targets = [target for each in served.passes for target in each.targets()]
    return [target for target in targets if target.startswith("aten.") and "_norm" in target]


def facts(p: Norm) -> tuple[Any, ...]:
    return p.kind.partition(" ")[2], p.activation, p.residual, p.affine


def many(m: Any, x: Tensor) -> Tensor:
    x = F.silu(m.a(x))
    x = F.relu(m.b(m.c(x)) + x, inplace=True)
    y = m.d(m.e(x))
    x = F.gelu(y) + y.exp()  # read twice
    x = F.leaky_relu(m.l(x), inplace=True)
    x = F.hardswish(m.f(x))
    x = F.relu6(x + m.g(m.h(x)))
    x = m.i(x)
    return x + m.j(m.k(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


MANY = [
    ("group norm", "silu", False, "full"), ("group norm", "relu", True, "full"),
    ("group norm", "none", False, "none"), ("instance norm", "leaky_relu", False, "full"),
    ("instance norm", "hardswish", False, "none"),
    ("instance norm", "relu6", True, "full"), ("layer norm", "none", False, "full"),
    ("layer norm", "none", False, "weight"),
]  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
def test_norms_of_all_kinds(served: Any, training: bool) -> None:
    model = network(
        many, a=nn.GroupNorm(4, WIDTH), b=nn.GroupNorm(1, WIDTH), c=conv(), e=conv(),
        d=nn.GroupNorm(3, WIDTH, affine=False, eps=0.1), f=nn.InstanceNorm2d(WIDTH), h=conv(),
        g=nn.InstanceNorm2d(WIDTH, affine=True), i=ConvNeXtBlock(WIDTH),
        j=nn.LayerNorm(WIDTH, bias=False), k=conv(), l=nn.InstanceNorm2d(WIDTH, affine=True),
    )  # fmt: skip
    compare(model, images(), training)
    problems = asked(served)
    ahead = [p for p in problems if not p.is_backward]
    assert sorted(map(facts, ahead)) == sorted(MANY)
    assert len(problems) == len(ahead) * (1 + training)
    assert {p.groups for p in ahead} == {1, 3, 4, WIDTH}
    assert {(p.n, p.p) for p in ahead} == {(2, 30), (60, 1)}
    assert left(served) == []


@pytest.mark.parametrize(("batch", "training"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("activation", [nn.LeakyReLU, nn.ReLU, nn.SiLU])
def test_an_activation_in_place_of_an_instance_norms_view(
    served: Any, training: bool, activation: type[nn.Module], batch: int
) -> None:
    layers = {"norm": nn.InstanceNorm2d(WIDTH, affine=True), "more": nn.InstanceNorm2d(WIDTH)}
    layers["act"] = activation(inplace=True)
    model = network(lambda m, x: m.act(m.more(m.act(m.norm(x)))), **layers)
    compare(model, images(batch=batch), training)
    name = {"LeakyReLU": "leaky_relu"}.get(activation.__name__, activation.__name__.lower())
    assert [p.activation for p in asked(served)] == [name] * 2 * (1 + training)
    targets = [target for p in served.passes for target in p.targets()]
    assert not {t for t in targets if "reshape" in t or "copy" in t or "relu" in t or "silu" in t}


def test_an_instance_norm_of_one_sample(served: Any) -> None:
    """Its gradients are not summed up."""
    norm = nn.InstanceNorm2d(WIDTH, affine=True)
    compare(network(lambda m, x: F.relu(m.norm(x)), norm=norm), images(batch=1), True)
    assert len(asked(served)) == 2
    assert left(served) == []


#: Norms in float32 between layers in half precision, as autocast has them; the activation and the
#: dtype that they are served with.
IN_FLOAT: dict[str, tuple[Callable[..., Any], str, torch.dtype]] = {
    "silu": (lambda m, x: F.silu(m.norm(x.float())).to(HALF), "silu", HALF),
    "none": (lambda m, x: m.norm(x.float()).to(HALF), "none", HALF),
    "add": (lambda m, x: F.relu(m.norm(m.other(x).float()) + x).to(HALF), "relu", HALF),
    "converted before": (lambda m, x: F.silu(m.norm(x.float()).to(HALF)), "silu", HALF),
    "copied": (lambda m, x: F.silu(m.norm(x.float().contiguous())).to(HALF), "silu", HALF),
    "read in float32": (
        lambda m, x: F.silu(m.norm(y := x.float())).to(HALF) * y.to(HALF), "silu", torch.float32
    ),
    "returned in float32": (
        lambda m, x: m.norm(x.float()).exp().to(HALF), "none", torch.float32
    ),
    "instance norm": (
        lambda m, x: F.silu(
            F.instance_norm(x.float(), weight=m.norm.weight, bias=m.norm.bias)
        ).to(HALF), "silu", HALF,
    ),
    "layer norm": (
        lambda m, x: F.gelu(
            F.layer_norm(x.permute(0, 2, 3, 1).float(), (WIDTH,), m.norm.weight, m.norm.bias)
        ).to(HALF).permute(0, 3, 1, 2), "gelu", HALF,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_FLOAT)
def test_conversions_become_part_of_the_operator(served: Any, name: str) -> None:
    function, activation, dtype = IN_FLOAT[name]
    model = network(function, HALF, norm=nn.GroupNorm(4, WIDTH), other=conv().to(HALF))
    compare(model, images(HALF), True, tolerance=2e-2)
    for p in asked(served):
        assert (p.activation, p.dtype) == (activation, str(dtype).removeprefix("torch."))
        assert p.weights == "float32"
    assert len(asked(served)) == 2
    assert left(served) == []
    conversions = [t for each in served.passes for t in each.targets() if "_to_copy" in t]
    assert (conversions == []) is (dtype is HALF)


@pytest.mark.parametrize("training", [False, True])
def test_rms_norm(served: Any, fused_rms_norm: None, training: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.permute(0, 2, 3, 1)
        y = F.silu(aten._fused_rms_norm(y, [WIDTH], m.a.weight, 0.1)[0])
        y = aten._fused_rms_norm(y, [WIDTH], None, None)[0] + y
        return y.permute(0, 3, 1, 2)

    compare(network(forward, a=nn.GroupNorm(1, WIDTH)), images(), training)
    if torch.__version__ < "2.10":  # which takes that of a CPU apart before the capture
        return
    found = {facts(p) for p in asked(served) if not p.is_backward}
    assert found == {("RMS norm", "silu", False, "weight"), ("RMS norm", "none", True, "none")}
    assert left(served) == []


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_scale_and_a_shift_of_each_sample(served: Any, affine: bool, training: bool) -> None:
    """A time embedding's, in inference; training has them as operators of their own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        scale, shift = m.embed(x.mean((2, 3)))[..., None, None].chunk(2, 1)
        return F.silu(m.norm(x) * (1 + scale) + shift)

    norm = nn.GroupNorm(4, WIDTH, affine=affine)
    compare(network(forward, norm=norm, embed=nn.Linear(WIDTH, 2 * WIDTH)), images(), training)
    ahead = asked(served)[0]
    assert ahead.adaptive is not training
    assert (ahead.activation == "silu") is not training


@pytest.mark.parametrize("training", [False, True])
def test_lines_and_volumes(served: Any, training: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        lines = x.permute(0, 2, 3, 1).flatten(1, 2).mT
        volumes = x.permute(0, 2, 3, 1).unflatten(1, (3, 2)).permute(0, 4, 1, 2, 3)
        return F.silu(m.norm(lines)).view(x.shape) + F.relu(m.norm(volumes)).reshape(x.shape)

    compare(network(forward, norm=nn.GroupNorm(4, WIDTH)), images(), training)
    assert {(p.n, p.p, p.c) for p in asked(served)} == {(2, 30, WIDTH)}
    assert len(asked(served)) == 2 + 2 * training


@pytest.mark.parametrize("training", [False, True])
def test_copies_into_channels_first_go(served: Any, training: bool) -> None:
    """PyTorch's group norm on CUDA wants them, and returns channels first; so a sum with a former
    result is of that layout. Results of the graph lie as PyTorch's do."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for block in (m.a, m.b, m.c):
            x = F.relu(block[1](block[0](x).contiguous()) + x)
        return x

    blocks = {name: nn.ModuleList([conv(), nn.GroupNorm(4, WIDTH)]) for name in "abc"}
    model = Around(forward, **blocks).to(HALF).to(memory_format=LAST)
    compare(model, images(HALF), training, tolerance=3e-2)
    assert [p.residual for p in asked(served)] == [True] * 3 * (1 + training)
    copies = [target for each in served.passes for target in each.targets() if "clone" in target]
    # Those of the graphs' results, and of the gradient that comes in.
    assert copies == ["aten.clone.default"] * (1 + 2 * training)


LEFT: dict[str, Callable[..., Any]] = {
    "statistics are read": lambda m, x: (
        y := aten.native_group_norm(x, m.norm.weight, m.norm.bias, 2, WIDTH, 30, 4, 1e-5)
    )[0] * y[1].mean(),
    "several dimensions": lambda m, x: F.layer_norm(x, x.shape[1:]),
    "running statistics": lambda m, x: m.tracked(x),
    "float64": lambda m, x: m.norm.double()(x.double()).float(),
    "channels first": lambda m, x: F.layer_norm(x, x.shape[3:]),
    "one pixel": lambda m, x: x * m.norm(F.max_pool2d(x, (6, 5))),
    "no norm of groups": lambda m, x: F.batch_norm(x, None, None, training=True),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_pytorch(served: Any, name: str) -> None:
    tracked = nn.InstanceNorm2d(WIDTH, track_running_stats=True)
    model = network(LEFT[name], norm=nn.GroupNorm(4, WIDTH), tracked=tracked)
    if name == "float64":
        model.norm.requires_grad_(False)
    compare(model, images(), True)
    assert asked(served) == []
    assert left(served)


def test_a_batch_norm_without_running_statistics_is_no_instance_norm(served: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        both = torch.cat([x, x + 1], 1)
        return F.batch_norm(x, None, None, training=True) + F.batch_norm(
            both, None, None, training=True
        ).mean(1, keepdim=True)

    compare(Around(forward), images(), True)
    assert asked(served) == []
    assert left(served)


@pytest.mark.parametrize("slow", ["forward", "backward", ""])
def test_both_directions_are_replaced_together(served: Any, slow: str) -> None:
    served.wins = lambda problem: problem.direction != slow
    model = network(lambda m, x: F.silu(m.norm(x)), norm=nn.GroupNorm(4, WIDTH))
    compare(model, images(), True)
    targets = [target for each in served.passes for target in each.targets()]
    assert targets.count("confpred.norm.default") == (not slow)
    assert targets.count("confpred.norm_backward.default") == (not slow)
    assert bool(left(served)) is bool(slow)


def test_without_a_model_nothing_is_asked(captured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "is_known", lambda name: name != NORM.name)  # the package has one
    model = network(lambda m, x: F.silu(m.norm(x)), norm=nn.GroupNorm(4, WIDTH))
    for training in (False, True):
        compare(model, images(), training)
    assert asked(captured) == []
    assert len(left(captured)) == 3


def test_other_sizes_are_computed(served: Any) -> None:
    model = network(lambda m, x: F.silu(m.norm(x)), norm=nn.GroupNorm(4, WIDTH))
    call = torch.compile(model, backend="confpred", dynamic=True)
    for batch in (2, 3, 5):
        y = images(batch=batch).requires_grad_()
        out = call(y)
        torch.testing.assert_close(out, model(y))
        torch.testing.assert_close(*(torch.autograd.grad(o.sum(), y)[0] for o in (out, model(y))))
    assert len(asked(served)) == 2


def added(m: Any, x: Tensor, other: Tensor) -> Tensor:
    return F.silu(m.norm(x.sin()) + other)


def written_inside(m: Any, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    out = added(m, x, other)
    other.mul_(2.0)
    return out, x + 1


def copied_and_written_inside(m: Any, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    out = x * F.silu(m.norm(other.contiguous()))
    other.mul_(2.0)
    return out, x + 1


#: Networks by the tensor that is written to between forward and backward, their second result;
#: PyTorch's backward pass reads a copy of it, or nothing.
WRITTEN: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "a copied input": lambda m, x, y: (F.silu(m.norm(x.contiguous())), x),
    "a copied input, read twice": lambda m, x, y: (F.silu(m.norm(x.contiguous())) + x.mean(), x),
    "an input": lambda m, x, y: (added(m, x, y), y),
    "an input, read twice": lambda m, x, y: (added(m, x, y) + y, y),
    "an input, by a view": lambda m, x, y: (added(m, x, y.view(y.shape)) + y.mT.sum(), y),
    "an input, by a part": lambda m, x, y: (added(m, x, y[None].unbind()[0]), y),
    "an input, by the network": written_inside,
    "a copied input, by the network": copied_and_written_inside,
    "a batch norm's": lambda m, x, y: (F.relu(m.batch(x.sin()) + y) + y, y),
    "a result": lambda m, x, y: (added(m, x, z := 2 * y), z),
    "a view of a result": lambda m, x, y: (added(m, x, z := 2 * y), z.mT),
    "a part of a result": lambda m, x, y: (added(m, x, z := 2 * y), z.unbind()[0]),
}  # fmt: skip
COMPILED = "a copied input, by the network"


@pytest.mark.parametrize(("kind", "inductor"), [
    *((kind, False) for kind in WRITTEN),
    pytest.param(COMPILED, True, marks=pytest.mark.slow(reason="C++ is compiled")),
])  # fmt: skip
def test_what_others_may_write_to_is_not_kept(served: Any, kind: str, inductor: bool) -> None:
    layers, found = {"norm": nn.GroupNorm(4, WIDTH), "batch": nn.BatchNorm2d(WIDTH)}, []
    model = Around(WRITTEN[kind], **layers)
    for call in (torch.compile(model, backend="confpred", options={"inductor": inductor}), model):
        x, other = images().requires_grad_(), images().requires_grad_("network" not in kind)
        out, written = call(x, other)
        with torch.no_grad():
            written.mul_(2.0)
        found.append(torch.autograd.grad(out.sum(), x))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    problems = [p for choice in served.asked for p in choice]
    assert not any(p.residual for p in problems)
    assert bool(problems) is not kind.startswith("a copied")


VECTORS = {
    "bias": nn.GroupNorm(4, WIDTH), "a batch norm's bias": nn.BatchNorm2d(WIDTH),
    "a repeated weight": nn.InstanceNorm2d(WIDTH, affine=True),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "inductor"), [
    *((kind, False) for kind in VECTORS),
    pytest.param("bias", True, marks=pytest.mark.slow(reason="C++ is compiled")),
])  # fmt: skip
def test_vectors_that_others_may_write_to_are_copied(
    served: Any, kind: str, inductor: bool
) -> None:
    """As a step of the optimizer before the backward pass of another loss writes to biases."""
    norm, found = copy.deepcopy(VECTORS[kind]), []
    model = Around(lambda m, x: F.silu(m.norm(x.sin())), norm=norm)
    vector = norm.weight if "weight" in kind else norm.bias
    for call in (torch.compile(model, backend="confpred", options={"inductor": inductor}), model):
        nn.init.uniform_(vector, 0.5, 1.5, torch.Generator().manual_seed(0))
        x = images().requires_grad_()
        out = call(x)
        with torch.no_grad():
            vector.add_(1.0)
        found.append(torch.autograd.grad(out.sum(), (x, *model.parameters())))
    torch.testing.assert_close(*found)
    assert sum(map(len, served.asked)) == 2


def test_what_pytorch_keeps_is_added(served: Any) -> None:
    """Its backward pass reads the input of a convolution."""
    model = Around(
        lambda m, x: added(m, x, x) * m.conv(x.mT.mT), norm=nn.GroupNorm(4, WIDTH), conv=conv()
    )
    compare(model.to(memory_format=LAST), images(), True)
    assert [p.residual for p in asked(served)] == [True, True]


FORWARD = (
    Norm(2, 30, WIDTH, 4, "float32", "silu", residual=True),
    Norm(2, 30, WIDTH, WIDTH, "bfloat16", "relu", affine="none"),
    Norm(2, 30, WIDTH, 3, "float16", weights="float16"),
    Norm(60, 1, WIDTH, 1, "bfloat16", "gelu", residual=True),
    Norm(2, 30, WIDTH, WIDTH, "float16", "leaky_relu_20", affine="weight"),
    Norm(60, 1, WIDTH, 1, "float32", "hardswish", affine="weight", centred=False),
)
ADAPTIVE = Norm(2, 30, WIDTH, 2, "float32", adaptive=True)  # of inference alone
PROBLEMS = (*FORWARD, ADAPTIVE, *(replace(p, direction="backward") for p in FORWARD))


class Launched:
    """A launch of the formula, in float32; operands lie as kernels read and write them."""

    def __init__(self, problem: Norm) -> None:
        self.problem = problem

    def run(self, *inputs: Tensor | None) -> list[Tensor]:
        p, given = self.problem, {}
        operands = NORM.operands(p)
        names = [operand for operand in operands if not operand.terms]
        for operand, t in zip(names, [t for t in inputs if t is not None], strict=True):
            assert (t.numel(), str(t.dtype)) == (prod(operand.shape), f"torch.{operand.dtype}")
            memory = t.detach().as_strided((t.numel(),), (1,)).view(operand.shape)
            given[operand.name] = memory.float().requires_grad_()
        x = given["in"].view(p.n, p.p, p.groups, -1)
        mean = x.mean((1, 3), keepdim=True) * p.centred
        invstd = ((x - mean).square().mean((1, 3), keepdim=True) + EPS).rsqrt()
        out = ((x - mean) * invstd).view(p.n, p.p, p.c)
        if "weight" in given:
            out = out * given["weight"].view(-1, 1, p.c)
        if "bias" in given:
            out = out + given["bias"].view(-1, 1, p.c)
        out = activated(p.activation, out + given.get("residual", 0.0))
        if p.is_backward:
            leaves = [given[n] for n in ("in", "residual", "weight", "bias") if n in given]
            found = torch.autograd.grad(out, leaves, given["out_grad"])
        else:
            found = (out, *[mean.view(p.n, -1)] * p.centred, invstd.view(p.n, -1))
        results = [t.detach().mT if t.dim() == 3 else t.detach() for t in found]
        kinds = [getattr(torch, operand.dtype) for operand in operands if operand.terms]
        return [t.to(kind) for t, kind in zip(results, kinds, strict=True)]


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_a_launch_and_pytorchs_operators_agree(
    p: Norm, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels get their operands in order, in the layout that they read."""
    torch.manual_seed(0)
    shape = (2, 6, 5, p.c) if p.p == 1 else (2, p.c, 6, 5)
    kinds = [getattr(torch, kind) for kind in (p.dtype, p.weights)]
    x, residual, grad = (torch.randn(shape).to(kinds[0]) for _ in range(3))
    weight, bias = (torch.rand((p.n, p.c) if p.adaptive else p.c).to(kinds[1]) for _ in range(2))
    vectors = [weight, bias][: AFFINE.index(p.affine)] + [None] * (2 - AFFINE.index(p.affine))
    more = residual if p.residual else None
    text, found = Assignment(p).text(), []
    for ready in (Launched(p), None):
        monkeypatch.setattr(Tensor, "is_cuda", True)  # as on a GPU
        monkeypatch.setattr(norms, "cached", lambda *_, ready=ready: ready)  # kernels need one
        if not p.is_backward:
            found.append(norms.group_forward(x, *vectors, more, [torch.tensor([EPS])], EPS, text))
            continue
        rows = x.float().movedim(-1 if p.p == 1 else 1, -1).reshape(p.n, p.p, p.groups, -1)
        mean = rows.mean((1, 3)) * p.centred
        invstd = ((rows - mean[:, None, :, None]).square().mean((1, 3)) + EPS).rsqrt()
        found.append(norms.group_backward(grad, x, *vectors, more, mean, invstd, text))
    tolerance = 1e-5 if kinds[0] is torch.float32 else 3e-2
    for a, b in zip(*found, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_tensors_of_other_kinds_are_not_launched() -> None:
    p, fits = PROBLEMS[0], norms._fits
    rows = PROBLEMS[3]
    assert fits(p, torch.Size((2, WIDTH, 6, 5)))
    assert fits(p, torch.Size((2, WIDTH, 2, 3, 5)))
    assert not fits(p, torch.Size((2, WIDTH, 6, 6)))
    assert not fits(p, torch.Size((2, 6, 5, WIDTH)))
    assert fits(rows, torch.Size((2, 6, 5, WIDTH)))
    assert not fits(rows, torch.Size((2, WIDTH, 6, 5)))
    assert not fits(rows, torch.Size((3, 6, 5, WIDTH)))


def test_explain_has_norms_as_rows(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # No model has these layers.
    monkeypatch.setattr(choosing, "choose_many", lambda problems, _: served.choose(problems))
    model = network(lambda m, x: F.silu(m.norm(x)), norm=nn.GroupNorm(4, WIDTH))
    found = confpred.explain(model, images(), "h100", training=True, dtype=HALF)
    rows = [row for row in found.rows if row.direction in ("forward", "backward")]
    assert [row.cells()[3] for row in rows] == [
        "forward group norm + silu", "backward group norm + silu",
    ]  # fmt: skip
    assert {(row.layers, row.sizes, row.expected_ms) for row in rows} == {
        (("norm",), (2, WIDTH, 6, 5), 1.0)
    }


@pytest.mark.slow(reason="Inductor compiles programs in C++")
@pytest.mark.parametrize("training", [False, True])
def test_inductor_computes_the_rest(served: Any, training: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.silu(m.norm(torch.tanh(x).contiguous())).exp() + F.relu(m.other(x) + x)

    layers = {"norm": nn.GroupNorm(4, WIDTH), "other": nn.InstanceNorm2d(WIDTH)}
    compare(network(forward, **layers), images(), training, inductor=True)
    assert len(asked(served)) == 2 + 2 * training


@pytest.mark.parametrize("activation", [
    nn.ELU(), nn.Hardsigmoid(), nn.Hardswish(), nn.ReLU6(), nn.Softplus(), nn.RReLU(0.2, 0.2),
    nn.SiLU(), nn.Hardtanh(),
])  # fmt: skip
def test_gradients_of_activations_lie_as_the_norm_reads_them(
    captured: Any, launches: Any, activation: nn.Module
) -> None:
    """PyTorch's fake tensors say of some that they lie as the activation's input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(2, 8), activation, nn.Conv2d(8, 8, 3, groups=8))
    model, x = model.to(memory_format=torch.channels_last), torch.randn(2, 8, 6, 6)
    twin = copy.deepcopy(model)
    confpred.optimize(model, inductor=False)
    for network in (model, twin):
        network(x).square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
