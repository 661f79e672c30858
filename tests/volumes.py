"""PyTorch's answer in float64 to convolutions of volumes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from confpred.problem.conv import ConvNd


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
