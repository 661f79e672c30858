"""Kernels of layer norm and RMS norm, interpreted on the CPU, against PyTorch in float64: what
``test_interpreted_norm.py`` does not ask of all norms."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from layers import H100, ROW_NORMS
from norms import expected, inputs_of, legal_rows, random_problem, wrong
from ptx.launch import interpret
from slow import slow_but

from confpred.families.norm.row_norm import RowNorm
from confpred.families.protocol import Family, config_dict
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv2d import DTYPES
from confpred.problem.norm_of_groups import AFFINE, Norm

CONFIGS = 3


def around(family: Family) -> RowNorm:
    """Return `family` with few blocks, from 1 to 8, which go around the rows of small problems."""
    configs = family.configs.copy()
    configs["blocks"] //= 132
    return RowNorm(family.name, family.direction, configs)


AROUND = {name: around(family) for name, family in ROW_NORMS.items()}
every_family = pytest.mark.parametrize("family", ROW_NORMS.values(), ids=ROW_NORMS)
every_grid = pytest.mark.parametrize("family", AROUND.values(), ids=AROUND)


def check(family: Family, problem: Norm, rows: list[int], inputs=None) -> None:
    inputs = inputs_of(problem, 0) if inputs is None else inputs
    right = expected(problem, inputs)
    assert rows
    for row in rows:
        results = interpret(family, problem, row, inputs, H100.arch)
        found = wrong(problem, family.launch(problem, row), results, right)
        assert not found, f"{found}: {problem} {config_dict(family, row)}"


def some(family: Family, problem: Norm, count: int = CONFIGS) -> list[int]:
    rows = legal_rows(family, problem)
    return random.Random(str(problem)).sample(rows, min(count, len(rows)))


@pytest.mark.parametrize("seed", slow_but((1,), range(24), "seconds each"))
@every_grid
def test_random_configs_of_a_random_layer_are_right(family: Family, seed: int) -> None:
    problem = random_problem(random.Random(f"{family.name} {seed}"), family)
    check(family, problem, some(family, problem))


@pytest.mark.parametrize("c", slow_but((96,), (3, 7, 10, 96, 100), "seconds each"))
@pytest.mark.parametrize("dtype", DTYPES)
@every_grid
def test_every_dtype_and_odd_channels_are_right(family: Family, dtype: str, c: int) -> None:
    problem = Norm(301, 1, c, dtype=dtype, weights=dtype, direction=family.direction)
    check(family, problem, some(family, problem))


@pytest.mark.parametrize("affine", AFFINE)
@every_grid
def test_rms_norm_is_right(family: Family, affine: str) -> None:
    problem = Norm(
        40, 1, 24, 1, "bfloat16", "silu", True, family.direction, affine, centred=False
    )  # fmt: skip
    check(family, problem, some(family, problem))


@pytest.mark.parametrize("affine", AFFINE)
@every_grid
def test_rows_of_several_warps_are_right(family: Family, affine: str) -> None:
    """They meet in shared memory, and the next row's sums come right after."""
    problem = Norm(37, 1, 1032, activation="relu", affine=affine, direction=family.direction)
    lanes, ahead = family.configs["lanes"], family.configs["ahead"]
    rows = legal_rows(family, problem)
    wide = [r for r in rows if lanes[r] > 32 and ahead[r]]
    check(family, problem, [wide[0], wide[-1]])


@every_grid
def test_fewer_rows_than_threads_are_right(family: Family) -> None:
    for n in (1, 9):
        problem = Norm(n, 1, 40, dtype="float32", direction=family.direction)
        check(family, problem, some(family, problem))


@pytest.mark.slow(reason="hundreds of blocks")
@every_family
def test_every_grid_of_the_table_is_right(family: Family) -> None:
    problem = Norm(2150, 1, 64, direction=family.direction)
    rows = legal_rows(family, problem)
    grids = dict.fromkeys(family.configs["blocks"][rows].tolist())
    check(
        family, problem, [next(r for r in rows if family.configs["blocks"][r] == g) for g in grids]
    )


@pytest.mark.slow(reason="some tens of configs")
@pytest.mark.parametrize("c", [7, 96, 1000])
@every_grid
def test_every_config_of_a_layer_is_right(family: Family, c: int) -> None:
    problem = Norm(
        100, 1, c, activation="silu", residual=True, weights="float16", direction=family.direction
    )
    check(family, problem, legal_rows(family, problem))


@pytest.mark.parametrize("dtype", slow_but(("bfloat16",), DTYPES, "seconds each"))
@every_family
def test_a_mean_of_a_thousand_deviations_is_right(family: Family, dtype: str) -> None:
    """Squares of the values themselves would lose the variance altogether."""
    problem = Norm(30, 1, 392, dtype=dtype, direction=family.direction)
    inputs = inputs_of(problem, 1, mean=1000.0, deviation=1.0)
    right, rows = expected(problem, inputs), legal_rows(family, problem)
    for row in (rows[0], rows[-1]):
        results = interpret(family, problem, row, inputs, H100.arch)
        for name, result in results.items():
            error = (result.double() - right[name]).norm() / right[name].norm()
            # The mean itself is rounded, to some 1e-4 deviations.
            assert error < (5e-3 if dtype == "bfloat16" else 8e-4), f"{name} of config {row}"


@pytest.mark.parametrize("c", [5, 16])
@every_grid
def test_accesses_of_large_tensors_are_right(
    family: Family, c: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are marked as the last ones."""
    monkeypatch.setattr("confpred.families.norm.row_norm.STREAM_BYTES", 0)
    problem = Norm(300, 1, c, direction=family.direction)
    check(family, problem, some(family, problem, 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_family
def test_a_nan_stays_in_its_row(family: Family, activation: str) -> None:
    problem = Norm(12, 1, 48, activation=activation, direction=family.direction)
    inputs = inputs_of(problem, 0)
    inputs["in"][5, 0, 7] = torch.nan
    if problem.is_backward:
        inputs["mean"][5] = inputs["invstd"][5] = torch.nan
    row = some(family, problem, 1)[0]
    results = interpret(family, problem, row, inputs, H100.arch)
    result = results["in_grad" if problem.is_backward else "out"]
    assert result[5].isnan().all()
    assert not result[torch.arange(12) != 5].isnan().any()
    if problem.is_backward:
        assert results["weight_grad"].isnan().all()


@every_grid
def test_results_do_not_depend_on_the_blocks_that_run_together(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Norm(150, 1, 40, activation="relu", direction=family.direction)
    inputs = inputs_of(problem, 0)
    for row in some(family, problem, 2):
        together = interpret(family, problem, row, inputs, H100.arch)
        with monkeypatch.context() as patch:
            patch.setattr("ptx.launch.THREADS", 512)  # a block or two at a time
            apart = interpret(family, problem, row, inputs, H100.arch)
        for name, result in together.items():
            assert np.array_equal(result.view(torch.uint8), apart[name].view(torch.uint8))
