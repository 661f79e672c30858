"""Grouped convolution of any group width, interpreted on the CPU, against PyTorch in float64: the
widths, strides and dilations that random layers of the other tests seldom meet together."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from layers import ANY_WIDTH, H100
from ptx.launch import interpret
from ptxas import ARCHS, resources
from references import outside, random_inputs, reference, some_rows
from slow import slow_but

from confpred.families.protocol import config_dict
from confpred.problem.conv2d import Problem

#: Input and output channels of a group, and what else a layer has.
LAYERS = {
    "vectors of 8 that fill no step of 16": (24, 24, "groups=3 h=9 w=11 r=3 s=3 padding=1"),
    "fewer outputs, stride 2": (40, 24, "groups=2 h=8 w=9 r=3 s=3 padding=1 stride=2"),
    "odd widths, an even filter": (3, 6, "groups=5 n=2 h=7 w=9 r=2 s=3 padding=1"),
    "a wide group, 1x1": (112, 112, "groups=2 h=6 w=7 r=1 s=1 stride=2"),
    "dilation": (112, 40, "groups=2 h=7 w=6 r=3 s=3 padding=2 dilation=2"),
    "stride and even dilation": (24, 48, "groups=3 h=9 w=9 r=3 s=3 padding=2 stride=2 dilation=2"),
    "stride and odd dilation": (12, 20, "groups=5 h=13 w=9 r=5 s=3 padding=6 stride=2 dilation=3"),
    "a stride of one axis": (6, 10, "groups=4 h=9 w=8 r=7 s=7 padding=3 stride=1x2"),
    "one element at a time": (37, 5, "groups=2 n=3 h=7 w=8 r=3 s=2 padding=0x1 stride=2x1"),
    "many passes": (200, 16, "groups=2 h=5 w=5 r=3 s=3 padding=1"),
    "many parts of a group": (8, 200, "groups=2 h=4 w=6 r=3 s=1 padding=1x0"),
}
FAST = ("stride and odd dilation",)
EPILOGUES = {"fprop": "bias=true residual=true activation=silu", "dgrad": "", "wgrad": "bias=true"}
every_direction = pytest.mark.parametrize("direction", EPILOGUES)


def layer(kind: str, direction: str, more: str = "") -> Problem:
    width, depth, words = LAYERS[kind]
    groups = int(words.split()[0].partition("=")[2])
    sizes = {"n": "1", "c": width * groups, "k": depth * groups, "direction": direction}
    fields = {name: str(value) for name, value in sizes.items()}
    fields |= dict(word.split("=") for word in f"{words} {more}".split())
    return Problem.from_texts(fields)


@pytest.mark.parametrize("kind", slow_but(FAST, LAYERS, "a second each"))
@every_direction
def test_some_configs_are_correct(kind: str, direction: str) -> None:
    family, seed = ANY_WIDTH[f"anywidth_{direction}"], list(LAYERS).index(kind)
    dtype, arch = (("float16", "sm_80"), ("bfloat16", H100.arch))[seed % 2]
    epilogue = EPILOGUES[direction] if seed % 3 else ""
    problem = layer(kind, direction, f"dtype={dtype} {epilogue}")
    inputs = random_inputs(family, problem, seed)
    expected = reference(problem, inputs)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    for row in some_rows(family, problem, H100, random.Random(seed), 2, 2):
        wrong = outside(outputs, interpret(family, problem, row, inputs, arch), expected)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


@pytest.mark.parametrize("direction", slow_but(("dgrad",), EPILOGUES, "four compiles each"))
def test_no_config_computes_anything_else(direction: str) -> None:
    """All configs give the same bits where sums are exact: filters and images of small integers."""
    family = ANY_WIDTH[f"anywidth_{direction}"]
    problem = layer("fewer outputs, stride 2", direction)
    inputs = {name: (3 * x).round() for name, x in random_inputs(family, problem, 0).items()}
    (output,) = (o for o in family.operation.operands(problem) if o.terms)
    rows = np.flatnonzero(family.legal(problem, H100))
    kernels = {family.launch(problem, int(row)).steps[0].kernel: int(row) for row in rows}
    expected = reference(problem, inputs)
    for row in random.Random(0).sample(sorted(kernels.values()), 4):
        found = interpret(family, problem, row, inputs, "sm_80")[output.name].double()
        assert (found == expected[output.name].half().double()).all(), config_dict(family, row)


def test_a_part_of_the_groups_of_a_block_may_be_missing() -> None:
    problem = replace(
        layer("vectors of 8 that fill no step of 16", "fprop"), c=120, k=120, groups=5
    )
    family = ANY_WIDTH["anywidth_fprop"]
    inputs, outputs = random_inputs(family, problem, 0), family.operation.operands(problem)[:1]
    legal = np.flatnonzero(family.legal(problem, H100))
    several = {int(family.configs["block_g"][row]): int(row) for row in legal}
    assert sorted(several) == [1, 2, 4]
    for row in several.values():
        results = interpret(family, problem, row, inputs, "sm_80")
        assert not outside(outputs, results, reference(problem, inputs)), row


@pytest.mark.slow(reason="a dozen compiles a target")
@pytest.mark.parametrize("arch", ARCHS)
@every_direction
def test_kernels_hardly_spill(direction: str, arch: str) -> None:
    """Compile the config of each layer that is expected to need the most registers."""
    family, stacks, ratios = ANY_WIDTH[f"anywidth_{direction}"], [], []
    for kind in LAYERS:
        problem = layer(kind, direction, f"{EPILOGUES[direction]} h=28 w=28 n=16")
        rows = np.flatnonzero(family.legal(problem, H100))
        features = family.features(problem, H100, rows)
        estimates = features[:, family.feature_names.index("registers")]
        most = int(estimates.argmax())
        kernel = family.launch(problem, int(rows[most])).steps[0].kernel
        registers, stack = resources(kernel, arch)
        stacks.append(stack)
        ratios.append(registers / estimates[most])
    assert max(stacks) <= 64
    assert min(ratios) > 0.4
    assert max(ratios) < 1.8
