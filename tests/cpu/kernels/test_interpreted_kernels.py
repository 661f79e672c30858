"""Every family's kernels, interpreted on the CPU, against PyTorch in float64: what tests/gpu does
on a GPU, for a few small layers (`ptx` says what that can show)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from layers import ANY_WIDTH, CONVOLUTIONS, H100, random_legal_layer
from ptx.launch import interpret
from references import outside, random_inputs, reference, some_rows
from slow import slow_but

from confpred.families.protocol import Family, config_dict
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv2d import Problem

PROBLEMS = slow_but((1,), range(8), "the interpreter takes a second a problem")
KERNELS, CONFIGS = 2, 2  # of a problem, and of a kernel
MOST_FLOPS = 2**21

FAMILIES = CONVOLUTIONS
FPROP = [name for name in FAMILIES if name.endswith("fprop")]
WGRAD = [name for name in FAMILIES if name.endswith("wgrad")]
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("seed", PROBLEMS)
@every_family
def test_random_configs_of_a_random_problem_are_correct(family: Family, seed: int) -> None:
    rng = random.Random(seed)
    problem = random_legal_layer(rng, family, H100, MOST_FLOPS)
    inputs = random_inputs(family, problem, seed)
    expected = reference(problem, inputs)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    arch = ("sm_80", H100.arch)[seed % 2]
    for row in some_rows(family, problem, H100, rng, KERNELS, CONFIGS):
        wrong = outside(outputs, interpret(family, problem, row, inputs, arch), expected)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


@pytest.mark.parametrize(
    ("activation", "name"),
    slow_but(
        list(zip(ACTIVATIONS, itertools.cycle(FPROP))),
        itertools.product(ACTIVATIONS, FPROP),
        "all families call the same function",
    ),
)
def test_every_activation_is_right(activation: str, name: str) -> None:
    family = FAMILIES[name]
    groups = {"anywidth": 2, "dense": 1, "depthwise": 16, "grouped": 2}[name.split("_")[0]]
    taps = 13 if "large" in name else 3
    sizes = {"n": 2, "c": 16, "h": 7, "w": 9, "k": 24 if name in ANY_WIDTH else 16}
    sizes |= {"r": taps, "s": taps, "padding": taps // 2, "groups": groups}
    problem = Problem(**sizes, activation=activation, bias=True, residual=True)
    inputs, outputs = random_inputs(family, problem, 0), family.operation.operands(problem)[:1]
    row = int(np.flatnonzero(family.legal(problem, H100))[0])
    results = interpret(family, problem, row, inputs, H100.arch)
    assert not outside(outputs, results, reference(problem, inputs))


@every_family
def test_a_wrong_result_is_seen(family: Family) -> None:
    """The result of any other input, and a single changed element, are noticed."""
    rng = random.Random(1)
    problem = random_legal_layer(rng, family, H100, MOST_FLOPS)
    (row, *_) = some_rows(family, problem, H100, rng, 1, 1)
    inputs = random_inputs(family, problem, 0)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    results = interpret(family, problem, row, inputs, H100.arch)
    expected = reference(problem, inputs)
    assert not outside(outputs, results, expected)
    for name, tensor in inputs.items():
        if tensor.dim() == 4 and name != "residual":
            other = inputs | {name: tensor.flip(0, 1, 2, 3)}
            assert outside(outputs, results, reference(problem, other)), name
    results[outputs[0].name].view(-1)[0] += 1
    assert outside(outputs, results, expected) == {outputs[0].name: 1}


@pytest.mark.parametrize("name", slow_but(["grouped_wgrad"], WGRAD, "it interprets each twice"))
def test_repeatable_sums_do_not_depend_on_the_blocks_that_run_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, rng = FAMILIES[name], random.Random(4)
    while True:
        problem = random_legal_layer(rng, family, H100, MOST_FLOPS)
        problem = replace(problem, deterministic=True)
        if family.legal(problem, H100).any():
            break
    inputs = random_inputs(family, problem, 0)
    for row in some_rows(family, problem, H100, rng, 2, 2):
        together = interpret(family, problem, row, inputs, H100.arch)
        with monkeypatch.context() as patch:
            patch.setattr("ptx.launch.THREADS", 512)  # a few blocks at a time
            apart = interpret(family, problem, row, inputs, H100.arch)
        for name, result in together.items():
            same = np.array_equal(result.view(torch.uint8), apart[name].view(torch.uint8))
            assert same, f"{name}: {problem} {config_dict(family, row)}"
