"""A small network, and how an optimized model is compared with one that is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from network_blocks import images, made
from torch import Tensor, nn

import confpred

LAST = torch.channels_last


def image(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return images(dtype, batch).contiguous(memory_format=LAST)


class Net(nn.Module):
    """Convolutions, a norm and an activation, around a function of the model and an image."""

    def __init__(self, function: Callable[[Net, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.function = function
        self.scale: Any = 2.0

    def forward(self, x: Tensor) -> Any:
        if self.function is not None:
            x = self.function(self, x)
        x = F.relu(self.norm(self.conv(x))) * self.scale
        return self.last(x)


def net(function: Callable[[Net, Tensor], Any] | None = None, *, training: bool = False) -> Net:
    return made(Net(function)).train(training).to(memory_format=LAST)


def both(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return an optimized model, and a copy that is not."""
    plain = copy.deepcopy(model)
    return confpred.optimize(model), plain


def same(ours: nn.Module, plain: nn.Module, *inputs: Tensor, gradients: bool | None = None) -> None:
    """Compare one call, and with gradients one backward pass."""
    modes = (False, True) if gradients is None else (gradients,)
    for mode in modes:
        found = []
        for model in (ours, plain):
            given = [x.detach().clone() for x in inputs]
            if mode:
                given = [x.requires_grad_(x.is_floating_point()) for x in given]
            with torch.set_grad_enabled(mode):
                out = model(*given)
            grads: list[Tensor | None] = []
            if mode and out.requires_grad:
                model.zero_grad()
                out.float().square().mean().backward()
                grads = [p.grad for p in model.parameters()] + [x.grad for x in given]
            found.append((out.detach(), grads, dict(model.named_buffers())))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert [g is None for g in found[0][1]] == [g is None for g in found[1][1]]
        for mine, other in zip(found[0][1], found[1][1], strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, other)
        torch.testing.assert_close(found[0][2], found[1][2])
