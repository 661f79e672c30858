"""Every family's kernels against an independent reference, over random problems and configs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from confpred.cuda import driver
from confpred.cuda.compiler import compile_kernel
from confpred.device import Device
from confpred.families import Family, all_families, config_dict
from confpred.problem import ACTIVATIONS, DTYPES, Problem

PROBLEMS = 120
CONFIGS = 6

_REFERENCE = {"none": lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}
#: Half a unit in the last place of the output's dtype, relative, with room for a neighbour.
_RELATIVE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def random_problem(seed: int) -> Problem:
    """Small, odd-shaped layers: one image, one group, tiles larger than the image, ..."""
    rng = random.Random(seed)
    width = rng.choice((8, 16, 32))
    groups = rng.choice((1, 1, 2, 3, 5, 8, 13))
    r, s = (rng.choice((3, 3, rng.randint(1, 7))) for _ in range(2))
    padding = (rng.randint(0, r + 1), rng.randint(0, s + 1))
    return Problem(
        n=rng.choice((1, 1, 2, 3, 5, 9)),
        c=width * groups,
        h=max(1, r - 2 * padding[0]) + rng.randint(0, 40),
        w=max(1, s - 2 * padding[1]) + rng.randint(0, 70),
        k=width * groups,
        r=r,
        s=s,
        padding=padding,
        groups=groups,
        dtype=rng.choice(DTYPES),
        bias=rng.random() < 0.5,
        activation=rng.choice(ACTIVATIONS),
    )


def tensors(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def uniform(*shape: int) -> torch.Tensor:
        values = torch.rand(shape, generator=generator, device="cuda") * 2 - 1
        return values.to(dtype)

    p = problem
    x = uniform(p.n, p.h, p.w, p.c).permute(0, 3, 1, 2)
    weight = uniform(p.k, p.r, p.s, p.group_width).permute(0, 3, 1, 2)
    return x, weight, uniform(p.k) if p.bias else None


def reference(
    problem: Problem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """PyTorch's convolution in float64, on the CPU: no code in common with ours."""
    out = F.conv2d(
        x.double().cpu(),
        weight.double().cpu(),
        None if bias is None else bias.double().cpu(),
        padding=problem.padding,
        groups=problem.groups,
    )
    return _REFERENCE[problem.activation](out)


def run(
    family: Family, problem: Problem, row: int, x: torch.Tensor, *rest: torch.Tensor | None
) -> torch.Tensor:
    """Launch one config on poisoned output with a guard before and behind; return NKPQ."""
    weight, bias = rest
    launch = family.launch(problem, row)
    compiled = compile_kernel(family.source(problem, row), driver.device_of(0).arch)
    loaded = driver.load(compiled, launch.smem_bytes)
    guard = 1024
    memory = torch.full(
        (guard + problem.output_elements + guard,), float("nan"), dtype=x.dtype, device="cuda"
    )
    out = memory[guard:-guard]
    driver.BoundLaunch(loaded.kernel, launch).enqueue(
        torch.cuda.current_stream().cuda_stream,
        *(t.data_ptr() if t is not None else 0 for t in (out, x, weight, bias)),
    )
    torch.cuda.synchronize()
    assert memory[:guard].isnan().all()
    assert memory[-guard:].isnan().all()
    return out.view(problem.n, problem.p, problem.q, problem.k).permute(0, 3, 1, 2)


@pytest.mark.parametrize("seed", range(PROBLEMS))
@pytest.mark.parametrize("family", all_families().values(), ids=list(all_families()))
def test_random_configs_of_a_random_problem_are_correct(
    family: Family, seed: int, device: Device
) -> None:
    problem = random_problem(seed)
    rows = np.flatnonzero(family.legal(problem, device))
    assert len(rows), f"nothing is legal for {problem}"
    x, weight, bias = tensors(problem, seed)
    expected = reference(problem, x, weight, bias)
    terms = problem.group_width * problem.r * problem.s
    bound = _RELATIVE[problem.dtype] * expected.abs() + 1e-5 + 2e-6 * terms
    for row in random.Random(seed).sample(rows.tolist(), min(CONFIGS, len(rows))):
        out = run(family, problem, row, x, weight, bias).double().cpu()
        wrong = ~((out - expected).abs() <= bound)  # NaN counts as wrong
        assert not wrong.any(), f"{int(wrong.sum())} wrong: {problem} {config_dict(family, row)}"


def test_the_check_can_fail(device: Device) -> None:
    """The same comparison sees a kernel that was given another layer's padding."""
    family = all_families()["grouped_fprop"]
    right = Problem(2, 16, 9, 9, 16, 3, 3, padding=(1, 1), groups=2)
    row = int(np.flatnonzero(family.legal(right, device))[0])
    x, weight, bias = tensors(right, 0)
    expected = reference(right, x, weight, bias)
    out = run(family, right, row, x.roll(1, dims=3), weight, bias).double().cpu()
    assert ((out - expected).abs() > 0.1).any()
