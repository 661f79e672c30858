"""A Triton kernel that reads its operand in order, between layers. Triton wants it in a file."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


@triton.jit
def scale(x, w, y, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + place, mask=place < n) * tl.load(w + place, mask=place < n)
    tl.store(y + place, value, mask=place < n)


class ScaledByPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.register_buffer("weights", torch.linspace(0, 1, 4 * 64 * 14 * 13))

    def forward(self, x: Tensor) -> Tensor:
        v = self.depthwise(x)
        y, n = torch.empty_like(v), v.numel()
        scale[((n + 1023) // 1024,)](v, self.weights, y, n, block=1024)
        return y.sum((2, 3))
