"""Hazards of lines and volumes: convolutions of one and three dimensions, and all in one network.

Results come with their strides, which are those of eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import confpred
from hazards.base import LAST, Run, gradients, hazard, loss_of

LAST_3D = torch.channels_last_3d
C = 16


def numbers(run: Run, *shape: int, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(run.device, dtype or run.dtype)


def lines(run: Run, length: int = 40, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """Return lines (2, C, length) that are a view of tokens (2, length, C)."""
    return numbers(run, 2, length, C, seed=seed, dtype=dtype).mT


def volumes(run: Run, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """Return volumes (2, C, 4, 6, 5), channels last."""
    x = numbers(run, 2, C, 4, 6, 5, seed=seed, dtype=dtype)
    return x.contiguous(memory_format=LAST_3D)


def strides(t: Tensor) -> list[int]:
    """Return the strides of the axes that have more than one place: of others they mean nothing."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1]


def infer(run: Run, model: nn.Module, *inputs: Tensor) -> list[Any]:
    """Return outputs, with their strides, of each of `inputs` in three calls."""
    with torch.no_grad():
        outs = [model(x) for x in inputs for _ in range(3)]
    return [(out, strides(out)) for out in outs]


def train(run: Run, model: nn.Module, *inputs: Tensor) -> list[Any]:
    """Return outputs, and gradients of inputs and parameters, with strides, of steps."""
    found: list[Any] = []
    for x in inputs:
        for _ in range(3):
            given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            with run.autocast():
                out = model(given * 1)
            model.zero_grad()
            loss_of(out).backward()
            assert given.grad is not None
            found += [out.detach(), strides(out), given.grad, strides(given.grad)]
            found.append([strides(p.grad) for p in model.parameters() if p.grad is not None])
    return [found, gradients(model)]


class Lines(nn.Module):
    """Layers of a speech encoder: pointwise, depthwise, a norm, a residual, a stride."""

    def __init__(self, **geometry: Any) -> None:
        super().__init__()
        self.wide = nn.Conv1d(C, 2 * C, 1)
        self.depthwise = nn.Conv1d(C, C, 7, **{"padding": 3, "groups": C, **geometry})
        self.norm = nn.BatchNorm1d(C)
        self.narrow = nn.Conv1d(C, C, 1, bias=False)
        self.last = nn.Conv1d(C, 8, 4, stride=3, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.wide(x), -2)
        y = self.narrow(F.silu(self.norm(self.depthwise(y))))
        return self.last(y + x if y.shape == x.shape else y)


@hazard(layers=8)
def lines_of_both_layouts(run: Run) -> Any:
    model = run.optimize(run.network(Lines))
    return infer(run, model, lines(run), lines(run).contiguous())


GEOMETRIES: tuple[dict[str, Any], ...] = (
    {"padding": 6, "dilation": 2}, {"padding": "same", "dilation": 3}, {"padding": "valid"},
    {"padding": 2, "padding_mode": "circular"}, {"padding": 1, "padding_mode": "reflect"},
    {"stride": 9, "padding": 0}, {"stride": 2, "groups": 4}, {"groups": 1},
)  # fmt: skip


@hazard(layers=32)
def geometries_of_lines(run: Run) -> Any:
    """Strides longer than filters, dilation, paddings of all kinds."""
    models = [run.optimize(run.network(lambda g=g: Lines(**g))) for g in GEOMETRIES]
    return [infer(run, model, lines(run, 64)) for model in models]


@hazard(layers=16)
def lines_in_training(run: Run) -> Any:
    model = run.optimize(run.network(Lines, train=True))
    x = lines(run, dtype=torch.float32)
    return train(run, model, x, x.contiguous()), [b.clone() for b in model.buffers()]


class Causal(nn.Module):
    """Short causal convolutions, padded on the left or cut at the end, with SiLU."""

    def __init__(self, groups: int = C) -> None:
        super().__init__()
        self.padded = nn.Conv1d(C, C, 4, groups=groups)
        self.cut = nn.Conv1d(C, C, 4, padding=3, groups=groups)
        self.wide = nn.Conv1d(C, C, 3, padding=4, dilation=2, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.padded(F.pad(x, (3, 0))))
        y = F.silu(self.cut(y)[..., : x.shape[-1]])
        return F.relu(self.wide(y)[..., :-4] + x)


