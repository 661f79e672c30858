"""Norms over groups of channels for tests: problems, inputs, and PyTorch's answer in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from layers import GROUP_NORMS, H100
from norms import legal_rows, wrong
from references import random_inputs

from confpred.families.protocol import Family
from confpred.problem.conv2d import ACTIVATIONS, DTYPES
from confpred.problem.group_norm import AFFINE, Norm
from confpred.problem.norm import EPS

__all__ = ["FAMILIES", "expected", "inputs_of", "legal_rows", "random_norm_problem", "wrong"]

FAMILIES = GROUP_NORMS
MOST_ELEMENTS = 24_000


def random_norm_problem(rng: random.Random, family: Family) -> Norm:
    """Return a small norm that `family` has configs for: a row or many, odd channels, groups of
    one channel and of all, weights of each kind, RMS norm."""
    while True:
        dtype, direction = rng.choice(DTYPES), family.direction
        activation, affine = rng.choice(ACTIVATIONS), rng.choice(AFFINE)
        p = rng.choice((1, 1, rng.randint(2, 40), rng.randint(41, 400)))
        n = rng.choice((1, 2, 5, rng.randint(6, 300)))
        c = rng.choice((1, 3, 7, 8, 10, 16, 24, 36, 48, 64, 96, 100, 144, 264, 328, 1000))
        groups = rng.choice((1, 1, *(g for g in range(1, c + 1) if c % g == 0)))
        if n * p * c > MOST_ELEMENTS:
            continue
        problem = Norm(
            n=n,
            p=p,
            c=c,
            groups=groups,
            dtype=dtype,
            activation=activation,
            residual=rng.random() < 0.4 and (direction == "forward" or activation != "none"),
            direction=direction,
            affine=affine,
            weights="float32" if affine == "none" else rng.choice(("float32", dtype)),
            adaptive=affine != "none" and rng.random() < 0.3,
            centred=(p, groups) != (1, 1) or rng.random() < 0.6,
        )
        if family.legal(problem, H100).any():
            return problem


def inputs_of(
    problem: Norm, seed: int, mean: float = 0.0, deviation: float | None = None
) -> dict[str, torch.Tensor]:
    """Inputs on the CPU; with `deviation`, normal ones around `mean` to normalise. Backward has the
    statistics that forward takes of them."""
    inputs = random_inputs(next(iter(FAMILIES.values())), problem, seed)
    if deviation is not None:
        normal = torch.randn(inputs["in"].shape, generator=torch.Generator().manual_seed(seed))
        inputs["in"] = (normal * deviation + mean).to(inputs["in"].dtype)
    if problem.is_backward:
        statistics = _statistics(problem, inputs["in"].double(), EPS)
        inputs |= {name: x.float() for name, x in statistics.items() if name in inputs}
    return inputs


def _statistics(p: Norm, x: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """Return the mean and 1 over the root of variance and eps, of (n, groups)."""
    grouped = x.view(p.n, p.p, p.groups, p.width)
    mean = grouped.mean((1, 3)) * p.centred
    variance = (grouped - mean[:, None, :, None]).square().mean((1, 3))
    return {"mean": mean, "invstd": (variance + eps).rsqrt()}


def expected(problem: Norm, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, by autograd; the statistics are those of ``in``."""
    p, t = problem, {name: x.double() for name, x in inputs.items()}
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
    out = out if p.activation == "none" else getattr(F, p.activation)(out)
    if not p.is_backward:
        return {"out": out.detach()} | {n: x.detach() for n, x in statistics.items()}
    grads = torch.autograd.grad(out, list(leaves.values()), t["out_grad"])
    return {f"{name}_grad": grad for name, grad in zip(leaves, grads, strict=True)}
