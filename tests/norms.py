"""Norms for tests, batch norm and those of groups: inputs, and PyTorch's answer in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from activations import activate
from layers import GROUP_NORMS, H100, NORMS, ROW_NORMS, random_norm
from references import outside, random_inputs

from confpred.families.protocol import Family
from confpred.families.registry import operation_of
from confpred.problem.device import Device
from confpred.problem.limits import ORDINARY_ERROR
from confpred.problem.norm import EPS, BatchNorm
from confpred.problem.norm_of_groups import Norm
from confpred.problem.operation import Launch
from confpred.problem.record import Record

FAMILIES = NORMS
random_problem = random_norm


def layer_of(family: Any, n: int, h: int, w: int, c: int, **fields: Any) -> Any:
    """Return a layer of images that `family` may have configs for; of 32 groups, or three, where it
    has groups and they divide the channels."""
    fields = {"direction": family.direction, **fields}
    if family.name not in GROUP_NORMS:
        return BatchNorm(n, h, w, c, **fields)
    if family.name in ROW_NORMS:
        return Norm(n * h * w, 1, c, **fields)
    groups = next(g for g in (32, 3, 1) if c % g == 0)
    return Norm(n, h * w, c, groups, **fields)


def legal_rows(family: Family, problem: Record, device: Device = H100) -> list[int]:
    return np.flatnonzero(family.legal(problem, device)).tolist()


def inputs_of(
    problem: BatchNorm | Norm, seed: int, mean: float = 0.0, deviation: float | None = None
) -> dict[str, torch.Tensor]:
    """Inputs on the CPU; with `deviation`, normal ones around `mean` to normalise. Backward has the
    statistics that forward takes of them."""
    operation = operation_of(problem)
    family = next(f for f in FAMILIES.values() if f.operation is operation)
    inputs = random_inputs(family, problem, seed)
    if deviation is not None:
        normal = torch.randn(inputs["in"].shape, generator=torch.Generator().manual_seed(seed))
        inputs["in"] = (normal * deviation + mean).to(inputs["in"].dtype)
    if problem.is_backward:
        x = inputs["in"].double()
        if isinstance(problem, Norm):
            statistics = _statistics(problem, x, EPS)
        else:
            variance = x.var((0, 1, 2), correction=0)
            statistics = {"mean": x.mean((0, 1, 2)), "invstd": (variance + EPS).rsqrt()}
        inputs |= {name: x.float() for name, x in statistics.items() if name in inputs}
    return inputs


def expected(problem: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, by its autograd."""
    own = _expected_of_groups if isinstance(problem, Norm) else _expected_of_batch
    return own(problem, {name: x.double() for name, x in inputs.items()})


def _expected_of_batch(p: BatchNorm, t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    out = activate(p.activation, out)
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


def _statistics(p: Norm, x: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """Return the mean and 1 over the root of variance and eps, of (n, groups)."""
    grouped = x.view(p.n, p.p, p.groups, p.width)
    mean = grouped.mean((1, 3)) * p.centred
    variance = (grouped - mean[:, None, :, None]).square().mean((1, 3))
    return {"mean": mean, "invstd": (variance + eps).rsqrt()}


def _expected_of_groups(p: Norm, t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {n: t[n].requires_grad_() for n in ("in", "residual", "weight", "bias") if n in t}
    statistics = _statistics(p, t["in"], float(t["eps"]) if "eps" in t else EPS)

    def of_pixels(name: str) -> torch.Tensor:
        return statistics[name].repeat_interleave(p.width, 1)[:, None]

    def of_channels(name: str) -> torch.Tensor:
        return t[name].view(-1, 1, p.c)

    out = (t["in"] - of_pixels("mean")) * of_pixels("invstd")
    if p.affine != "none":
        out = out * of_channels("weight")
    if p.affine == "full":
        out = out + of_channels("bias")
    if p.residual:
        out = out + t["residual"]
    out = activate(p.activation, out)
    if not p.is_backward:
        return {"out": out.detach()} | {n: x.detach() for n, x in statistics.items()}
    grads = torch.autograd.grad(out, list(leaves.values()), t["out_grad"])
    return {f"{name}_grad": grad for name, grad in zip(leaves, grads, strict=True)}


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