@hazard(layers=6)
def causal_lines(run: Run) -> Any:
    model = run.optimize(run.network(Causal))
    return infer(run, model, lines(run).contiguous(), lines(run))


@hazard(layers=12)
def causal_lines_in_training(run: Run) -> Any:
    model = run.optimize(run.network(Causal, train=True))
    x = lines(run, dtype=torch.float32)
    return train(run, model, x.contiguous(), x)


class Gated(nn.Module):
    """Blocks of state-space models: layers read a part of the channels of a product, and a product
    reads theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(C, 2 * C), nn.Linear(C, C)
        self.cut = nn.Conv1d(C, C, 4, padding=3, groups=C)
        self.padded = nn.Conv1d(C, C, 3, groups=C)
        self.same = nn.Conv1d(C, C, 5, padding=2, groups=C)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.cut, self.padded, self.same):
            inner, gate = self.first(x).mT.chunk(2, 1)
            inner = F.pad(inner, (2, 0)) if layer is self.padded else inner
            y = F.silu(layer(inner)[..., : x.shape[1]]) * F.silu(gate)
            x = x + self.last(y.mT)
        return x


@hazard(layers=3)
def gated_lines(run: Run) -> Any:
    return infer(run, run.optimize(run.network(Gated)), lines(run).mT)


@hazard(layers=6)
def gated_lines_in_training(run: Run) -> Any:
    model = run.optimize(run.network(Gated, train=True))
    return train(run, model, lines(run, dtype=torch.float32).mT)


class Cuts(nn.Module):
    """Slices and paddings that are nearly those of a causal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(C, C, 4, padding=3, groups=C)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        padded = self.conv(F.pad(x, (3, 1)))
        other = self.conv(F.pad(x, (3, 0), value=1.0))
        twice = y[..., :-3] + y[..., 3:]
        return y[..., 1:-2], y[:, :8], y[..., :-3:2], twice, padded[..., :-3], other, y[..., :-3]


@hazard(layers=3)
def nearly_causal_lines(run: Run) -> Any:
    model, found = run.optimize(run.network(Cuts)), []
    with torch.no_grad():
        for _ in range(3):
            found += [(out, out.shape, strides(out)) for out in model(lines(run).contiguous())]
    return found


@hazard(layers=8)
def lengths_that_change(run: Run) -> Any:
    model, causal = run.optimize(run.network(Lines)), run.optimize(run.network(Causal))
    found = [infer(run, model, lines(run, length)) for length in (40, 41, 57, 20)]
    return found, [infer(run, causal, lines(run, n).contiguous()) for n in (40, 41, 57, 20)]


class Alone(Lines):
    """Without a norm, which takes unbatched lines for batches of vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.depthwise(x)))


@hazard(layers=4)
def no_batch_and_no_length(run: Run) -> Any:
    """Unbatched lines, batches of none, and lines that are too short, as in eager mode."""
    model = run.optimize(run.network(Alone))
    found = infer(run, model, lines(run)[0], lines(run)[:0], lines(run)[:1])
    short = [run.error(lambda n=n: infer(run, model, lines(run, n))) for n in (0, 1)]  # type: ignore[misc]
    return found, short


class Volumes(nn.Module):
    """Layers of a video network: depthwise in space, in time and in both; a norm, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(C, C, 1)
        self.space = nn.Conv3d(C, C, (1, 3, 3), padding=(0, 1, 1), groups=C, bias=False)
        self.norm = nn.BatchNorm3d(C)
        self.time = nn.Conv3d(C, C, (3, 1, 1), padding=(1, 0, 0), groups=C)
        self.both = nn.Conv3d(C, C, 3, padding=1, groups=C)
        self.last = nn.Conv3d(C, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.space(self.stem(x))))
        y = F.hardswish(self.time(y) + x)
        return self.last(F.silu(self.both(y)))


@hazard(layers=10)
def volumes_of_both_layouts(run: Run) -> Any:
    model = run.optimize(run.network(Volumes, layout=LAST_3D))
    return infer(run, model, volumes(run), volumes(run).contiguous())


@hazard(layers=20)
def volumes_in_training(run: Run) -> Any:
    last = run.optimize(run.network(Volumes, train=True, layout=LAST_3D))
    first = run.optimize(run.network(Volumes, train=True, layout=None))
    x = volumes(run, dtype=torch.float32)
    return train(run, last, x), train(run, first, x.contiguous())


