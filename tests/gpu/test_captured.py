"""Operators of captured graphs against float64, on poisoned memory, and small networks whole."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import activate
from cpu.pytorch.network_blocks import (
    AFTER,
    WIDTH,
    Bottleneck,
    ConvNeXtBlock,
    InvertedResidual,
    Network,
    NormBlock,
    made,
    step,
)
from layers_on_gpu import LAST, OursFirst, ours_first, served_by
from torch import Tensor, nn

import confpred
from confpred.problem.conv2d import ACTIVATIONS
from confpred.pytorch.rewrite import normalising
from confpred.pytorch.run import choosing, operators, pointwise  # noqa: F401  torch.ops has the operators
from confpred.pytorch.run import fold as folding
from confpred.pytorch.run.convolve import Call, Geometry

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Largest error as a part of the norm: one rounding to the dtype, and sums in float32 or TF32.
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-3}
EXACT = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def ours() -> Iterator[OursFirst]:
    """Kernels of confpred serve every layer that they can."""
    with ours_first() as predictor:
        yield predictor
    torch._dynamo.reset()


@pytest.fixture
def norms_by_ours(ours: OursFirst, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of confpred serve every norm that they can, too."""
    for operation in ("batch_norm", "norm"):
        monkeypatch.setitem(choosing._predictors, operation, ours)
    monkeypatch.setattr(normalising, "_gain_ms", lambda *choices: 1.0)


def poison() -> None:
    """Leave NaN in the memory that the next allocations get."""
    sizes = [2**k for k in range(9, 27, 2) for _ in range(3)]
    kept = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes]
    del kept


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    numbers = torch.Generator("cuda").manual_seed(seed + sum(shape))
    x = torch.randn(shape, device="cuda", generator=numbers).to(dtype)
    return x.contiguous(memory_format=LAST) if x.dim() == 4 else x


def off(a: Tensor, exact: Tensor) -> float:
    """Return the relative error in the 2-norm; infinite with a NaN."""
    assert a.shape == exact.shape
    assert a.isfinite().all()
    return ((a.double() - exact).norm() / exact.norm().clamp_min(1e-6)).item()


# --------------------------------------------------------------------------------------- folds


@dataclass
class Norm:
    """A batch norm to fold, with the convolution before it."""

    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor
    variance: Tensor
    bias: Tensor | None
    filters: Tensor | None
    eps: float
    dtype: torch.dtype

    @classmethod
    def drawn(cls, rng: random.Random) -> Norm:
        channels = rng.choice((1, 3, 8, 24, 33, 64, 100, 257, 1024))
        kind, own = rng.choice(DTYPES), rng.choice(DTYPES)
        seed = rng.randrange(10**6)

        def vector(dtype: torch.dtype, place: int, optional: bool = True) -> Tensor | None:
            if optional and rng.random() < 0.25:
                return None
            return normal(channels, dtype=dtype, seed=seed + place)

        mean = normal(channels, dtype=own, seed=seed)
        variance = (normal(channels, seed=seed + 9).abs() + 0.1).to(own)
        filters = None
        if rng.random() < 0.7:
            sides = rng.choice(((1, 1), (3, 3), (5, 5), (1, 7))), rng.choice((1, 3, 8, 40, 200))
            filters = normal(channels, sides[1], *sides[0], dtype=rng.choice(DTYPES), seed=seed)
            if rng.random() < 0.5:
                filters = filters.contiguous()
        eps = rng.choice((1e-5, 1e-3, 1e-1))
        return cls(
            vector(kind, 1), vector(kind, 2), mean, variance, vector(rng.choice(DTYPES), 3),
            filters, eps, rng.choice(DTYPES),
        )  # fmt: skip

    def exact(self) -> tuple[Tensor, Tensor]:
        scale = (self.variance.double() + self.eps).rsqrt()
        scale = scale if self.gamma is None else scale * self.gamma.double()
        shift = (
            -self.mean.double() if self.bias is None else self.bias.double() - self.mean.double()
        )
        shift = shift * scale if self.beta is None else shift * scale + self.beta.double()
        if self.filters is None:
            return scale, shift
        return self.filters.double() * scale.view(-1, 1, 1, 1), shift


