"""Launches single configs of kernel families on PyTorch's tensors, with poison around them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn import grad as gradients

from confpred.cuda import driver
from confpred.cuda.compiler import compile_kernel
from confpred.device import Device
from confpred.families import Family, Launch
from confpred.operation import SCRATCH, ZEROED
from confpred.problem import Problem

GUARD = 4096  # bytes before and behind each operand
POISON = 0xFF  # every byte: NaN in all the dtypes

#: Largest relative error of rounding to the dtype and to its neighbour, and what sums of products
#: of values in [-1, 1) in float32 add: as much for each term.
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}
ABSOLUTE, ABSOLUTE_A_TERM = 1e-5, 4e-7


class Guarded:
    """Device memory of `size` bytes, poisoned, with poison before and behind it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")

    @property
    def inside(self) -> torch.Tensor:
        return self.memory[GUARD : GUARD + self.size]

    def intact(self) -> bool:
        ends = torch.cat((self.memory[:GUARD], self.memory[GUARD + self.size :]))
        return bool((ends == POISON).all())


class Config:
    """One config of one problem, loaded, with operands of its own.

    Args:
        inputs: by operand name, in the shapes and dtype of the operation's operands.
    """

    def __init__(
        self, family: Family, problem: Problem, row: int, inputs: dict[str, torch.Tensor]
    ) -> None:
        self.launch: Launch = family.launch(problem, row)
        operands = {o.name: o for o in family.operation.operands(problem)}
        self.outputs = [o for o in operands.values() if o.terms]
        sizes = {name: operand.bytes for name, operand in operands.items()}
        sizes |= {ZEROED: self.launch.zeroed_bytes, SCRATCH: self.launch.scratch_bytes}
        self.operands = {name: Guarded(size) for name, size in sizes.items() if size}
        for name, tensor in inputs.items():
            self.operands[name].inside.copy_(tensor.cuda().view(torch.uint8).flatten())
        if self.launch.zeroed_bytes:
            self.operands[ZEROED].inside.zero_()
        arch = driver.device_of(0).arch
        kernels = [
            driver.load(compile_kernel(step.source, arch), step.smem_bytes).kernel
            for step in self.launch.steps
        ]
        self._bound = driver.BoundLaunch(kernels, self.launch, list(self.operands))

    def enqueue(self) -> None:
        """Launch on the current stream."""
        addresses = [guarded.inside.data_ptr() for guarded in self.operands.values()]
        self._bound.enqueue(torch.cuda.current_stream().cuda_stream, addresses)

    def poison_outputs(self) -> None:
        for output in self.outputs:
            self.operands[output.name].inside.fill_(POISON)
        if SCRATCH in self.operands:
            self.operands[SCRATCH].inside.fill_(POISON)

    def results(self) -> dict[str, torch.Tensor]:
        """The outputs, on the CPU, in the shapes of the operation's operands.

        Raises:
            AssertionError: something was written outside of an operand, or the zeroed workspace is
                not zero again.
        """
        torch.cuda.synchronize()
        assert [name for name, guarded in self.operands.items() if not guarded.intact()] == []
        if ZEROED in self.operands:
            assert not self.operands[ZEROED].inside.any(), "the zeroed workspace is left dirty"
        return {
            o.name: self.operands[o.name].inside.cpu().view(getattr(torch, o.dtype)).view(o.shape)
            for o in self.outputs
        }


def random_inputs(family: Family, problem: Problem, seed: int) -> dict[str, torch.Tensor]:
    """Inputs in [-1, 1), on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {
        o.name: (torch.rand(o.shape, generator=generator) * 2 - 1).to(getattr(torch, o.dtype))
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
        found = {"out": out if p.activation == "none" else getattr(F, p.activation)(out)}
    elif p.direction == "dgrad":
        shape = (p.n, p.c, p.h, p.w)
        found = {"in_grad": gradients.conv2d_input(shape, t["filter"], t["out_grad"], *layer)}
    else:
        shape = (p.k, p.group_width, p.r, p.s)
        found = {"filter_grad": gradients.conv2d_weight(t["in"], shape, t["out_grad"], *layer)}
        if p.bias:
            found["bias_grad"] = t["out_grad"].sum((0, 2, 3))
    return {name: x.permute(0, 2, 3, 1) if x.dim() == 4 else x for name, x in found.items()}


def outside(config: Config, expected: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many elements of each output are not within its dtype's rounding of `expected`."""
    results = config.results()
    found = {}
    for output in config.outputs:
        right = expected[output.name]
        bound = ROUNDING[output.dtype] * right.abs() + ABSOLUTE + ABSOLUTE_A_TERM * output.terms
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
        sources = tuple(step.source for step in family.launch(problem, row).steps)
        if sources in found or len(found) < kernels:
            found.setdefault(sources, []).append(row)
    return [row for rows in found.values() for row in rows[:each]]
