"""Convolutions of any rank for tests: random ones, and inputs."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F

from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv import CONV, LAYOUTS, MAX_RANK, ConvNd
from confpred.problem.conv2d import DIRECTIONS, DTYPES

CONVOLVE: Any = (F.conv1d, F.conv2d, F.conv3d)


def random_conv(rng: random.Random, **fixed: Any) -> ConvNd:
    """Small, of any window; `fixed` are fields that are not drawn."""
    rank = fixed.get("rank") or rng.randint(1, MAX_RANK)
    groups, depth = fixed.pop("groups", None) or rng.choice((1, 2, 6)), range(MAX_RANK)
    direction = fixed.get("direction") or rng.choice(DIRECTIONS)
    own = [axis >= MAX_RANK - rank for axis in depth]
    taps = [rng.randint(1, 4) if has else 1 for has in own]
    stride, dilation = ([rng.randint(1, 3) if has else 1 for has in own] for _ in range(2))
    padding = [rng.randint(0, taps[axis]) if has else 0 for axis, has in enumerate(own)]
    span = [dilation[axis] * (taps[axis] - 1) + 1 - 2 * padding[axis] for axis in depth]
    sizes = [max(span[axis], 1) + rng.randint(0, 5) if own[axis] else 1 for axis in depth]
    last = (sizes[2] - span[2]) // stride[2]  # outputs but the first
    fields: dict[str, Any] = {
        "n": rng.randint(1, 3), "c": groups * rng.randint(1, 3), "k": groups * rng.randint(1, 3),
        **dict(zip("dhw", sizes, strict=True)), **dict(zip("trs", taps, strict=True)),
        "rank": rank, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
        "cut": rng.choice((0, rng.randint(0, last))), "layout": rng.choice(LAYOUTS),
        "dtype": rng.choice(DTYPES), "direction": direction, "bias": rng.random() < 0.5,
        "deterministic": direction == "wgrad" and rng.random() < 0.3,
    }  # fmt: skip
    if direction != "wgrad":
        fields |= {"activation": rng.choice(ACTIVATIONS), "residual": rng.random() < 0.5}
    return ConvNd(**fields | fixed)


def inputs_of(problem: ConvNd, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs as the operands have them, in [-1, 1), on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {
        o.name: (torch.rand(o.shape, generator=generator) * 2 - 1).to(getattr(torch, o.dtype))
        for o in CONV.operands(problem)
        if not o.terms
    }


def as_operand(problem: ConvNd, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of PyTorch's with the dimensions of the operand."""
    return (x.movedim(1, -1) if problem.is_channels_last and x.dim() > 1 else x).contiguous()
