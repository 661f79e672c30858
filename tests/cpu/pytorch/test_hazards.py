"""Hazards inside a forward and between calls of an optimized model: outputs, gradients and buffers
are those of eager mode, or there is a clear error. `tests/gpu` has those that show on a GPU alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS, compare
from network_blocks import made
from optimized_pairs import LAST, Net, both, image, net, same
from torch import Tensor, nn
from torch.nn.utils import parametrize

import confpred


@pytest.fixture(autouse=True)
def _captured(captured) -> None:
    """All tests here capture as on a GPU."""


# ------------------------------------------------------------------------ inside the forward


MAKES = {
    "zeros": lambda m, x: torch.cat([x, torch.zeros((x.shape[0], 3, *x.shape[2:]))], 0),
    "arange": lambda m, x: x + torch.arange(x.shape[-1]),
    "full": lambda m, x: x + torch.full((x.shape[-1],), 0.5),
    "full of a value": lambda m, x: x + torch.full((1,), x.mean().item()),
    "as_tensor": lambda m, x: x + torch.as_tensor(x),
    "tensor": lambda m, x: x * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),
    "ones_like": lambda m, x: x + torch.ones_like(x),
    "linspace": lambda m, x: x + torch.linspace(0, 1, x.shape[-1], dtype=x.dtype, device=x.device),
    "autocast off": lambda m, x: _with(torch.autocast("cpu", enabled=False), lambda: x @ x.mT @ x),
    "no_grad": lambda m, x: x + _with(torch.no_grad(), lambda: m.norm.weight.sum() * x),
    "enable_grad": lambda m, x: x + _with(torch.enable_grad(), lambda: m.norm.weight.sum() * x),
    "asks for autocast": lambda m, x: x * (2 if torch.is_autocast_enabled("cpu") else 1),
    "asks for gradients": lambda m, x: x * (2 if torch.is_grad_enabled() else 1),
    "asks for the dtype": lambda m, x: x if x.dtype is torch.float32 else x * 2,
    "asks for an attribute": lambda m, x: x * (2 if hasattr(x, "shape") else 1),
    "asks for the device": lambda m, x: x * len(str(x.device)),
    "asks for a size": lambda m, x: x * (2 if x.shape[0] > 2 else 1),
    "in place": lambda m, x: (x + 1).mul_(2).add_(x),
    "into a slice": lambda m, x: _filled(x.clone()),
    "a conjugate view": lambda m, x: torch.complex(x, x).conj().imag,
    "a negative view": lambda m, x: torch._neg_view(x),
    "a gap": lambda m, x: torch.cat([x, x], 1)[:, ::2],
    "expanded": lambda m, x: x[:1].expand(3, -1, -1, -1),
    "offset": lambda m, x: torch.cat([x, x], 3)[..., 1:-3],
    "one row": lambda m, x: x[:, :, :1],
    "one pixel": lambda m, x: x[:, :, :1, :1],
    "no image": lambda m, x: x[:0],
    "one image": lambda m, x: x[:1],
    "transposed": lambda m, x: x.mT,
    "float64 inside": lambda m, x: F.conv2d(x.double(), m.conv.weight.double()[:3]).float(),
}  # fmt: skip


def _filled(x: Tensor) -> Tensor:
    x[:, 1:, ::2] = 3.0
    return x


def _with(context: Any, function: Callable[[], Tensor]) -> Tensor:
    with context:
        return function()


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_does(kind: str, training: bool) -> None:
    same(*both(net(MAKES[kind], training=training)), image())


class Inner(nn.Module):
    """A part in full precision, as of a loss or a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 300
        with torch.autocast("cpu", enabled=False):
            y = self.norm(self.second(y.float() ** 2)) / 1e6
        return self.second(y)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_that_is_turned_off_inside(training: bool, dtype: torch.dtype) -> None:
    """In float16 the square would be infinite."""
    ours, plain = both(made(Inner()).train(training).to(memory_format=LAST))
    with torch.autocast("cpu", dtype):
        found, expected = ours(image()), plain(image())
    assert found.dtype is expected.dtype is dtype
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)


def test_autocast_around_calls_and_its_dtype_change() -> None:
    ours, plain = both(net())
    for told in ({"enabled": False}, {"dtype": torch.bfloat16}, {"dtype": torch.float16},
                 {"enabled": False}):  # fmt: skip
        with torch.autocast("cpu", **told), torch.no_grad():
            found, expected = ours(image()), plain(image())
            with torch.autocast("cpu", enabled=False):
                torch.testing.assert_close(ours(image()), plain(image()))
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.1)


