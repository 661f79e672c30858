"""The reference kernels, interpreted and compared with PyTorch, in float32."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, product

import convs
import norms
import numpy as np
import pytest
import torch
from layers import H100
from ptx.launch import run_step
from ptx.memory import DeviceMemory, Operand
from references import random_inputs, reference, reference_nd
from slow import slow_but

from confpred.cuda.compiler import ptx_of
from confpred.cudnn.family import FAMILY
from confpred.errors import CompileError
from confpred.problem import norm
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv import CONV, LAYOUTS, ConvNd
from confpred.problem.conv2d import CONVOLUTION, DIRECTIONS, DTYPES, Problem
from confpred.problem.norm import BATCH_NORM, BatchNorm
from confpred.problem.norm_of_groups import NORM, Norm
from confpred.problem.operation import REFERENCE, Operation

Tensors = Mapping[str, torch.Tensor]


def check(operation: Operation, problem: object, inputs: Tensors, expected: Tensors) -> None:
    """Compare every output's reference with what is `expected`."""
    memory = {name: x.contiguous().view(torch.uint8).numpy().ravel() for name, x in inputs.items()}
    for output in (o for o in operation.operands(problem) if o.terms):
        step = operation.reference(problem, output.name)
        kernel = replace(step.kernel, defines=(*step.kernel.defines, ("REAL", "float")))
        zeros = np.zeros(4 * output.elements, np.uint8)
        found, *others = (
            Operand(name, data, written=True, once=False)
            for name, data in ((REFERENCE, zeros), *memory.items())
        )
        run_step(replace(step, kernel=kernel), DeviceMemory([found, *others]), H100.arch)
        right = expected[output.name].numpy().ravel()
        error = np.linalg.norm(found.content.view(np.float32) - right)
        assert error <= 2e-6 * np.linalg.norm(right), (problem, output.name)


def random_problem(rng: random.Random, direction: str, groups: int) -> Problem:
    """Small, and of any window."""
    r, s = rng.choice(((1, 1), (3, 3), (2, 3), (1, 5)))
    dilation = (rng.randint(1, 2), rng.randint(1, 2))
    extras = {}
    if direction == "fprop":
        extras = {"activation": rng.choice(ACTIVATIONS), "residual": rng.random() < 0.5}
    return Problem(
        direction=direction, n=rng.randint(1, 3), c=groups * rng.randint(1, 40 // groups),
        h=rng.randint(5, 9), w=rng.randint(5, 9), k=groups * rng.randint(1, 80 // groups), r=r,
        s=s, stride=(rng.randint(1, 2), rng.randint(1, 3)),
        padding=(rng.randint(0, r), rng.randint(0, s)), dilation=dilation, groups=groups,
        dtype=rng.choice(DTYPES), bias=direction != "dgrad" and rng.random() < 0.5, **extras,
    )  # fmt: skip


@pytest.mark.parametrize("seed", slow_but((1,), range(5), "the interpreter takes its time"))
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_references_are_right(direction: str, groups: int, seed: int) -> None:
    problem = random_problem(random.Random(f"{direction} {groups} {seed}"), direction, groups)
    inputs = random_inputs(FAMILY, problem, seed)
    check(CONVOLUTION, problem, inputs, reference(problem, inputs))


@pytest.mark.parametrize("seed", slow_but((1,), range(2), "the interpreter takes its time"))
@pytest.mark.parametrize(("layout", "rank"), list(product(LAYOUTS, (1, 2, 3))))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_references_of_any_rank_are_right(
    direction: str, layout: str, rank: int, seed: int
) -> None:
    rng = random.Random(f"{direction} {layout} {rank} {seed}")
    problem = convs.random_conv(rng, direction=direction, layout=layout, rank=rank)
    inputs = convs.inputs_of(problem, seed)
    check(CONV, problem, inputs, reference_nd(problem, inputs))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_causal_layer_and_a_transposed_one_are_right(direction: str, layout: str) -> None:
    epilogue = {} if direction == "wgrad" else {"activation": "silu", "residual": True}
    problem = ConvNd(
        2, 6, 9, 12, 4, rank=1, stride=2, dilation=2, padding=6, cut=3, groups=3, layout=layout,
        direction=direction, bias=True, **epilogue,
    )  # fmt: skip
    inputs = convs.inputs_of(problem)
    check(CONV, problem, inputs, reference_nd(problem, inputs))


@pytest.mark.parametrize(("activation", "groups"), list(zip(ACTIVATIONS, cycle((1, 4)))))
def test_every_activation_is_right(activation: str, groups: int) -> None:
    problem = Problem(2, 8, 5, 6, 16, 3, 3, groups=groups, activation=activation, residual=True)
    inputs = random_inputs(FAMILY, problem, 0)
    check(CONVOLUTION, problem, inputs, reference(problem, inputs))


@pytest.mark.parametrize(("activation", "frozen"), list(zip(ACTIVATIONS, cycle((False, True)))))
@pytest.mark.parametrize("direction", norm.DIRECTIONS)
def test_references_of_norms_are_right(direction: str, activation: str, frozen: bool) -> None:
    residual = activation != "none"
    problem = BatchNorm(3, 5, 4, 40, "bfloat16", activation, residual, direction, True, frozen)
    inputs = norms.inputs_of(problem, 0)
    check(BATCH_NORM, problem, inputs, norms.expected(problem, inputs))


@pytest.mark.parametrize("activation", slow_but(("none", "silu"), ACTIVATIONS, "seconds each"))
@pytest.mark.parametrize("direction", norm.DIRECTIONS)
def test_references_of_norms_over_groups_are_right(direction: str, activation: str) -> None:
    fields = {
        "dtype": "bfloat16", "activation": activation, "residual": activation != "none",
        "direction": direction,
    }  # fmt: skip
    for problem in (
        Norm(3, 20, 40, 4, weights="bfloat16", **fields),
        Norm(2, 9, 40, 40, affine="none", **fields),
        Norm(2, 9, 12, 3, adaptive=True, **fields),
        Norm(6, 1, 40, affine="weight", centred=False, **fields),
    ):
        inputs = norms.inputs_of(problem, 0)
        check(NORM, problem, inputs, norms.expected(problem, inputs))


@pytest.mark.parametrize("activation", ["ACTIVATION_NOWHERE", 99])
def test_an_unknown_activation_does_not_compile(activation: str | int) -> None:
    for step in (
        CONVOLUTION.reference(Problem(1, 8, 4, 4, 8, 3, 3), "out"),
        BATCH_NORM.reference(BatchNorm(2, 4, 4, 8, direction="backward"), "in_grad"),
        CONV.reference(ConvNd(1, 8, 4, 8, 3), "out"),
        NORM.reference(Norm(2, 4, 8, direction="backward"), "in_grad"),
    ):
        defines = dict(step.kernel.defines) | {"ACTIVATION": activation}
        with pytest.raises(CompileError):
            ptx_of(replace(step.kernel, defines=tuple(defines.items())), H100.arch)
