"""Strassen's algorithm for chains: its kernel interpreted and its products by PyTorch, on the CPU,
against float64 and against the same algorithm in PyTorch's own words."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activations import activate
from chain_problems import DTYPES, chain_inputs, error, expected, random_chain
from layers import H100
from programs import CpuProgram, run_program
from ptxas import ARCHS, resources

from confpred.families.protocol import Family, within
from confpred.problem.conv2d import ACTIVATIONS
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.linear_chain import LinearChain
from confpred.problem.operation import SCRATCH, Product
from confpred.products import ordinary_error
from confpred.products.strassen import ALL, FAMILY, INNER, error_of


def legal(problem: LinearChain) -> list[int]:
    return np.flatnonzero(FAMILY.legal(problem, H100)).tolist()


def in_pytorch(problem: LinearChain, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the algorithm layer by layer, without a kernel of ours: quarters are rounded to the
    dtype, products too, and what lies between stays in float32."""
    dtype = DTYPES[problem.dtype]
    vector = 16 // problem.itemsize

    def half(width: int) -> int:
        return -(-width // (2 * vector)) * vector

    def quarters(x: torch.Tensor, rows: int, columns: int) -> list[torch.Tensor]:
        x = F.pad(x.float(), (0, 2 * columns - x.shape[1], 0, 2 * rows - x.shape[0]))
        return [x[:rows, :columns], x[:rows, columns:], x[rows:, :columns], x[rows:, columns:]]

    x = inputs["in"].float()
    for index, (before, after) in enumerate(pairwise(problem.widths)):
        a, b, c, d = quarters(x, -(-problem.batch // 2), half(before))
        left = [t.to(dtype) for t in (a + d, c + d, a, d, a + b, c - a, b - d)]
        e, f, g, h = quarters(inputs[f"weight{index}"].float().T, half(before), half(after))
        right = [t.to(dtype) for t in (e + h, e, f - h, g - e, h, e + f, g + h)]
        m = [(p.float() @ q.float()).to(dtype).float() for p, q in zip(left, right, strict=True)]
        upper = torch.cat([m[0] + m[3] - m[4] + m[6], m[2] + m[4]], 1)
        lower = torch.cat([m[1] + m[3], m[0] - m[1] + m[2] + m[5]], 1)
        x = torch.cat([upper, lower])[: problem.batch, :after]
        if problem.bias:
            x = x + inputs[f"bias{index}"].float()
        x = activate(problem.activated(index), x)
    return x.to(dtype)


@pytest.mark.parametrize("seed", range(5))
def test_random_chains_are_within_the_stated_error(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_chain(rng)
    inputs = chain_inputs(problem, seed)
    right = expected(problem, inputs)
    for row in legal(problem):
        found = run_program(FAMILY, problem, row, inputs, ("sm_80", H100.arch)[seed % 2])["out"]
        assert error(found, right) <= error_of(problem), problem
        if int(FAMILY.configs["inner"][row]) == ALL:
            # Sums in another order: a few of them are rounded to the neighbour.
            assert error(found, in_pytorch(problem, inputs).double()) <= error_of(problem) / 4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_zeros_that_fill_up_stay_zeros(activation: str) -> None:
    """Odd sizes at every place; the activation of 0 is not the point of these, the neighbours are:
    one column of garbage would be multiplied into all."""
    problem = LinearChain(
        3, 17, 19, 21, 3, dtype="float32", activation=activation, bias=True, last=True
    )
    inputs = chain_inputs(problem, 0)
    found = run_program(FAMILY, problem, ALL, inputs, H100.arch)["out"]
    assert error(found, expected(problem, inputs)) < 5e-6


def test_only_layers_between_may_be_halved() -> None:
    problem = LinearChain(6, 5, 32, 3, 4, dtype="float32")
    assert legal(problem) == [INNER]  # the ends are too narrow
    launch = FAMILY.launch(problem, INNER)
    shapes = [p.a.shape for p in launch.program if isinstance(p, Product)]
    assert [shape[0] for shape in shapes] == [1, 7, 7, 1]
    assert len(launch.steps) == 5  # prefix, between, suffix, and the sums of two weights
    inputs = chain_inputs(problem, 0)
    found = run_program(FAMILY, problem, INNER, inputs, H100.arch)["out"]
    assert error(found, expected(problem, inputs)) < 5e-6


def test_one_kernel_and_a_weights_sums_are_between_two_products() -> None:
    problem = LinearChain(64, 128, 128, 128, 8)
    launch = FAMILY.launch(problem, ALL)
    kinds = ["p" if isinstance(part, Product) else "k" for part in launch.program]
    assert "".join(kinds) == "k" + "kpk" * 8
    products = [part for part in launch.program if isinstance(part, Product)]
    flops = sum(2 * p.a.shape[0] * p.a.shape[1] * p.a.shape[2] * p.b.shape[2] for p in products)
    assert flops == problem.flops * 7 // 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_are_of_whole_accesses(dtype: str) -> None:
    """Matrices that cuBLAS multiplies are aligned to 16 bytes, whatever the widths."""
    problem = LinearChain(7, 33, 57, 99, 3, dtype=dtype)
    launch = FAMILY.launch(problem, ALL)
    for part in launch.program:
        if isinstance(part, Product):
            for view in (part.out, part.a, part.b):
                starts = [stride for stride in view.strides if stride != 1] + [view.offset]
                assert all(start * problem.itemsize % 16 == 0 for start in starts)


def test_a_bound_decides() -> None:
    problem = LinearChain(64, 128, 128, 128, 4)
    rows = np.array(legal(problem))
    assert len(within(FAMILY, problem, rows, UNLIMITED)) == 0  # no less exact than PyTorch's own
    stated = error_of(problem)
    assert ordinary_error(problem) < stated
    assert len(within(FAMILY, problem, rows, Limits(max_error=stated))) == len(rows)
    assert len(within(FAMILY, problem, rows, Limits(max_error=stated * 0.99))) == 0
    needed = FAMILY.launch(problem, ALL).workspace_bytes
    short = Limits(workspace_bytes=needed - 1, max_error=stated)
    assert ALL not in within(FAMILY, problem, rows, short)


def test_tf32_is_refused_where_it_is_not_allowed() -> None:
    problem = LinearChain(64, 128, 128, 128, 4, dtype="float32", tf32=True)
    rows = np.array(legal(problem))
    assert FAMILY.launch(problem, ALL).tf32
    assert len(within(FAMILY, problem, rows, Limits(max_error=0.1, tf32=False))) == 0


def test_the_workspace_is_stated_exactly() -> None:
    """All of both parts is written, but for what aligns the parts of the first."""
    problem = LinearChain(8, 64, 64, 64, 2, dtype="float32")
    launch = FAMILY.launch(problem, ALL)
    assert launch.scratch_bytes == 7 * 32 * 32 * 4 + 2 * 7 * 4 * 32 * 4
    program = CpuProgram(launch, chain_inputs(problem, 0), {"out": torch.Size((8, 64))}, H100.arch)
    program.run()
    assert program._watched[SCRATCH].written.all()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [1, 8])
def test_the_stated_error_is_twice_what_is_measured(dtype: str, layers: int) -> None:
    """At sizes that an interpreter is too slow for; the published figures are of a GPU."""
    problem = LinearChain(128, 384, 384, 384, layers, dtype=dtype)
    inputs = chain_inputs(problem, layers)
    measured = error(in_pytorch(problem, inputs), expected(problem, inputs))
    assert error_of(problem) / 16 < measured < error_of(problem) / 1.8


def test_configs_are_described() -> None:
    problem = LinearChain(64, 100, 128, 96, 4)
    assert isinstance(FAMILY, Family)
    rows = np.array(legal(problem))
    assert rows.tolist() == [ALL, INNER]
    features = FAMILY.features(problem, H100, rows)
    assert features.shape == (2, len(FAMILY.feature_names))
    assert features.dtype == np.float32
    assert np.isfinite(features).all()
    assert len(set(FAMILY.feature_names)) == len(FAMILY.feature_names)


def test_samples_compile_and_do_not_spill() -> None:
    """As `tests/cpu/kernels/test_kernels_compile.py` has it for families that are not plug-ins."""
    rng, kernels = random.Random(0), {}
    while len({dict(k.defines)["TO"] for k in kernels}) < 3 or len(kernels) < 10:
        problem = random_chain(rng)
        for row in legal(problem):
            kernels.update(dict.fromkeys(FAMILY.launch(problem, row).kernels))
    for kernel in rng.sample(list(kernels), 4):
        for arch in ARCHS:
            registers, stack_bytes = resources(kernel, arch)
            assert registers <= 168
            assert stack_bytes == 0 or arch != H100.arch, kernel
