"""Chains of linear layers as an operation: the record, the reference, and products with a fused
epilogue, on the CPU."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from chain_problems import DTYPES, chain_inputs, error, expected, random_chain
from layers import H100
from programs import run_program
from ptx.launch import run
from ptxas import ARCHS, resources

from confpred.errors import InvalidProblem
from confpred.families.protocol import Family, within
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.linear_chain import LINEAR_CHAIN, MOST_LAYERS, LinearChain
from confpred.problem.operation import PRODUCTS, REFERENCE, Launch, Operation, Product, Step
from confpred.problem.precision import allows_tf32, float32_sums, matmul_tf32
from confpred.products import ordinary_error
from confpred.products.epilogue import FAMILY


def legal(problem: LinearChain) -> list[int]:
    return np.flatnonzero(FAMILY.legal(problem, H100)).tolist()


def test_a_chain_has_limits() -> None:
    chain = LinearChain(8, 100, 64, 10, 3)
    assert chain.widths == (100, 64, 64, 10)
    assert LinearChain.parse(str(chain)) == chain
    assert LinearChain.from_json(chain.to_json()) == chain
    for fields in (
        {"layers": MOST_LAYERS + 1},
        {"layers": 0},
        {"tf32": True},
        {"layers": 1, "hidden": 64},
        {"activation": "tanh"},
        {"batch": 0},
    ):
        with pytest.raises(InvalidProblem):
            replace(chain, **fields)


def test_the_batch_does_not_make_another_chain() -> None:
    """Chains that differ in what a user chooses are on one side of a split."""
    chain = LinearChain(8, 100, 64, 10, 3)
    same = replace(chain, batch=512, dtype="float32", tf32=True, bias=False, layers=5)
    assert same.layer() == chain.layer()
    assert replace(chain, hidden=65).layer() != chain.layer()
    assert LinearChain(1, 4, 5, 5, 1).layer() == LinearChain(9, 4, 5, 5, 1, last=False).layer()


def test_a_chain_moves_its_parameters_and_ends() -> None:
    chain = LinearChain(8, 4, 5, 6, 3, dtype="float32")
    weights, biases = 4 * 5 + 5 * 5 + 5 * 6, 5 + 5 + 6
    assert chain.flops == 2 * 8 * weights
    assert chain.minimum_bytes == 4 * (8 * (4 + 6) + weights + biases)
    assert sum(o.bytes for o in LINEAR_CHAIN.operands(chain)) == chain.minimum_bytes
    assert isinstance(LINEAR_CHAIN, Operation)
    features = LINEAR_CHAIN.features(chain, H100)
    assert features.shape == (1, len(LINEAR_CHAIN.feature_names))
    assert np.isfinite(features).all()


@pytest.mark.parametrize("seed", range(3))
def test_pytorchs_own_is_right(seed: int) -> None:
    problem = random_chain(random.Random(seed))
    inputs = chain_inputs(problem, seed)
    found = LINEAR_CHAIN.pytorch(problem, inputs)
    assert error(found, expected(problem, inputs)) <= 2 * ordinary_error(problem)


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_is_right(seed: int) -> None:
    """It is what a GPU's answers are checked against; here it is interpreted, in float32."""
    rng = random.Random(seed)
    activation = rng.choice(("none", "relu", "relu6"))  # others use what is not interpreted
    problem = random_chain(rng, most_width=40, activation=activation)
    inputs = chain_inputs(problem, seed)
    step = LINEAR_CHAIN.reference(problem, "out")
    kernel = replace(step.kernel, defines=(*step.kernel.defines, ("REAL", "float")))
    found = run(
        Launch((replace(step, kernel=kernel),)),
        {name: x.contiguous().view(torch.uint8).numpy().ravel() for name, x in inputs.items()},
        {REFERENCE: 4 * problem.batch * problem.outputs},
        H100.arch,
    )[REFERENCE]
    out = torch.from_numpy(found.view(np.float32)).view(problem.batch, problem.outputs)
    assert error(out, expected(problem, inputs)) < 2e-6


def test_made_up_weights_neither_grow_nor_shrink_what_passes() -> None:
    problem = LinearChain(64, 512, 512, 512, 8, dtype="float32")
    inputs = chain_inputs(problem, 0)
    out = expected(problem, inputs)
    assert 0.1 < float(out.norm() / inputs["in"].norm()) < 10


@pytest.mark.parametrize("seed", range(4))
def test_a_fused_epilogue_is_right(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_chain(rng, activation=rng.choice(("none", "relu")), bias=True)
    inputs = chain_inputs(problem, seed)
    (row,) = legal(problem)
    found = run_program(FAMILY, problem, row, inputs, H100.arch)["out"]
    assert error(found, expected(problem, inputs)) <= ordinary_error(problem), problem


def test_every_product_has_its_epilogue() -> None:
    problem = LinearChain(8, 100, 64, 10, 4, last=False)
    launch = FAMILY.launch(problem, 0)
    assert [p.relu for p in launch.program if isinstance(p, Product)] == [True] * 3 + [False]
    assert launch.steps == ()
    assert launch.source == PRODUCTS
    assert launch.scratch_bytes == 2 * (8 * 64 * 2)
    assert FAMILY.launch(replace(problem, layers=1, hidden=10), 0).scratch_bytes == 0
    assert not legal(replace(problem, activation="gelu"))
    assert not legal(replace(problem, bias=False))


def test_a_fused_epilogue_is_as_exact_as_pytorch() -> None:
    problem = LinearChain(8, 100, 64, 10, 4)
    rows = np.array(legal(problem))
    assert len(within(FAMILY, problem, rows, UNLIMITED)) == 1
    assert len(within(FAMILY, problem, rows, Limits(workspace_bytes=2047))) == 0
    assert len(within(FAMILY, problem, rows, Limits(max_error=1e-5))) == 0
    assert isinstance(FAMILY, Family)
    features = FAMILY.features(problem, H100, rows)
    assert features.shape == (1, len(FAMILY.feature_names))
    assert np.isfinite(features).all()


def test_tf32_is_switched_for_the_time_of_a_call() -> None:
    before = allows_tf32(), torch.backends.cuda.matmul.allow_tf32
    for wanted in (True, False):
        with matmul_tf32(wanted):
            assert allows_tf32() is wanted
            assert torch.backends.cuda.matmul.allow_tf32 is wanted
        assert (allows_tf32(), torch.backends.cuda.matmul.allow_tf32) == before


def test_sums_are_in_float32_for_the_time_of_a_call() -> None:
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    with float32_sums():
        assert not any(getattr(matmul, name) for name in names)
    assert [getattr(matmul, name) for name in names] == before


def test_a_launch_knows_what_it_is_made_of() -> None:
    step = LINEAR_CHAIN.reference(LinearChain(2, 4, 4, 4, 1), "out")
    other = FAMILY.launch(LinearChain(2, 4, 4, 4, 1), 0).program[0]
    launch = Launch.of_program([step, other, step], scratch_bytes=5)
    assert launch.steps == (step, step)
    assert launch.kernels == (step.kernel,)
    assert launch.workspace_bytes == 5
    assert not launch.tf32
    assert isinstance(launch.program[0], Step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_compiles(dtype: str) -> None:
    step = LINEAR_CHAIN.reference(LinearChain(2, 64, 64, 64, 1, dtype=dtype), "out")
    for arch in ARCHS:
        registers, _ = resources(step.kernel, arch)
        assert registers <= 128
