"""References for kernels: random inputs, PyTorch's answer in float64, and how near an
answer has to be."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from activations import activate
from torch.nn import grad as gradients

from confpred.families.protocol import Family
from confpred.measure.kernels import tolerance
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.operation import Operand


def random_inputs(family: Family, problem: Problem, seed: int) -> dict[str, torch.Tensor]:
    """Inputs as the operands have them: in [-1, 1) mostly, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(o: Operand) -> torch.Tensor:
        return (torch.rand(o.shape, generator=generator) * 2 - 1) * o.scale + o.center

    return {
        o.name: drawn(o).to(getattr(torch, o.dtype))
        for o in family.operation.operands(problem)
        if not o.terms
    }


def reference(problem: Problem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, on the CPU: no code in common with ours."""
    p = problem
    layer = (p.stride, p.padding, p.dilation, p.groups)
    t = {
        name: x.double().permute(0, 3, 1, 2) if x.dim() == 4 else x.double()
        for name, x in inputs.items()
    }
    if p.direction == "fprop":
        out = F.conv2d(t["in"], t["filter"], t.get("bias"), *layer) + t.get("residual", 0)
        found = {"out": activate(p.activation, out)}
    else:
        found = {}
    if p.direction == "dgrad":
        shape = (p.n, p.c, p.h, p.w)
        found["in_grad"] = gradients.conv2d_input(shape, t["filter"], t["out_grad"], *layer)
    if p.direction == "wgrad":
        shape = (p.k, p.group_width, p.r, p.s)
        found["filter_grad"] = gradients.conv2d_weight(t["in"], shape, t["out_grad"], *layer)
        if p.bias:
            found["bias_grad"] = t["out_grad"].sum((0, 2, 3))
    return {name: x.permute(0, 2, 3, 1) if x.dim() == 4 else x for name, x in found.items()}


def reference_nd(problem: ConvNd, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`reference` of convolution of any rank and layout: gradients are autograd's."""
    p, own = problem, slice(3 - problem.rank, None)
    last = p.is_channels_last
    t = {
        n: x.double().movedim(-1, 1) if last and x.dim() > 1 else x.double()
        for n, x in inputs.items()
    }
    x = t.get("in", torch.zeros(p.n, p.c, *p.input_shape[own], dtype=torch.float64))
    taps = t.get(
        "filter", torch.zeros(p.k, p.group_width, *p.filter_shape[own], dtype=torch.float64)
    )
    bias = torch.zeros(p.k, dtype=torch.float64) if p.direction != "fprop" else t.get("bias")
    leaves = [leaf.requires_grad_() for leaf in (x, taps) if p.direction != "fprop"]
    leaves += [bias.requires_grad_()] if leaves and bias is not None else []
    layer = (p.stride[own], p.padding[own], p.dilation[own], p.groups)
    out = getattr(F, f"conv{p.rank}d")(x, taps, bias, *layer)[..., : p.q]
    if p.direction == "fprop":
        found = {"out": _finished(p, out, t)}
    else:
        in_grad, filter_grad, bias_grad = torch.autograd.grad(out, leaves, t["out_grad"])
        if p.direction == "wgrad":
            found = {"filter_grad": filter_grad} | ({"bias_grad": bias_grad} if p.bias else {})
        else:
            offset = t["bias"].view(-1, *(1,) * p.rank) if p.bias else 0
            found = {"in_grad": _finished(p, in_grad + offset, t)}
    return {n: x.movedim(1, -1) if last and x.dim() > 1 else x for n, x in found.items()}


def _finished(p: ConvNd, out: torch.Tensor, t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = out + t.get("residual", 0)
    return activate(p.activation, out)


def outside(
    outputs: list[Operand],
    results: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> dict[str, int]:
    """How many elements of each output are not within its dtype's rounding of `expected`; an
    output that is right is left out."""
    found = {}
    for output in outputs:
        right = expected[output.name]
        relative, absolute = tolerance(output)
        bound = relative * right.abs() + absolute
        wrong = ~((results[output.name].double() - right).abs() <= bound)  # NaN is wrong too
        found[output.name] = int(wrong.sum())
    return {name: count for name, count in found.items() if count}


def some_rows(
    family: Family, problem: Problem, device: Device, rng: random.Random, kernels: int, each: int
) -> list[int]:
    """Legal configs of a few random kernels: for each, some of those that differ at run time."""
    rows = np.flatnonzero(family.legal(problem, device)).tolist()
    rng.shuffle(rows)
    found: dict[tuple[object, ...], list[int]] = {}
    for row in rows[:500]:
        sources = tuple(step.kernel for step in family.launch(problem, row).steps)
        if sources in found or len(found) < kernels:
            found.setdefault(sources, []).append(row)
    return [row for rows in found.values() for row in rows[:each]]
