"""Every family's kernels, interpreted on the CPU, against PyTorch in float64: what tests/gpu does
on a GPU, for a few small layers (`ptx` says what that can show)."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from layers import H100, random_legal_layer
from ptx.launch import run
from references import outside, random_inputs, reference, some_rows

from confpred.families import Family, all_families, config_dict
from confpred.problem import Problem

PROBLEMS = 8
KERNELS, CONFIGS = 2, 2  # of a problem, and of a kernel
MOST_FLOPS = 2**22

FAMILIES = all_families()
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def interpret(
    family: Family, problem: Problem, row: int, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs of config `row`."""
    operands = {o.name: o for o in family.operation.operands(problem)}
    found = run(
        family.launch(problem, row),
        {name: x.contiguous().view(torch.uint8).numpy().ravel() for name, x in inputs.items()},
        {o.name: o.bytes for o in operands.values() if o.terms},
    )
    return {
        name: torch.from_numpy(content.copy())
        .view(getattr(torch, operands[name].dtype))
        .view(operands[name].shape)
        for name, content in found.items()
    }


@pytest.mark.parametrize("seed", range(PROBLEMS))
@every_family
def test_random_configs_of_a_random_problem_are_correct(family: Family, seed: int) -> None:
    rng = random.Random(seed)
    problem = random_legal_layer(rng, family, H100, MOST_FLOPS)
    inputs = random_inputs(family, problem, seed)
    expected = reference(problem, inputs)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    for row in some_rows(family, problem, H100, rng, KERNELS, CONFIGS):
        wrong = outside(outputs, interpret(family, problem, row, inputs), expected)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


@every_family
def test_a_wrong_result_is_seen(family: Family) -> None:
    """That of any other input, and of a single changed element."""
    rng = random.Random(1)
    problem = random_legal_layer(rng, family, H100, MOST_FLOPS)
    (row, *_) = some_rows(family, problem, H100, rng, 1, 1)
    inputs = random_inputs(family, problem, 0)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    results = interpret(family, problem, row, inputs)
    expected = reference(problem, inputs)
    assert not outside(outputs, results, expected)
    for name, tensor in inputs.items():
        if tensor.dim() == 4 and name != "residual":
            other = inputs | {name: tensor.flip(0, 1, 2, 3)}
            assert outside(outputs, results, reference(problem, other)), name
    results[outputs[0].name].view(-1)[0] += 1
    assert outside(outputs, results, expected) == {outputs[0].name: 1}


@every_family
def test_deterministic_configs_do_not_depend_on_the_blocks_that_run_together(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    while True:
        problem = random_legal_layer(rng, family, H100, MOST_FLOPS)
        if problem.direction == "wgrad":
            problem = replace(problem, deterministic=True)
        if family.legal(problem, H100).any():
            break
    inputs = random_inputs(family, problem, 0)
    for row in some_rows(family, problem, H100, rng, 2, 2):
        together = interpret(family, problem, row, inputs)
        with monkeypatch.context() as patch:
            patch.setattr("ptx.launch.THREADS", 512)  # a few blocks at a time
            apart = interpret(family, problem, row, inputs)
        for name, result in together.items():
            same = np.array_equal(result.view(torch.uint8), apart[name].view(torch.uint8))
            assert same, f"{name}: {problem} {config_dict(family, row)}"
