"""Networks that no package of models has: a U-Net and a detector in the manner of YOLO.

Their shapes are those of the original U-Net (Ronneberger et al., 2015, with padding and batch norm,
as is usual now) and of a small one-stage detector with a cross-stage-partial backbone, an
aggregation path and three heads, without what turns its outputs into boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Sequential):
    """Convolution, batch norm and activation."""

    def __init__(self, c: int, k: int, size: int, stride: int, activation: nn.Module) -> None:
        convolution = nn.Conv2d(c, k, size, stride, size // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(k), activation)


def _twice(c: int, k: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(c, k, 3, 1, nn.ReLU()), ConvNorm(k, k, 3, 1, nn.ReLU()))


class UNet(nn.Module):
    """A mask of `classes` channels, of the input's height and width, which 16 divides."""

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.first = _twice(3, width)
        self.downs = nn.ModuleList(_twice(c, 2 * c) for c in widths[:-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in widths[-2::-1])
        self.joins = nn.ModuleList(_twice(2 * c, c) for c in widths[-2::-1])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = []
        for down in self.downs:
            skipped.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], 1))
        out: Tensor = self.last(x)
        return out


class _Bottleneck(nn.Module):
    def __init__(self, c: int, residual: bool) -> None:
        super().__init__()
        self.first, self.second = (ConvNorm(c, c, 3, 1, nn.SiLU()) for _ in range(2))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return x + out if self.residual else out


class _Stage(nn.Module):
    """Half of the channels go through bottlenecks, and all that they make is joined."""

    def __init__(self, c: int, k: int, depth: int, residual: bool = True) -> None:
        super().__init__()
        self.split = ConvNorm(c, k, 1, 1, nn.SiLU())
        self.blocks = nn.ModuleList(_Bottleneck(k // 2, residual) for _ in range(depth))
        self.join = ConvNorm(k // 2 * (2 + depth), k, 1, 1, nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.split(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        out: Tensor = self.join(torch.cat(parts, 1))
        return out


class Detector(nn.Module):
    """The raw outputs of all anchors, shape (N, `outputs`, anchors); 32 divides the input."""

    def __init__(self, width: int = 32, outputs: int = 85) -> None:
        super().__init__()
        w = [width << level for level in range(5)]
        self.stem = ConvNorm(3, w[0], 3, 2, nn.SiLU())
        self.downs = nn.ModuleList(ConvNorm(c, k, 3, 2, nn.SiLU()) for c, k in pairwise(w))
        self.stages = nn.ModuleList(
            _Stage(k, k, depth) for k, depth in zip(w[1:], (1, 2, 2, 1), strict=True)
        )
        self.up_joins = nn.ModuleList(
            _Stage(c + k, c, 1, residual=False) for c, k in ((w[3], w[4]), (w[2], w[3]))
        )
        self.lower = nn.ModuleList(ConvNorm(c, c, 3, 2, nn.SiLU()) for c in (w[2], w[3]))
        self.down_joins = nn.ModuleList(
            _Stage(c + k, k, 1, residual=False) for c, k in ((w[2], w[3]), (w[3], w[4]))
        )
        self.heads = nn.ModuleList(nn.Conv2d(c, outputs, 1) for c in w[2:])

    def forward(self, x: Tensor) -> Tensor:
        x, levels = self.stem(x), []
        for down, stage in zip(self.downs, self.stages, strict=True):
            x = stage(down(x))
            levels.append(x)
        fine, middle, coarse = levels[1:]
        middle = self.up_joins[0](torch.cat([middle, F.interpolate(coarse, scale_factor=2.0)], 1))
        fine = self.up_joins[1](torch.cat([fine, F.interpolate(middle, scale_factor=2.0)], 1))
        middle = self.down_joins[0](torch.cat([self.lower[0](fine), middle], 1))
        coarse = self.down_joins[1](torch.cat([self.lower[1](middle), coarse], 1))
        found = zip(self.heads, (fine, middle, coarse), strict=True)
        return torch.cat([head(level).flatten(2) for head, level in found], 2)


#: By the name that ``benchmarks/networks.py --dense`` knows them by.
OWN: dict[str, Callable[[], nn.Module]] = {"unet": UNet, "detector": Detector}
