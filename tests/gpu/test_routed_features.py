"""While enabled, what PyTorch can do with a convolution besides computing it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from layers_on_gpu import (
    LAST,
    LAYERS,
    SHAPE,
    Layer,
    OursFirst,
    close,
    make_layer,
    ours_first,
    pytorch_refused,
    served_by,
)
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import confpred

conv2d = F.conv2d  # PyTorch's own


@pytest.fixture(autouse=True)
def ours(monkeypatch) -> Iterator[OursFirst]:
    """Enabled, and kernels of ours serve every layer that they can."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with ours_first() as predictor, confpred.enabled(wait=True):
        yield predictor


@pytest.fixture
def layer() -> Layer:
    return make_layer(SHAPE, 64)


def depthwise() -> tuple[dict, Layer]:
    """A layer that kernels of ours serve in float32."""
    kwargs, channels = LAYERS["depthwise"]
    return kwargs, make_layer(kwargs, channels, torch.float32)


@pytest.mark.parametrize("function", [lambda *t, **k: F.conv2d(*t, **k), confpred.conv2d])
def test_gradients_of_gradients(function) -> None:
    kwargs, given = depthwise()

    def penalty(conv, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = conv(tensors[0], tensors[1], tensors[2], **kwargs)
        grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)

    mine = penalty(function, [t.requires_grad_() for t in given])
    theirs = penalty(conv2d, [t.detach().double().requires_grad_() for t in given])
    for a, b in zip(mine, theirs, strict=True):
        close(a, b, 1e-3)


def test_gradients_of_gradients_under_autocast() -> None:
    kwargs, (x, weight, bias) = depthwise()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = F.conv2d(x, weight, bias, **kwargs)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    (mine,) = torch.autograd.grad(grad.square().sum(), weight)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    out = conv2d(*exact, bias.double(), **kwargs)
    (grad,) = torch.autograd.grad(out.square().sum(), exact[0], create_graph=True)
    (theirs,) = torch.autograd.grad(grad.square().sum(), exact[1])
    assert mine.dtype is torch.float32
    close(mine, theirs, 5e-2)


