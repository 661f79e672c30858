"""The kernels of depthwise 1-D convolution, interpreted on the CPU, against PyTorch in float64."""

from __future__ import annotations

import random

import pytest
from layers import H100
from ptx.launch import interpret
from references import outside, random_inputs, reference_nd, some_rows
from slow import slow_but

from confpred.errors import InvalidProblem
from confpred.families.protocol import Family, config_dict
from confpred.families.registry import kernels_of
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import DTYPES

FAMILIES = {
    n: f for n, f in kernels_of(ConvNd(n=1, c=1, w=1, k=1, s=1)).items() if n.startswith("line_")
}
MOST_FLOPS = 2**16
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def random_layer(rng: random.Random, family: Family) -> ConvNd:
    """A small layer that `family` computes: rows of any length, causal or not, strided, dilated."""
    direction = family.name.split("_")[1]
    while True:
        channels, taps = rng.randint(1, 5), rng.choice((1, 2, 3, 4, 5, 7, 11, 31, 64))
        multiplier = 1 if direction == "dgrad" else rng.choice((1, 1, 2, 3))
        finishes = direction != "wgrad"
        try:
            problem = ConvNd(
                rank=1, n=rng.randint(1, 3), c=channels, k=channels * multiplier, groups=channels,
                w=rng.choice((8, 16, 24, 40, 33, 50, 64, 96)), s=taps,
                stride=rng.choice((1, 1, 2, 4)), dilation=rng.choice((1, 1, 2, 3, 8)),
                padding=rng.randint(0, 2 * taps), cut=rng.choice((0, 0, 1, 3)),
                layout="channels_first", dtype=rng.choice(DTYPES), direction=direction,
                bias=rng.random() < 0.5,
                activation=rng.choice(ACTIVATIONS) if finishes else "none",
                residual=finishes and rng.random() < 0.5,
            )  # fmt: skip
        except InvalidProblem:  # nothing is left of the output
            continue
        if problem.flops <= MOST_FLOPS and family.legal(problem, H100).any():
            return problem


@pytest.mark.parametrize("seed", slow_but((2,), range(12), "the interpreter takes seconds"))
@every_family
def test_random_configs_of_a_random_layer_are_correct(family: Family, seed: int) -> None:
    rng = random.Random(f"{family.name} {seed}")
    problem = random_layer(rng, family)
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
    problem = random_layer(rng, family)
    (row, *_) = some_rows(family, problem, H100, rng, 1, 1)
    inputs = random_inputs(family, problem, 0)
    outputs = [o for o in CONV.operands(problem) if o.terms]
    results = interpret(family, problem, row, inputs, H100.arch)
    for name in inputs.keys() & {"in", "out_grad", "filter"}:
        other = inputs | {name: inputs[name].flip(0, 1, 2) + 1}
        assert outside(outputs, results, reference_nd(problem, other)), name
