"""Kernels of norms, interpreted on the CPU, against PyTorch in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from layers import H100, ROW_NORMS
from norms import FAMILIES, expected, inputs_of, layer_of, legal_rows, random_problem, wrong
from ptx.launch import interpret
from slow import slow_but

from confpred.families.protocol import Family, config_dict
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv2d import DTYPES
from confpred.problem.record import Record

CONFIGS = 4
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def check(family: Family, problem: Record, rows: list[int], inputs=None) -> None:
    inputs = inputs_of(problem, 0) if inputs is None else inputs
    right = expected(problem, inputs)
    for row in rows:
        results = interpret(family, problem, row, inputs, H100.arch)
        found = wrong(problem, family.launch(problem, row), results, right)
        assert not found, f"{found}: {problem} {config_dict(family, row)}"


@pytest.mark.parametrize("seed", slow_but((1,), range(12), "seconds each"))
@every_family
def test_random_configs_of_a_random_layer_are_right(family: Family, seed: int) -> None:
    rng = random.Random(f"{family.name} {seed}")
    problem = random_problem(rng, family)
    rows = legal_rows(family, problem)
    check(family, problem, rng.sample(rows, min(CONFIGS, len(rows))))


@pytest.mark.parametrize("activation", slow_but(("none", "silu"), ACTIVATIONS, "48 compiles"))
@every_family
def test_every_activation_is_right(family: Family, activation: str) -> None:
    residual = activation != "none"
    problem = layer_of(
        family, 2, 5, 4, 24, dtype="bfloat16", activation=activation, residual=residual
    )
    rows = legal_rows(family, problem)
    check(family, problem, [rows[len(rows) // 2]])


@pytest.mark.parametrize("dtype", slow_but(("bfloat16",), DTYPES, "seconds each"))
@every_family
def test_a_mean_of_a_thousand_deviations_is_right(family: Family, dtype: str) -> None:
    """Squares of the values themselves would lose the variance altogether."""
    problem = layer_of(family, 2, 31, 30, 8, dtype=dtype)
    inputs = inputs_of(problem, 1, mean=1000.0, deviation=1.0)
    right, rows = expected(problem, inputs), legal_rows(family, problem)
    for row in (rows[0], rows[-1]):
        results = interpret(family, problem, row, inputs, H100.arch)
        for name, result in results.items():
            error = (result.double() - right[name]).norm() / right[name].norm()
            # The mean itself is rounded, to some 1e-4 deviations.
            assert error < (5e-3 if dtype == "bfloat16" else 8e-4), f"{name} of config {row}"


@pytest.mark.slow(reason="hundreds of configs")
@pytest.mark.parametrize("c", [3, 24])
@every_family
def test_every_config_of_a_small_layer_is_right(family: Family, c: int) -> None:
    problem = layer_of(family, 2, 20, 31, c, activation="silu")
    rows = legal_rows(family, problem)
    assert rows
    check(family, problem, rows)


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("name", ["group_norm", "group_norm_backward"])
def test_blocks_of_a_cluster_meet(name: str, cluster: int) -> None:
    family, problem = FAMILIES[name], layer_of(FAMILIES[name], 2, 40, 50, 24)
    rows = legal_rows(family, problem)
    check(family, problem, [r for r in rows if config_dict(family, r)["cluster"] == cluster][::9])


@pytest.mark.parametrize("name", ["batch_norm_one_pass", "batch_norm_two_pass", "group_norm"])
def test_an_outlier_in_front_loses_nothing(name: str) -> None:
    """Each thread takes distances from its first value, which may be far from the others."""
    family, problem = FAMILIES[name], layer_of(FAMILIES[name], 2, 31, 30, 8, dtype="float32")
    inputs = inputs_of(problem, 2, mean=5.0, deviation=0.1)
    inputs["in"][0, 0, 0] = -100.0
    check(family, problem, legal_rows(family, problem)[:3], inputs)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - ROW_NORMS.keys()))
def test_sums_do_not_depend_on_the_blocks_that_run_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    problem = layer_of(family, 2, 40, 40, 16, activation="relu")
    inputs = inputs_of(problem, 0)
    shared = [r for r in legal_rows(family, problem) if family.launch(problem, r).zeroed_bytes]
    for row in shared[:2]:
        together = interpret(family, problem, row, inputs, H100.arch)
        with monkeypatch.context() as patch:
            patch.setattr("ptx.launch.THREADS", 512)  # a block or two at a time
            apart = interpret(family, problem, row, inputs, H100.arch)
        for name, result in together.items():
            assert np.array_equal(result.view(torch.uint8), apart[name].view(torch.uint8))
    assert shared


@every_family
def test_a_wrong_input_is_seen(family: Family) -> None:
    problem = layer_of(family, 2, 6, 5, 16, activation="relu", residual=True)
    inputs, row = inputs_of(problem, 0), legal_rows(family, problem)[0]
    results = interpret(family, problem, row, inputs, H100.arch)
    launch = family.launch(problem, row)
    assert not wrong(problem, launch, results, expected(problem, inputs))
    for name, tensor in inputs.items():
        if name in ("mean", "invstd", "eps", "momentum"):
            continue  # PyTorch takes them of `in`; or they are the same everywhere
        other = inputs | {name: tensor.flip(0) + 0.5}
        if name == "running_var" and problem.is_backward:
            continue
        assert wrong(problem, launch, results, expected(problem, other)), name
