"""Kernels of norms on a GPU, with poison around their operands, against float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from launching import Config, assert_repeats
from norms import FAMILIES, expected, inputs_of, layer_of, legal_rows, random_problem, wrong
from slow import slow_but

from confpred.families.protocol import Family, config_dict
from confpred.families.registry import operation_of
from confpred.measure.kernels import check
from confpred.measure.pytorch import measure_pytorch
from confpred.problem.conv2d import ACTIVATIONS, DTYPES
from confpred.problem.device import Device
from confpred.problem.norm import DIRECTIONS, BatchNorm
from confpred.problem.norm_of_groups import Norm

CONFIGS = 12
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("seed", slow_but(range(6), range(20), "more of the same"))
@every_family
def test_random_configs_of_a_random_layer_are_right(
    family: Family, seed: int, device: Device
) -> None:
    rng = random.Random(f"{family.name} {seed}")
    problem = random_problem(rng, family, most_elements=240_000)
    inputs = inputs_of(problem, seed)
    right, rows = expected(problem, inputs), legal_rows(family, problem, device)
    for row in rng.sample(rows, min(CONFIGS, len(rows))):
        config = Config(family, problem, row, inputs)
        for _ in range(3):  # launches that follow one another share their workspaces
            config.enqueue()
        found = wrong(problem, config.launch, config.results(), right)
        assert not found, f"{found}: {problem} {config_dict(family, row)}"


@pytest.mark.parametrize("c", [3, 10, 24, 144, 2048])
@every_family
def test_every_config_of_a_small_layer_is_right(family: Family, c: int, device: Device) -> None:
    problem = layer_of(family, 4, 14, 15, c, activation="silu")
    outcomes = check(problem, family, legal_rows(family, problem, device), ordinal=0)
    assert [outcome for outcome in outcomes if outcome.status != "ok"] == []
    assert outcomes


@pytest.mark.parametrize("activation", slow_but(["silu", "gelu"], ACTIVATIONS, "more of the same"))
@pytest.mark.parametrize("dtype", DTYPES)
@every_family
def test_every_activation_of_a_layer_of_a_network_is_right(
    family: Family, dtype: str, activation: str, device: Device
) -> None:
    residual = activation != "none"
    problem = layer_of(
        family, 8, 28, 28, 192, dtype=dtype, activation=activation, residual=residual
    )
    rows = legal_rows(family, problem, device)
    outcomes = check(problem, family, rows[:: max(1, len(rows) // 8)], ordinal=0)
    assert [outcome for outcome in outcomes if outcome.status != "ok"] == []


@pytest.mark.parametrize("dtype", DTYPES)
@every_family
def test_a_mean_of_a_thousand_deviations_is_right(
    family: Family, dtype: str, device: Device
) -> None:
    problem = layer_of(family, 16, 40, 41, 24, dtype=dtype)
    inputs = inputs_of(problem, 1, mean=1000.0, deviation=1.0)
    right, rows = expected(problem, inputs), legal_rows(family, problem, device)
    for row in rows[:: max(1, len(rows) // 16)]:
        config = Config(family, problem, row, inputs)
        config.enqueue()
        for name, result in config.results().items():
            error = (result.double() - right[name]).norm() / right[name].norm()
            assert error < (5e-3 if dtype == "bfloat16" else 8e-4), f"{name} of config {row}"


@every_family
def test_a_result_repeats_to_the_bit(family: Family, device: Device) -> None:
    problem = layer_of(family, 16, 28, 28, 96, activation="relu")
    inputs, rows = inputs_of(problem, 0), legal_rows(family, problem, device)
    for row in rows[:: max(1, len(rows) // 6)]:
        assert_repeats(Config(family, problem, row, inputs), 6, f"config {row}")


def test_what_was_an_output_before_is_an_input_of_the_problem(device: Device) -> None:
    """A backward pass takes statistics, which a forward pass of fewer channels wrote before."""
    for name, c in (("batch_norm_two_pass", 96), ("batch_norm_two_pass_backward", 160)):
        family = FAMILIES[name]
        problem = BatchNorm(4, 14, 14, c, activation="silu", direction=family.direction)
        outcomes = check(problem, family, legal_rows(family, problem, device)[:4], ordinal=0)
        assert [outcome.message for outcome in outcomes if outcome.status != "ok"] == []


@every_family
def test_what_is_not_written_is_seen(family: Family, device: Device) -> None:
    problem = layer_of(family, 2, 7, 7, 24)
    inputs = inputs_of(problem, 0)
    config = Config(family, problem, legal_rows(family, problem, device)[0], inputs)
    found = wrong(problem, config.launch, config.results(), expected(problem, inputs))
    assert set(found) == {output.name for output in config.outputs}


@pytest.mark.parametrize("stream_count", [4])
@pytest.mark.parametrize("name", [n for n in FAMILIES if "one_pass" in n or "group_norm" in n])
def test_launches_whose_blocks_wait_may_run_on_several_streams(
    name: str, stream_count: int, device: Device
) -> None:
    """The driver starts the blocks of such a launch together, or two could wait forever."""
    family = FAMILIES[name]
    problem = layer_of(family, 64 if "batch" in name else 2, 28, 28, 64, activation="relu")
    inputs, rows = inputs_of(problem, 0), legal_rows(family, problem, device)
    right = expected(problem, inputs)
    waiting = [r for r in rows if family.launch(problem, r).steps[0].cooperative]
    row = max(waiting, key=lambda r: family.launch(problem, r).steps[0].grid[0])
    configs = [Config(family, problem, row, inputs) for _ in range(stream_count)]
    streams = [torch.cuda.Stream() for _ in configs]
    torch.cuda.synchronize()
    for _ in range(50):
        for config, stream in zip(configs, streams, strict=True):
            with torch.cuda.stream(stream):
                config.enqueue()
    for config in configs:
        assert not wrong(problem, config.launch, config.results(), right)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pytorchs_operators_are_timed(direction: str, residual: bool, device: Device) -> None:
    fields: Any = {"activation": "relu", "residual": residual, "direction": direction}
    for problem in (
        BatchNorm(8, 28, 28, 64, **fields),
        Norm(8, 784, 64, 8, **fields),
        Norm(8, 784, 64, 64, affine="none", **fields),
        Norm(6272, 1, 64, weights="float16", **fields),
        Norm(6272, 1, 64, affine="weight", weights="float16", centred=False, **fields),
        Norm(8, 784, 64, 8, adaptive=True, **fields),
    ):
        outcome = measure_pytorch(operation_of(problem), problem, ordinal=0, seed=0)
        assert (outcome.status, outcome.message) == ("ok", ""), problem
        assert outcome.time_ms > 0