@pytest.mark.parametrize("function", [lambda *t, **k: F.conv2d(*t, **k), confpred.conv2d])
def test_transforms(function) -> None:
    kwargs, (x, weight, bias) = depthwise()
    batch = torch.stack((weight, 2 * weight, -weight))
    exact = [t.double() for t in (x, weight, bias)]

    def mine(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return function(x, weight, bias.to(x.dtype), **kwargs)

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return conv2d(x, weight, bias.to(x.dtype), **kwargs)

    for _ in range(2):
        found = torch.func.vmap(mine, (None, 0))(x, batch)
        close(found, torch.func.vmap(theirs, (None, 0))(exact[0], batch.double()), 1e-3)
        found = torch.func.grad(lambda w: mine(x, w).square().sum())(weight)
        right = torch.func.grad(lambda w: theirs(exact[0], w).square().sum())(exact[1])
        close(found, right, 1e-3)
        found = torch.func.jvp(mine, (x, weight), (x, weight))[1]
        close(found, torch.func.jvp(theirs, tuple(exact[:2]), tuple(exact[:2]))[1], 1e-3)
        mine(x, weight)  # what serves plain tensors must not serve the transforms


@pytest.mark.parametrize("function", [lambda *t, **k: F.conv2d(*t, **k), confpred.conv2d])
def test_forward_mode(function, layer) -> None:
    x, weight, bias = layer
    function(x, weight, bias, **SHAPE)  # what serves plain tensors must not lose the tangents
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        out, tangent = forward_ad.unpack_dual(function(dual, weight, bias, **SHAPE))
    assert tangent is not None
    close(out, conv2d(x.double(), weight.double(), bias.double(), **SHAPE))
    close(tangent, conv2d(torch.ones_like(x).double(), weight.double(), **SHAPE))


def test_many_gradients_in_one_batch(layer) -> None:
    given = [t.requires_grad_() for t in layer]
    out = F.conv2d(*given, **SHAPE)
    grads = torch.randn(3, *out.shape, device="cuda", dtype=out.dtype)
    together = torch.autograd.grad(out, given, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        alone = torch.autograd.grad(out, given, grad, retain_graph=True)
        for a, b in zip(together, alone, strict=True):
            close(a[i], b, 1e-2)


def test_modes_see_the_calls(layer) -> None:
    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    F.conv2d(*layer, **SHAPE)
    with Seeing():
        F.conv2d(*layer, **SHAPE)
    assert seen[-1] is conv2d
    with FlopCounterMode(display=False) as counter:
        F.conv2d(*layer, **SHAPE)
    with FlopCounterMode(display=False) as own:
        conv2d(*layer, **SHAPE)
    assert counter.get_total_flops() == own.get_total_flops() > 0
    with torch.device("cuda"), pytorch_refused():
        F.conv2d(*layer, **SHAPE)


def test_a_trace_on_a_gpu_is_pytorchs(layer) -> None:
    x, weight, bias = layer
    for function in (lambda x: F.conv2d(x, weight, bias, **SHAPE),
                     lambda x: confpred.conv2d(x, weight, bias, **SHAPE)):  # fmt: skip
        traced = torch.jit.trace(function, x)
        assert "_convolution" in str(traced.inlined_graph)
        close(traced(2 * x), conv2d((2 * x).double(), weight.double(), bias.double(), **SHAPE))


def made(kwargs: dict = SHAPE) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(64, 64, 3, **kwargs).cuda().half().to(memory_format=LAST)


def test_hooks_fire(layer) -> None:
    module, x = made(), layer[0].requires_grad_()
    seen: dict[str, tuple[int, ...]] = {}
    module.register_forward_pre_hook(lambda m, given: seen.update(before=given[0].shape))
    module.register_forward_hook(lambda m, given, out: seen.update(after=out.shape))
    module.register_full_backward_hook(lambda m, x, out: seen.update(backward=x[0].shape))
    module.weight.register_hook(lambda grad: seen.update(weight=grad.shape))
    with pytorch_refused():
        module(x).sum().backward()
    assert seen == {
        "before": x.shape, "after": x.shape, "backward": x.shape, "weight": module.weight.shape,
    }  # fmt: skip
    once = module.weight.grad.clone()
    module.weight.grad = None
    module.weight.register_hook(lambda grad: grad * 2)
    module(x).sum().backward()
    close(module.weight.grad, 2 * once)


def test_a_module_that_is_used_twice_adds_its_gradients(layer) -> None:
    module, x = made(), layer[0]
    with pytorch_refused():
        module(module(x)).float().square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (module.weight, module.bias)]
    out = conv2d(conv2d(x.double(), *exact, **SHAPE), *exact, **SHAPE)
    out.square().sum().backward()
    close(module.weight.grad, exact[0].grad, 2e-2)
    close(module.bias.grad, exact[1].grad, 2e-2)


def test_a_parametrised_module(layer) -> None:
    module = torch.nn.utils.parametrizations.weight_norm(made())
    x = layer[0]
    with pytorch_refused():
        out = module(x)
        out.float().square().sum().backward()
    weight = module.weight.detach().double().requires_grad_()
    exact = conv2d(x.double(), weight, module.bias.detach().double(), **SHAPE)
    close(out.detach(), exact.detach(), 1e-2)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints(reentrant, autocast, layer) -> None:
    module, x = made(), layer[0].requires_grad_()
    module = module.float() if autocast else module

    def grads(function) -> list[torch.Tensor]:
        module.zero_grad()
        x.grad = None
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            function(x).float().square().sum().backward()
        return [x.grad.clone(), module.weight.grad.clone(), module.bias.grad.clone()]

    expected = grads(lambda x: module(F.silu(module(x))))
    found = grads(
        lambda x: checkpoint(lambda x: module(F.silu(module(x))), x, use_reentrant=reentrant)
    )
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return (
        nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2),
            nn.SiLU(),
            nn.Conv2d(64, 64, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False),
        )
        .cuda()
        .to(memory_format=LAST)
    )


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break_and_for_any_batch(autocast, after, ours) -> None:
    """Also `after` a program was compiled while PyTorch's own functions were in their places."""
    model = network() if autocast else network().half()
    exact = network().double()
    torch._dynamo.reset()
    if after:
        confpred.disable()
        x = torch.ones(1, 4, 1, 1, device="cuda")
        torch.compile(lambda x: F.conv2d(x, x.view(4, 1, 1, 1), groups=4))(x)
        confpred.enable(wait=True)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True)
    for batch in (4, 6, 12):
        images = torch.randn(batch, 3, 33, 31, device="cuda").half().to(memory_format=LAST)
        given = images.float().to(memory_format=LAST) if autocast else images.clone()
        torch._dynamo.mark_dynamic(given, 0)
        model.zero_grad()
        exact.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            out = compiled(given)
        out.float().square().sum().backward()
        right = exact(images.double())
        right.square().sum().backward()
        close(out.detach(), right.detach(), 2e-2)
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert (mine.grad.double() - theirs.grad).norm() <= 5e-2 * theirs.grad.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(served_by(direction, ours) for direction in ("fprop", "dgrad", "wgrad"))


def test_a_compiled_program_in_inference(ours) -> None:
    model = network().half().eval()
    images = torch.randn(4, 3, 33, 31, device="cuda").half().to(memory_format=LAST)
    with torch.no_grad():
        out = torch.compile(model, fullgraph=True)(images)
        assert served_by("fprop", ours)
        assert not served_by("dgrad", ours)
        close(out, network().double().eval()(images.double()), 1e-2)
