"""The kernels of depthwise 1-D convolution, interpreted on the CPU, against PyTorch in float64."""

from __future__ import annotations

import random

import pytest
from layers import H100, random_legal_conv
from layers import LINES as FAMILIES
from ptx.launch import interpret
from references import outside, random_inputs, reference_nd, some_rows
from slow import slow_but

from confpred.families.protocol import Family, config_dict
from confpred.problem.conv import CONV

MOST_FLOPS = 2**16
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("seed", slow_but((2,), range(8), "the interpreter takes seconds"))
@every_family
def test_random_configs_of_a_random_layer_are_correct(family: Family, seed: int) -> None:
    rng = random.Random(f"{family.name} {seed}")
    problem = random_legal_conv(rng, family, H100, MOST_FLOPS)
    inputs = random_inputs(family, problem, seed)
    expected = reference_nd(problem, inputs)
    outputs = [o for o in CONV.operands(problem) if o.terms]
    arch = ("sm_80", H100.arch)[seed % 2]
    for row in some_rows(family, problem, H100, rng, 2, 2):
        wrong = outside(outputs, interpret(family, problem, row, inputs, arch), expected)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


@every_family
def test_a_wrong_result_is_seen(family: Family) -> None:
    rng = random.Random(1)
    problem = random_legal_conv(rng, family, H100, MOST_FLOPS)
    (row, *_) = some_rows(family, problem, H100, rng, 1, 1)
    inputs = random_inputs(family, problem, 0)
    outputs = [o for o in CONV.operands(problem) if o.terms]
    results = interpret(family, problem, row, inputs, H100.arch)
    for name in inputs.keys() & {"in", "out_grad", "filter"}:
        other = inputs | {name: inputs[name].flip(0, 1, 2) + 1}
        assert outside(outputs, results, reference_nd(problem, other)), name
