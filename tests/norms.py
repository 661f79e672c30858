"""Batch norm for tests: inputs, and PyTorch's answer in float64; and results of all norms."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from layers import H100, NORMS, random_norm
from references import outside, random_inputs

from confpred.families.protocol import Family
from confpred.families.registry import operation_of
from confpred.problem.device import Device
from confpred.problem.limits import ORDINARY_ERROR
from confpred.problem.norm import BatchNorm
from confpred.problem.operation import Launch
from confpred.problem.record import Record

FAMILIES = NORMS
random_problem = random_norm


def legal_rows(family: Family, problem: Record, device: Device = H100) -> list[int]:
    return np.flatnonzero(family.legal(problem, device)).tolist()


def inputs_of(
    problem: BatchNorm, seed: int, mean: float = 0.0, deviation: float | None = None
) -> dict[str, torch.Tensor]:
    """Inputs on the CPU; with `deviation`, normal ones around `mean` to normalise. Backward has the
    statistics that forward takes of them."""
    inputs = random_inputs(next(iter(FAMILIES.values())), problem, seed)
    if deviation is not None:
        normal = torch.randn(inputs["in"].shape, generator=torch.Generator().manual_seed(seed))
        inputs["in"] = (normal * deviation + mean).to(inputs["in"].dtype)
    if "invstd" in inputs:
        x = inputs["in"].double()
        inputs["mean"] = x.mean((0, 1, 2)).float()
        inputs["invstd"] = (x.var((0, 1, 2), correction=0) + 1e-5).rsqrt().float()
    return inputs


def expected(problem: BatchNorm, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, by its own batch norm and autograd."""
    p, t = problem, {name: x.double() for name, x in inputs.items()}
    x, residual = (t[n].permute(0, 3, 1, 2) if n in t else None for n in ("in", "residual"))
    weight, bias = t.get("weight"), t.get("bias")
    leaves = {"in": x, "residual": residual, "weight": weight, "bias": bias}
    for leaf in leaves.values():
        if leaf is not None:
            leaf.requires_grad_()
    running = [t[n].clone() if n in t else None for n in ("running_mean", "running_var")]
    momentum = float(t.get("momentum", torch.zeros(1)))
    eps = float(t.get("eps", torch.full((1,), 1e-5)))
    out = F.batch_norm(x, *running, weight, bias, not p.frozen, momentum, eps)
    out = out if residual is None else out + residual
    out = out if p.activation == "none" else getattr(F, p.activation)(out)
    if p.is_backward:
        given = {name: leaf for name, leaf in leaves.items() if leaf is not None}
        grads = torch.autograd.grad(out, list(given.values()), t["out_grad"].permute(0, 3, 1, 2))
        found = {f"{name}_grad": grad for name, grad in zip(given, grads, strict=True)}
    else:
        found = {"out": out.detach()}
        if not p.frozen:
            variance = x.detach().var((0, 2, 3), correction=0)
            found |= {"mean": x.detach().mean((0, 2, 3)), "invstd": (variance + eps).rsqrt()}
            found |= {"new_running_mean": running[0], "new_running_var": running[1]}
    return {n: x.permute(0, 2, 3, 1) if x.dim() == 4 else x for n, x in found.items()}


def wrong(
    problem: Record,
    launch: Launch,
    results: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """Return the outputs that are not `right`, with how many elements of each are off; or with the
    error in the 2-norm, where the launch states one."""
    outputs = [o for o in operation_of(problem).operands(problem) if o.terms]
    if launch.error is None:
        return dict(outside(outputs, results, right))
    errors = {
        o.name: float((results[o.name].double() - right[o.name]).norm() / right[o.name].norm())
        for o in outputs
    }
    assert launch.error == ORDINARY_ERROR[problem.dtype]
    return {name: error for name, error in errors.items() if not error <= launch.error}