@pytest.mark.parametrize("count", [1, folding.LAYERS, folding.LAYERS + 1, 3 * folding.LAYERS + 5])
@pytest.mark.parametrize("seed", range(4))
def test_folds_of_many_layers_in_few_launches(seed: int, count: int, monkeypatch) -> None:
    rng = random.Random(f"{seed} {count}")
    norms, launches = [Norm.drawn(rng) for _ in range(count)], []
    launch = folding._launch
    monkeypatch.setattr(folding, "_launch", lambda *a: launches.append(1) or launch(*a))
    poison()
    names = [str(norm.dtype).removeprefix("torch.") for norm in norms]
    found = torch.ops.confpred.fold(
        [n.gamma for n in norms], [n.beta for n in norms], [n.mean for n in norms],
        [n.variance for n in norms], [n.bias for n in norms], [n.filters for n in norms],
        [n.eps for n in norms], names,
    )  # fmt: skip
    assert len(launches) == -(-count // folding.LAYERS)
    for place, norm in enumerate(norms):
        first, second = found[2 * place : 2 * place + 2]
        right = norm.exact()
        result = torch.float32 if norm.filters is None else norm.dtype
        assert first.dtype is second.dtype is result
        if norm.filters is not None:
            assert first.is_contiguous(memory_format=LAST)
        assert off(first, right[0]) <= EXACT[result], norm
        assert off(second, right[1]) <= EXACT[result], norm


def test_a_fold_that_the_kernel_cannot_take_is_pytorchs() -> None:
    norm = Norm.drawn(random.Random(0))
    for mean in (norm.mean.double(), norm.mean.repeat(2)[::2], torch._neg_view(norm.mean)):
        exact = Norm(norm.gamma, norm.beta, mean, norm.variance, None, None, 1e-5, torch.float16)
        found = folding.fold(
            [exact.gamma], [exact.beta], [mean], [exact.variance], [None], [None], [1e-5],
            ["float16"],
        )  # fmt: skip
        for mine, right in zip(found, exact.exact(), strict=True):
            assert off(mine, right) <= 2e-6


# ------------------------------------------------------------------------------- scale and shift


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("channels", [1, 7, 8, 24, 33, 64, 100, 1280])
def test_scale_and_shift(channels: int, activation: str, dtype: torch.dtype, monkeypatch) -> None:
    launched, launch = [], pointwise._launch
    monkeypatch.setattr(
        pointwise, "_launch", lambda *a, **k: launched.append(launch(*a, **k)) or launched[-1]
    )
    scale, shift = normal(channels, seed=1), normal(channels, seed=2)
    for place, (n, h, w) in enumerate(((3, 7, 5), (1, 1, 1), (2, 40, 33))):
        x, other = (normal(n, channels, h, w, dtype=dtype, seed=3 + i) for i in range(2))
        for residual in (None, other):
            exact = x.double() * scale.double().view(-1, 1, 1) + shift.double().view(-1, 1, 1)
            exact = exact if residual is None else exact + residual.double()
            exact = activate(activation, exact)
            poison()
            found = torch.ops.confpred.scale_shift(x, scale, shift, residual, activation)
            assert found.dtype is dtype
            assert found.stride() == x.stride()
            assert off(found, exact) <= EXACT[dtype], (place, residual is None)
            again = pointwise.scale_shift(
                x.clone(), scale, shift, residual, activation, in_place=True
            )
            assert torch.equal(again, found)
    assert launched
    assert all(launched)


def test_scale_and_shift_of_what_the_kernel_cannot_take() -> None:
    scale, shift = normal(16, seed=1), normal(16, seed=2)
    plain = normal(2, 16, 9, 7, dtype=torch.float16)
    odd = torch.empty(plain.numel() + 1, dtype=torch.float16, device="cuda")[1:]
    odd = odd.view(2, 9, 7, 16).permute(0, 3, 1, 2).copy_(plain)
    cases = (
        plain.contiguous(), plain.double(), odd, torch._neg_view(plain), plain[:, :, ::2],
        plain[:1].expand(3, -1, -1, -1), plain[:0],
    )  # fmt: skip
    for x in cases:
        exact = F.silu(x.double() * scale.double().view(-1, 1, 1) + shift.double().view(-1, 1, 1))
        found = torch.ops.confpred.scale_shift(x, scale, shift, None, "silu")
        assert found.shape == x.shape
        assert not x.numel() or off(found, exact) <= 1e-3


# ---------------------------------------------------------------------------------- convolutions


@dataclass
class Layer:
    """A convolution of random sizes that confpred has kernels for, or has not."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry

    @classmethod
    def drawn(cls, seed: int) -> Layer:
        rng = random.Random(seed)
        dtype = rng.choice(DTYPES)
        width = rng.choice((1, 1, 8, 16, 32, 6))
        groups = rng.choice((1, 2, 4, 8)) * (8 if width == 1 else 1)
        r, s = rng.choice(((3, 3), (5, 5), (1, 1), (7, 7), (1, 3)))
        dilation = (rng.choice((1, 1, 2)),) * 2
        stride = (rng.choice((1, 2)), rng.choice((1, 2)))
        padding = (rng.randrange(r), rng.randrange(s))
        n, h, w = rng.randint(1, 5), rng.randint(13, 33), rng.randint(13, 33)
        channels = width * groups
        weight = normal(channels, width, r, s, dtype=dtype, seed=seed) / (width * r * s) ** 0.5
        bias = normal(channels, dtype=dtype, seed=seed) if rng.random() < 0.5 else None
        x = normal(n, channels, h, w, dtype=dtype, seed=seed + 1)
        return cls(
            x, weight.contiguous(memory_format=LAST), bias, (stride, padding, dilation, groups)
        )

    @property
    def error(self) -> float:
        return ERROR[self.x.dtype]


def in_float64(*given: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in given]


@pytest.mark.parametrize("seed", range(60))
def test_the_operator_of_convolutions(seed: int) -> None:
    layer, rng = Layer.drawn(seed), random.Random(seed)
    activation = rng.choice(ACTIVATIONS)
    plain = F.conv2d(*in_float64(layer.x, layer.weight, layer.bias), *layer.geometry)
    residual = normal(*plain.shape, dtype=layer.x.dtype, seed=5) if seed % 2 else None
    scale, shift = normal(plain.shape[1], seed=6), normal(plain.shape[1], seed=7)
    without = F.conv2d(*in_float64(layer.x, layer.weight, None), *layer.geometry)
    scaled = without * scale.double().view(-1, 1, 1) + shift.double().view(-1, 1, 1)
    call = Call(layer.geometry, activation).text()
    for given, exact in (
        ((layer.x, layer.weight, None, layer.bias, residual, call), plain),
        ((layer.x, layer.weight, scale, shift, residual, call), scaled),
    ):
        right = exact if residual is None else exact + residual.double()
        right = activate(activation, right)
        poison()
        found = torch.ops.confpred.conv2d(*given)
        assert found.dtype is layer.x.dtype
        # Two roundings where the scale follows PyTorch's convolution.
        assert off(found, right) <= 3 * layer.error, layer.geometry


@pytest.mark.parametrize("seed", range(60))
def test_the_operator_of_gradients(seed: int) -> None:
    layer, rng = Layer.drawn(seed), random.Random(seed)
    has_bias = layer.bias is not None
    exact = [
        t.detach().requires_grad_() for t in in_float64(layer.x, layer.weight) if t is not None
    ]
    bias = torch.zeros(layer.weight.shape[0], device="cuda", dtype=torch.double).requires_grad_()
    out = F.conv2d(*exact, bias, *layer.geometry)
    grad = normal(*out.shape, dtype=layer.x.dtype, seed=8)
    right = torch.autograd.grad(out, [*exact, bias], grad.double())
    masks = [
        (True, True, has_bias),
        (True, False, False),
        (False, True, False),
        (False, True, True),
    ]
    for mask in masks:
        call = Call(layer.geometry, mask=mask).text()
        given = grad if rng.random() < 0.5 else grad.contiguous()
        poison()
        found = torch.ops.confpred.conv2d_backward(given, layer.x, layer.weight, call)
        for asked, mine, theirs in zip(mask, found, right, strict=True):
            assert asked or not mine.numel()
            assert not asked or off(mine, theirs) <= 3 * layer.error, (mask, layer.geometry)


# -------------------------------------------------------------------------------------- networks

NETWORKS = {
    "inverted residual": lambda: (InvertedResidual(64), InvertedResidual(64, nn.ReLU6)),
    "bottleneck": lambda: (Bottleneck(64, 64), Bottleneck(64, 64, stride=2)),
    "convnext": lambda: (ConvNeXtBlock(64), nn.GELU(), ConvNeXtBlock(64)),
}


def network(name: str, dtype: torch.dtype = torch.float16) -> nn.Module:
    """Return a network in evaluation."""
    torch.manual_seed(0)
    model = made(Network(*NETWORKS[name](), channels=64)).cuda().to(dtype)
    for module in model.modules():
        if type(module).__name__ == "DropPath":
            module.forward = lambda x: x  # what is random differs
    return model


def images(dtype: torch.dtype = torch.float16, batch: int = 4, seed: int = 1) -> Tensor:
    return normal(batch, 3, 63, 57, dtype=dtype, seed=seed)


def as_good(mine: Tensor, theirs: Tensor, exact: Tensor, slack: float = 5e-3) -> None:
    """Assert that `mine` is about as near to `exact` as PyTorch's result in the same dtype."""
    assert mine.dtype is theirs.dtype
    assert off(mine, exact.double()) <= 2 * off(theirs, exact.double()) + slack


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_in_inference(name: str, graphs: bool, ours, caplog) -> None:
    model = network(name)
    keys, exact = list(model.state_dict()), copy.deepcopy(model).double()
    with torch.inference_mode(), caplog.at_level(logging.INFO, logger="confpred"):
        theirs = [model(images(seed=seed)) for seed in range(4)]
        assert confpred.optimize(model, images(), graphs=graphs) is model
        poison()
        for seed in range(4):
            as_good(model(images(seed=seed)), theirs[seed], exact(images(seed=seed).double()))
        for batch in (1, 7, 4):
            other = images(batch=batch, seed=2)
            assert off(model(other), exact(other.double())) < 2e-2
        assert off(model(images().contiguous()), exact(images().double())) < 2e-2
    assert served_by("fprop", ours)
    assert list(model.state_dict()) == keys
    assert "no CUDA graph" not in caplog.text


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_in_training(
    name: str, autocast: bool, graphs: bool, ours, norms_by_ours, caplog
) -> None:
    """Outputs, gradients and statistics of steps, with a change of the weights between them."""
    dtype = torch.float32 if autocast else torch.float16
    mine, theirs = (network(name, dtype).train() for _ in range(2))
    exact = network(name, dtype).double().train()
    caplog.set_level(logging.INFO, logger="confpred")
    confpred.optimize(mine, graphs=graphs)
    for seed in range(4):
        outs, x = [], images(dtype, seed=seed)
        for model in (mine, theirs, exact):
            model.zero_grad()
            given = x.double() if model is exact else x
            with torch.autocast("cuda", torch.float16, enabled=autocast and model is not exact):
                outs.append(model(given))
            (outs[-1].float().square().sum() / 8).backward()
        as_good(*(out.detach() for out in outs))
        grads = [
            torch.cat([p.grad.double().flatten() for p in model.parameters()])
            for model in (mine, theirs, exact)
        ]
        as_good(*grads)
        for a, b in zip(mine.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            for parameter in (p for model in (mine, theirs, exact) for p in model.parameters()):
                parameter.mul_(0.95)
    assert all(served_by(direction, ours) for direction in ("fprop", "dgrad", "wgrad"))
    has_norms = any(isinstance(module, nn.BatchNorm2d) for module in theirs.modules())
    if autocast and has_norms:  # a norm with weights in float16 is PyTorch's
        assert any(name and name.startswith("batch_norm") for name in ours.chosen)
    assert "no CUDA graph" not in caplog.text


@pytest.mark.parametrize("frozen", [False, True], ids=["batch", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", AFTER)
def test_norms_with_what_follows(
    name: str, dtype: torch.dtype, frozen: bool, ours, norms_by_ours
) -> None:
    norms_are_as_good(name, dtype, frozen, ours)


@pytest.mark.parametrize("frozen", [False, True], ids=["batch", "frozen"])
@pytest.mark.parametrize("name", ["none", "silu in place", "add, relu"])
def test_norms_beside_inductor(name: str, frozen: bool, ours, norms_by_ours) -> None:
    norms_are_as_good(name, torch.float16, frozen, ours, inductor=True)


class RowNorm(nn.LayerNorm):
    """A layer norm of the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


GROUPS = {
    "group": lambda: nn.GroupNorm(2, WIDTH), "one group": lambda: nn.GroupNorm(1, WIDTH),
    "instance": lambda: nn.InstanceNorm2d(WIDTH, affine=True), "row": lambda: RowNorm(WIDTH),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["none", "silu", "add, relu", "read twice"])
@pytest.mark.parametrize("kind", GROUPS)
def test_norms_of_groups(kind: str, name: str, dtype: torch.dtype, ours, norms_by_ours) -> None:
    norms_are_as_good(name, dtype, False, ours, GROUPS[kind]())


@pytest.mark.parametrize("name", ["silu", "add, relu"])
@pytest.mark.parametrize("kind", GROUPS)
def test_norms_of_groups_beside_inductor(kind: str, name: str, ours, norms_by_ours) -> None:
    norms_are_as_good(name, torch.float16, False, ours, GROUPS[kind](), inductor=True)


def norms_are_as_good(
    name: str, dtype: torch.dtype, frozen: bool, ours: OursFirst, norm: nn.Module | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Compare outputs, gradients and running statistics of steps that are replayed; also outputs of
    inference where a `norm` takes the batch norm's place."""
    model = made(NormBlock(AFTER[name]))
    model.norm = norm or model.norm
    model = model.cuda().to(memory_format=LAST).train()
    model.norm.train(not frozen)
    if name.startswith("hardswish"):
        # Its slope jumps by a half at 3: one value within a rounding of it moves a sum of 3,600 by
        # as much as half of its gradient. So no value comes near.
        nn.init.constant_(model.norm.weight, 0.3)
        nn.init.zeros_(model.norm.bias)
    theirs, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    confpred.optimize(model, **{"inductor": False} | options)
    for seed in range(4):
        x, found = normal(4, 8, 31, 29, seed=seed), []
        poison()
        for each in (model, theirs, exact):
            given = (x.double() if each is exact else x).detach().requires_grad_()
            with torch.autocast("cuda", dtype, enabled=each is not exact):
                found.append(step(each, list(each.parameters()), given))
        for mine, other, right in zip(*found, strict=True):
            as_good(mine, other, right)
        for a, b in zip(model.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    families = ("batch_norm",) if norm is None else ("group_norm", "row_norm")
    assert any(family and family.startswith(families) for family in ours.chosen)
    if norm is not None:
        with torch.no_grad(), torch.autocast("cuda", dtype):
            mine, other = model(x), theirs(x)
        with torch.no_grad():
            as_good(mine, other, exact(x.double()))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_replay_launches_no_kernel_from_python(name: str, monkeypatch) -> None:
    """Neither forward nor backward: all of it is one CUDA graph each."""
    from confpred.pytorch.run import convolve

    model, calls = network(name, torch.float32).train(), []
    confpred.optimize(model)
    forward = convolve.forward
    monkeypatch.setattr(convolve, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    counts = []
    for seed in range(5):
        calls.clear()
        with torch.autocast("cuda", torch.float16):
            out = model(images(torch.float32, seed=seed))
        out.float().square().mean().backward()
        counts.append(len(calls))
    assert counts[0] > 0
    assert counts[-2:] == [0, 0]


def test_random_numbers_of_the_user_go_on_beside_graphs() -> None:
    model: Any = network("inverted residual")
    confpred.optimize(model)
    drawn = []
    with torch.no_grad():
        for optimized in (False, True):
            torch.manual_seed(5)
            for seed in range(4):
                if optimized:
                    model(images(seed=seed))
                drawn.append(torch.rand(3, device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(drawn[:4], drawn[4:], strict=True))
