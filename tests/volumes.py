"""Convolutions of volumes for tests: random problems, and PyTorch's answer in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from layers import H100

from confpred.families.protocol import Family
from confpred.families.registry import families_in
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import DTYPES
from confpred.problem.device import Device

FAMILIES = {
    family.name: family
    for module in ("volume", "volume_wgrad")
    for family in families_in(f"confpred.families.volume.{module}")
}
WINDOWS = (
    (3, 3, 3), (3, 3, 3), (3, 3, 3), (5, 5, 5), (7, 7, 7), (3, 1, 1), (7, 1, 1), (1, 3, 3),
    (1, 7, 7), (3, 5, 5), (1, 1, 1), (2, 3, 4),
)  # fmt: skip


def random_problem(rng: random.Random, direction: str) -> ConvNd:
    """Return a small layer, which need not have a legal config: odd channels, one plane, tiles
    larger than the volume, padding larger than the window, a cut."""
    window = rng.choice(WINDOWS)
    padding = [rng.randint(0, size + 1) for size in window]
    stride, dilation = ([rng.choice((1, 1, 2)) for _ in range(3)] for _ in range(2))
    least = [
        max(1, d * (f - 1) + 1 - 2 * z) for d, f, z in zip(dilation, window, padding, strict=True)
    ]
    d, h, w = (low + rng.randint(0, 9) for low in least)
    c = rng.choice((1, 2, 3, 6, 8, 10, 16, 24, 54))
    width = (w + 2 * padding[2] - dilation[2] * (window[2] - 1) - 1) // stride[2] + 1
    fields: dict[str, Any] = {"bias": rng.random() < 0.5, "deterministic": False}
    if direction == "wgrad":
        fields["deterministic"] = rng.random() < 0.5
    else:
        fields |= {"activation": rng.choice(ACTIVATIONS), "residual": rng.random() < 0.5}
    return ConvNd(
        n=rng.choice((1, 1, 2, 3)), c=c, d=d, h=h, w=w,
        k=c * (1 if direction == "dgrad" else rng.choice((1, 1, 1, 2, 3))),
        t=window[0], r=window[1], s=window[2], stride=tuple(stride), padding=tuple(padding),
        dilation=tuple(dilation), cut=rng.choice((0, 0, min(2, width - 1))), groups=c,
        dtype=rng.choice(DTYPES), direction=direction, **fields,
    )  # fmt: skip


def random_legal_problem(
    rng: random.Random, family: Family, device: Device = H100, most_flops: int = 2**21
) -> ConvNd:
    """Return a `random_problem` that `family` has configs for."""
    direction = family.name.rpartition("_")[2]
    while True:
        problem = random_problem(rng, direction)
        if problem.flops <= most_flops and family.legal(problem, device).any():
            return problem


def expected(problem: ConvNd, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return PyTorch's answer in float64 on the CPU, by autograd of its forward convolution."""
    p = problem
    t = {
        name: x.double().movedim(-1, 1) if x.dim() > 1 else x.double() for name, x in inputs.items()
    }
    shapes = {"in": (p.n, p.c, *p.input_shape), "filter": (p.k, 1, *p.filter_shape)}
    x, weight = (
        t.get(name, torch.zeros(shape, dtype=torch.float64)).requires_grad_()
        for name, shape in shapes.items()
    )
    out = F.conv3d(x, weight, None, p.stride, p.padding, p.dilation, p.groups)[..., : p.q]
    if p.direction == "wgrad":
        found = {"filter_grad": torch.autograd.grad(out, weight, t["out_grad"])[0].movedim(1, -1)}
        return found | ({"bias_grad": t["out_grad"].sum((0, 2, 3, 4))} if p.bias else {})
    name = "out"
    if p.direction == "dgrad":
        name, out = "in_grad", torch.autograd.grad(out, x, t["out_grad"])[0]
    out = out.detach()
    if p.bias:
        out = out + t["bias"].view(-1, 1, 1, 1)
    out = out + t.get("residual", 0)
    out = out if p.activation == "none" else getattr(F, p.activation)(out)
    return {name: out.movedim(1, -1)}
