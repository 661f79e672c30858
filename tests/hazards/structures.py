"""Hazards of how a forward is built: sizes in geometry, one norm for several tensors, control flow,
operators of the user's, other tracers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as module_hooks

from hazards.base import Net, Run, gradients, hazard, loss_of


def _trained_and_asked(run: Run, model: nn.Module, batches: tuple[int, ...] = (4, 3, 5, 4)) -> Any:
    """Return what training and inference give for these batches."""
    found: list[Any] = []
    for seed, batch in enumerate(batches):
        out = run.step(model, run.floats(seed, batch=batch))
        with torch.no_grad(), run.autocast():
            found += [out, model(run.floats(seed + 9, batch=batch))]
        found += [gradients(model), [b.clone() for b in model.buffers()]]
        model.zero_grad()
    return found


class OpenGeometry(Net):
    """Filters for each image, as in CondConv, and geometry that follows the image."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        n, c, h, w = y.shape
        one = y.reshape(1, n * c, h, w).contiguous(memory_format=torch.channels_last)
        filters = self.depthwise.weight.to(y.dtype).repeat(n, 1, 1, 1)
        y = F.relu(F.conv2d(one, filters, padding=1, groups=n * c)).reshape(n, c, h, w)
        step = max(1, h // 8)
        y = F.conv2d(
            y, self.grouped.weight.to(y.dtype), stride=step, padding=step, dilation=step, groups=8
        )
        return self.head(y.mean((2, 3)))


@hazard(layers=3)
def geometry_from_sizes(run: Run) -> Any:
    model = run.optimize(run.network(OpenGeometry, train=True), dynamic=None)
    found = _trained_and_asked(run, model)
    for size in (48, 64, 32):
        with torch.no_grad(), run.autocast():
            found.append(model(run.floats(size=size)))
    return found


class SharedNorm(Net):
    """One norm over several levels, activations after all of them, statistics read in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        levels = [self.grouped_norm(self.grouped(y)) for y in (x, F.avg_pool2d(x, 2), x * 2)]
        levels = [F.relu(y) for y in levels]
        y = self.depthwise_norm(self.depthwise(x))
        scale = self.depthwise_norm.running_mean * 2
        z = self.pointwise(x) + scale.view(1, -1, 1, 1).to(y.dtype)
        means = [y.mean((2, 3)) for y in (*levels, F.relu(y + z))]
        return self.head(sum(means) * self.grouped_norm.running_var)


@hazard(layers=8, norms=4, replays=2)
def one_norm_for_several_tensors(run: Run) -> Any:
    return _trained_and_asked(run, run.optimize(run.network(SharedNorm, train=True)), (4, 4, 4))


class Chooses(nn.Module):
    """Control flow behind a layer, in half precision, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(64, 64, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(x)
        y = torch.cond(y.float().sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (y,))
        return self.grouped(y)


def _half_channels_first(run: Run, model: nn.Module) -> nn.Module:
    half = torch.bfloat16 if run.device == "cpu" else torch.float16
    return run.optimize(model.to(half).to(memory_format=torch.contiguous_format))


def _wide(run: Run, model: nn.Module, seed: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(4, 64, 14, 13, generator=numbers).to(run.device, dtype)


@hazard(layers=2)
def control_flow_operators(run: Run) -> Any:
    model = _half_channels_first(run, run.network(Chooses))
    with torch.no_grad():
        return [model(_wide(run, model, seed)) for seed in range(4)]


class Loops(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        start = (torch.zeros((), dtype=torch.int64), self.grouped(x))
        _, y = while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v.sin()), start)
        return self.grouped(y)


class Nests(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        region = torch.compiler.nested_compile_region(lambda v: v.sin() * 2)
        return self.grouped(region(region(self.grouped(x))))


@hazard(layers=4)
def loops_and_nested_regions(run: Run) -> Any:
    found = []
    for kind in (Loops, Nests):
        model = _half_channels_first(run, run.network(kind))
        with torch.no_grad():
            found += [model(_wide(run, model, seed)) for seed in range(3)]
    return found


@torch.library.custom_op("hazards::by_place", mutates_args=())
def by_place(x: Tensor) -> Tensor:
    """Weigh values by their place in memory, as an extension that reads its operand in order."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    place = torch.arange(x.numel(), device=x.device, dtype=torch.float32) / x.numel()
    return (flat * place.to(x.dtype)).view(x.shape)


@by_place.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_library = torch.library.Library("hazards", "FRAGMENT")
_library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))
_library.impl("tagged", by_place._init_fn, "CompositeExplicitAutograd")
torch.library.register_fake("hazards::tagged", by_place._abstract_fn, lib=_library)


class ReadsInOrder(nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.operator = operator

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.depthwise(x).contiguous()
        return self.operator(y).sum((2, 3)), y


@hazard(layers=2, replays=4)
def operators_that_read_memory_in_order(run: Run) -> Any:
    found = []
    for operator in (by_place, torch.ops.hazards.tagged):
        model = _half_channels_first(run, run.network(ReadsInOrder, operator))
        with torch.no_grad():
            outs = [model(_wide(run, model, seed)) for seed in range(4)]
        found += [(out, y, y.stride()) for out, y in outs]
    return found


@hazard(needs_gpu=True, layers=1, replays=2)
def a_triton_kernel_between_layers(run: Run) -> Any:
    from hazards.triton_kernel import ScaledByPlace

    model = _half_channels_first(run, run.network(ScaledByPlace))
    with torch.no_grad():
        return [model(_wide(run, model, seed)) for seed in range(4)]


class Complex(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x).float()
        return (torch.complex(y, y * 2) * 1j).real.mean((2, 3))


@hazard(layers=4, by_inductor=False)
def complex_numbers_in_a_forward(run: Run) -> Any:
    return _trained_and_asked(run, run.optimize(run.network(Complex, train=True)), (4, 4, 4))


@hazard()
def methods_of_a_class_replaced(run: Run) -> Any:
    class Own(Net):
        pass

    model = run.optimize(run.network(Own))
    found = [run.infer(model)]
    Own.forward = lambda self, x: self.features(x).mean((2, 3)) * 3  # type: ignore[method-assign]
    found.append(run.infer(model))
    Own.features = lambda self, x: Net.features(self, x) * 3  # type: ignore[method-assign]
    found.append(run.infer(model))

    class Later(nn.Identity):
        pass

    model.grouped_norm = Later()
    found.append(run.infer(model))
    Later.forward = lambda self, x: x * 3  # type: ignore[method-assign]
    found.append(run.infer(model))
    run.changed(*(outs[0][:, :10] for outs in found))
    return found


@hazard()
def hooks_of_all_modules(run: Run) -> Any:
    model = run.optimize(run.network())
    found = [run.infer(model)]

    def double(module: nn.Module, _: Any, out: Any) -> Any:
        return out * 2 if isinstance(module, nn.Conv2d) else None

    handle = module_hooks.register_module_forward_hook(double)
    try:
        found.append(run.infer(model))
    finally:
        handle.remove()
    found.append(run.infer(model))
    run.changed(found[0][0], found[1][0], found[2][0])
    return found


@hazard()
def traced_by_make_fx(run: Run) -> Any:
    model, x = run.optimize(run.network()), run.images()
    with torch.no_grad():
        found = [model(x)]
        found.append(make_fx(model)(x)(x))
    return found


@hazard(kernels=False)
def one_value_a_channel(run: Run) -> Any:
    """The error is eager mode's, and the next call is captured."""

    class Deep(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.mean(1, keepdim=True).expand(-1, 64, 1, 1)
            return F.relu(self.grouped_norm(self.pointwise(x)))

    model = run.optimize(run.network(Deep, train=True))
    return run.error(lambda: model(run.floats(batch=1, size=1)))


class Remembers(Net):
    """Writes a parameter, and puts another tensor in the place of a buffer, at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[float] = []
        self.learned = torch.ones(64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.grouped.weight.mul_(0.5)
        y = self.features(x) * self.learned.to(x.device).view(1, -1, 1, 1)
        self.calls = self.calls + 1
        return self.head(y.mean((2, 3)).to(self.head.weight.dtype) * self.calls)


@hazard(layers=4)
def example_inputs_of_a_forward_that_writes(run: Run) -> Any:
    """`optimize` with them leaves the state as it was, a plain tensor that is learned too."""
    model = run.network(Remembers, train=True)
    before = [p.detach().clone() for p in model.parameters()]
    with run.autocast():
        model = run.optimize(model, run.floats())
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)
    found = []
    for seed in range(3):
        out = run.step(model, run.floats(seed))
        found += [out, model.calls.clone(), gradients(model), model.learned.grad]
        model.zero_grad()
    return found


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyConv2d(64, 3), nn.LazyBatchNorm2d(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x).mean((2, 3))
        return out


@hazard()
def lazy_layers(run: Run) -> Any:
    """With example inputs and without."""
    found = []
    for examples in ((), (run.floats(),)):
        torch.manual_seed(3)
        model = run.optimize(Lazy().to(run.device).train(), *examples)
        for seed in range(3):
            out = model(run.floats(seed))
            loss_of(out).backward()
            found.append(out.detach())
        found.append([p.shape for p in model.parameters()])
    return found
