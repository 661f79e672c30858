"""Chains of linear layers for tests: random ones, their inputs, and answers in float64."""

from __future__ import annotations

import random

import torch
from activations import activate

from confpred.problem.conv2d import ACTIVATIONS
from confpred.problem.linear_chain import LINEAR_CHAIN, LinearChain

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def random_chain(rng: random.Random, most_width: int = 50, **fixed: object) -> LinearChain:
    """Odd sizes and even ones, long chains and short."""
    layers = rng.choice((1, 1, 2, 3, 4, 8))
    outputs = rng.randint(16, most_width)
    fields = {
        "batch": rng.choice((2, 3, 5, 8, 17)),
        "inputs": rng.randint(16, most_width),
        "hidden": outputs if layers == 1 else rng.choice((16, 32, rng.randint(16, most_width))),
        "outputs": outputs,
        "layers": layers,
        "dtype": rng.choice(tuple(DTYPES)),
        "activation": rng.choice(("relu", *ACTIVATIONS)),
        "bias": rng.random() < 0.8,
        "last": rng.random() < 0.5,
    }
    return LinearChain(**(fields | fixed))  # type: ignore[arg-type]


def chain_inputs(problem: LinearChain, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs by name, each between minus its scale and its scale, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {
        o.name: ((torch.rand(o.shape, generator=generator) * 2 - 1) * o.scale).to(DTYPES[o.dtype])
        for o in LINEAR_CHAIN.operands(problem)
        if not o.terms
    }


def expected(problem: LinearChain, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the answer in float64."""
    x = inputs["in"].double()
    for index in range(problem.layers):
        x = x @ inputs[f"weight{index}"].double().T
        if problem.bias:
            x = x + inputs[f"bias{index}"].double()
        x = activate(problem.activated(index), x)
    return x


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative, in the 2-norm; NaN where anything is."""
    return float((found.double() - right).norm() / right.norm())