class Mixed(nn.Module):
    """Frames of a volume, then lines of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(C, C, (3, 3, 3), padding=1, groups=C)
        self.frame = nn.Conv2d(C, C, 3, padding=1, groups=4)
        self.frame_norm = nn.BatchNorm2d(C)
        self.line = nn.Conv1d(C, C, 3, padding=1, groups=C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.volume(x).transpose(1, 2).flatten(0, 1)
        y = F.relu(self.frame_norm(self.frame(y.contiguous(memory_format=LAST))))
        return self.line(y.mean((2, 3)).unflatten(0, (x.shape[0], -1)).mT)


@hazard(layers=6)
def ranks_in_one_network(run: Run) -> Any:
    model = run.optimize(run.network(Mixed, layout=None))
    return infer(run, model, volumes(run), volumes(run).contiguous())


@hazard(layers=6)
def ranks_in_one_network_in_training(run: Run) -> Any:
    model = run.optimize(run.network(Mixed, layout=None, train=True))
    return train(run, model, volumes(run, dtype=torch.float32))


def normed() -> nn.Module:
    layers = (nn.Conv1d(C, C, 3, padding=1, groups=C), nn.Conv1d(C, C, 1))
    return nn.Sequential(*(part for layer in layers for part in (weight_norm(layer), nn.SiLU())))


@hazard(layers=6)
def lines_with_weight_norm(run: Run) -> Any:
    model, found = run.optimize(run.network(normed)), []
    for seed in range(2):
        found.append(infer(run, model, lines(run, seed=seed)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    run.changed(found[0], found[1])
    trained = run.optimize(run.network(normed, train=True))
    return found, train(run, trained, lines(run, dtype=torch.float32))


class Transposed(nn.Module):
    """Transposed layers of every rank, with and without a bias, dense and grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.ConvTranspose1d(C, C, 4, stride=2, padding=1, bias=False)
        self.odd = nn.ConvTranspose1d(C, C, 3, stride=2, output_padding=1, groups=C)
        self.image = nn.ConvTranspose2d(C, 8, 3, stride=2, groups=4, bias=False)
        self.volume = nn.ConvTranspose3d(C, C, (1, 2, 2), stride=(1, 2, 2), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.odd(self.line(x), [4 * x.shape[-1] + 1]))
        z = y[..., 1:].unflatten(2, (4, -1))[..., :8].contiguous(memory_format=LAST)
        return self.image(self.volume(z[:, :, None]).flatten(2, 3))


@hazard(layers=12)
def transposed_layers(run: Run) -> Any:
    model = run.optimize(run.network(Transposed, layout=None))
    trained = run.optimize(run.network(Transposed, layout=None, train=True))
    x = lines(run, dtype=torch.float32)
    return infer(run, model, lines(run)), train(run, trained, x)


@hazard(layers=8)
def lines_and_autocast(run: Run) -> Any:
    model, found = run.optimize(run.network(Lines).float()), []
    for dtype in (None, torch.bfloat16, None):
        with torch.autocast(run.device, dtype or run.dtype, enabled=dtype is not None):
            found += infer(run, model, lines(run, dtype=torch.float32))
    return found


CALLS: tuple[Callable[[Run], Tensor], ...] = (
    lines, volumes, lambda run: lines(run).contiguous(), lambda run: volumes(run).contiguous(),
    lambda run: run.images(batch=2).repeat(1, 6, 1, 1)[:, :C].contiguous(memory_format=LAST),
)  # fmt: skip


@hazard(layers=0, needs_gpu=True)
def eager_layers_of_every_rank(run: Run) -> Any:
    """By the one call, and by ``enable``."""
    found: list[Any] = []
    for make in CALLS:
        x = make(run)
        rank = x.dim() - 2
        conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        torch.manual_seed(0)
        layer = conv(C, C, 3, padding=1, groups=C).to(run.device, run.dtype)
        for wanted in (False, True):
            given = x.detach().clone().requires_grad_(wanted)
            if not run.is_optimized:
                out = F.silu(layer(given))
            else:
                with confpred.enabled():
                    layer(given)
                more = {"padding": 1, "groups": C, "activation": "silu"}
                out = confpred.convolution(given, layer.weight, layer.bias, **more)
            loss_of(out).backward()
            found += [out.detach(), strides(out), gradients(layer)]
            layer.zero_grad()
    return found