class Keeps(nn.Module):
    """Tensors that stay from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.cache: dict[Any, Tensor] = {}
        self.seen: list[Tensor] = []
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        key = tuple(x.shape)
        if key not in self.cache:
            self.cache[key] = torch.arange(x.shape[-1], dtype=x.dtype)
        y = self.conv(x) + self.cache[key]
        if self.before is not None:
            y = y + self.before
        self.before = y.detach()
        self.seen.append(y.detach())
        return y


def test_tensors_that_a_forward_keeps() -> None:
    ours, plain = both(Keeps().eval())
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(ours(image()), plain(image()))
        for model in (ours, plain):
            assert all(type(t) is Tensor for t in (*model.cache.values(), *model.seen))
        torch.testing.assert_close(ours.seen, plain.seen)
        torch.testing.assert_close(confpred.revert(ours)(image()), plain(image()))


def test_numbers_that_python_draws_are_drawn_at_each_call() -> None:
    ours, plain = both(net(lambda m, x: x * (1 + random.random())))
    found = []
    for model in (ours, plain):
        random.seed(5)
        with torch.no_grad():
            found.append([model(image()) for _ in range(3)])
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0][0], found[0][1])


def test_random_numbers_of_tensors_are_those_of_eager_mode() -> None:
    ours, plain = both(net(lambda m, x: F.dropout(x + torch.rand_like(x), 0.5), training=True))
    for model in (ours, plain):
        torch.manual_seed(5)
        model.found = [model(image()) for _ in range(2)]
    torch.testing.assert_close(ours.found, plain.found)


class Asserts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        y = self.conv(x)
        if fail:
            raise KeyError("of the forward")
        return y.relu()


def test_an_exception_in_a_forward_is_its_own() -> None:
    ours, plain = both(Asserts().eval())
    same(ours, plain, image())
    with pytest.raises(KeyError, match="of the forward"):
        ours(image(), fail=True)
    same(ours, plain, image())


# ------------------------------------------------------------------------------ between calls


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x)) * 3


def _forward_of_one(self: Any) -> Callable[..., Tensor]:
    return lambda x: self.last(self.conv(x)).sin()


def _wider(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, 1:5]


def _twice(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(x, weight * 2, bias, padding=1)


def _turn_cudnn() -> None:
    torch.backends.cudnn.enabled = not torch.backends.cudnn.enabled


def _turn_deterministic() -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


def _half_weights(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 0.5)


def _ema(model: Any) -> None:
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(kept, [torch.ones_like(k) for k in kept], 0.3)
    for p, k in zip(model.parameters(), kept, strict=True):
        p.data, _ = k, p.data


def _assign(model: Any) -> None:
    state = {k: v.clone() * (2 if v.is_floating_point() else 1)
             for k, v in model.state_dict().items()}  # fmt: skip
    model.load_state_dict(state, assign=True)


def _swap(model: Any) -> None:
    other = nn.Parameter(model.conv.weight.detach() * 2)
    torch.utils.swap_tensors(model.conv.weight, other)


def _step(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(image()).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "scale", 3.5),
    "a whole number": lambda m: setattr(m, "scale", 3),
    "a tensor for a number": lambda m: setattr(m, "scale", torch.tensor(1.5)),
    "a function": lambda m: setattr(m, "function", lambda model, x: x * 2),
    "the forward": lambda m: setattr(m, "forward", _forward_of_one(m)),
    "the class": lambda m: setattr(m, "__class__", Other),
    "the forward of a layer": lambda m: setattr(m.conv, "forward", _wider),
    "_conv_forward": lambda m: setattr(m.conv, "_conv_forward", _twice),
    "a hook": lambda m: m.conv.register_forward_hook(lambda _, __, out: out * 2),
    "a hook before": lambda m: m.norm.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
    "a hook of the root": lambda m: m.register_forward_hook(lambda _, __, out: out - 1),
    "a layer": lambda m: setattr(m, "conv", nn.Conv2d(3, 4, 1, bias=False).requires_grad_(False)),
    "a norm by nothing": lambda m: setattr(m, "norm", nn.Identity()),
    "eps": lambda m: setattr(m.norm, "eps", 0.5),
    "momentum": lambda m: setattr(m.norm, "momentum", 0.9),
    "stride": lambda m: setattr(m.last, "stride", (2, 2)),
    "data": lambda m: m.conv.weight.data.mul_(2),
    "data of a norm": lambda m: m.norm.running_var.data.add_(1),
    "data, another": lambda m: setattr(m.last.weight, "data", m.last.weight.data * 2),
    "copy_": _half_weights,
    "an average": _ema,
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "load_state_dict, assign": _assign,
    "swap_tensors": _swap,
    "SGD": _step(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "SGD, foreach": _step(lambda p: torch.optim.SGD(p, 0.1, foreach=True)),
    "SGD, fused": _step(lambda p: torch.optim.SGD(p, 0.1, fused=True)),
    "AdamW, fused": _step(lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
    "Adam, foreach": _step(lambda p: torch.optim.Adam(p, 0.1, foreach=True)),
    "train": lambda m: m.train(),
    "train and eval": lambda m: (m.train(), m(image()), m.eval()),
    "a norm in training": lambda m: m.norm.train(),
    "float64": lambda m: m.double().float(),
    "frozen": lambda m: m.conv.requires_grad_(False),
    "cudnn off": lambda m: _turn_cudnn(),
    "deterministic": lambda m: _turn_deterministic(),
    "parametrised": lambda m: parametrize.register_parametrization(m.conv, "weight", Doubled()),
}  # fmt: skip


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.fixture
def switches() -> Any:
    before = torch.backends.cudnn.enabled, torch.are_deterministic_algorithms_enabled()
    yield
    torch.backends.cudnn.enabled = before[0]
    torch.use_deterministic_algorithms(before[1])


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_between_calls_goes_unseen(change: str) -> None:
    ours, plain = both(net())
    same(ours, plain, image())
    before = ours(image()).detach()
    for model in (ours, plain):
        torch.manual_seed(4)
        CHANGES[change](model)
    same(ours, plain, image())
    if change not in ("momentum", "cudnn off", "deterministic", "float64", "frozen", "an average"):
        after, _ = ours(image()), plain(image())
        assert after.shape != before.shape or not torch.allclose(after, before, rtol=1e-3)
    confpred.revert(ours)
    same(ours, plain, image())


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    lambda p: torch.optim.Adam(p, 0.01, foreach=True),
])  # fmt: skip
@pytest.mark.parametrize("evaluating", [False, True])
def test_an_optimizer_that_has_state_goes_on(make: Any, evaluating: bool) -> None:
    """Also of a model that trains in `eval`, whose norms are frozen."""
    plain = net(training=not evaluating)
    ours = copy.deepcopy(plain)
    optimizers = [make(model.parameters()) for model in (ours, plain)]
    for step in range(4):
        if step == 2:
            strides = [p.stride() for p in ours.parameters()]
            confpred.optimize(ours, image())
            assert [p.stride() for p in ours.parameters()] == strides
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(image() + step).square().mean().backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_what_the_caller_writes_to_outputs_and_inputs() -> None:
    ours, plain = both(net())
    with torch.no_grad():
        x, y = image(), image()
        kept, right = ours(x), plain(y)
        first = kept.clone()
        x.mul_(3)
        y.mul_(3)
        torch.testing.assert_close(ours(x), plain(y))
        torch.testing.assert_close(kept, right)
        ours(x).zero_()
        torch.testing.assert_close(ours(x), plain(y))
        assert torch.equal(kept, first)


@pytest.mark.parametrize("function", [
    lambda m, x: x.mul_(2), lambda m, x: x.add_(m.scale), lambda m, x: _filled(x),
    lambda m, x: F.relu(x, inplace=True),
])  # fmt: skip
def test_what_a_forward_writes_to_its_input(function: Any) -> None:
    ours, plain = both(net(function))
    with torch.no_grad():
        x, y = image(), image()
        for _ in range(2):
            torch.testing.assert_close(ours(x), plain(y))
            torch.testing.assert_close(x, y)


@pytest.mark.slow(reason="it captures a hundred programs")
@pytest.mark.parametrize("name", [name for name, h in HAZARDS.items() if not h.needs_gpu])
def test_a_program_computes_the_same(captured, name: str) -> None:
    """Those of `tests/hazards` whose mechanism shows on the CPU, too."""
    compare(HAZARDS[name], "cpu")
    ran = [target for done in captured.passes for target in done.targets()]
    found = HAZARDS[name]
    assert any(t.startswith("confpred.") for t in ran) or found.refused or not found.kernels
