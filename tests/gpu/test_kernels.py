"""Every family's kernels against an independent reference, over random problems and configs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from launching import Config, assert_repeats, outside
from layers import CONVOLUTIONS, random_legal_layer
from references import random_inputs, reference, some_rows
from slow import slow_but

from confpred.families.protocol import Family, config_dict
from confpred.measure.kernels import check
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device

PROBLEMS = 40
KERNELS, CONFIGS = 3, 3  # of a problem, and of a kernel
REPEATS = 20

FAMILIES = CONVOLUTIONS
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("seed", slow_but(range(5), range(PROBLEMS), "more of the same"))
@every_family
def test_random_configs_of_a_random_problem_are_correct(
    family: Family, seed: int, device: Device
) -> None:
    rng = random.Random(seed)
    problem = random_legal_layer(rng, family, device)
    inputs = random_inputs(family, problem, seed)
    expected = reference(problem, inputs)
    for row in some_rows(family, problem, device, rng, KERNELS, CONFIGS):
        config = Config(family, problem, row, inputs)
        config.enqueue()
        wrong = outside(config, expected)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


@every_family
def test_the_checks_can_fail(family: Family, device: Device) -> None:
    """Any other input, and a single changed element, are noticed."""
    rng = random.Random(1)
    problem = random_legal_layer(rng, family, device)
    (row, *_) = some_rows(family, problem, device, rng, 1, 1)
    inputs = random_inputs(family, problem, 0)
    config = Config(family, problem, row, inputs)
    config.enqueue()
    expected = reference(problem, inputs)
    assert not outside(config, expected)
    for name, tensor in inputs.items():
        if tensor.dim() == 4 and name != "residual":
            other = inputs | {name: tensor.flip(0, 1, 2, 3)}
            assert outside(config, reference(problem, other)), name
    output = config.outputs[0]
    config.operands[output.name].inside[:4] = 0x55  # one element or two
    assert outside(config, expected)[output.name] in (1, 2)


@every_family
def test_what_is_not_written_is_seen(family: Family, device: Device) -> None:
    rng = random.Random(2)
    problem = random_legal_layer(rng, family, device)
    (row, *_) = some_rows(family, problem, device, rng, 1, 1)
    inputs = random_inputs(family, problem, 0)
    config = Config(family, problem, row, inputs)
    wrong = outside(config, reference(problem, inputs))
    assert wrong == {o.name: o.elements for o in config.outputs}


@every_family
def test_the_samplers_check_agrees(family: Family, device: Device) -> None:
    rng = random.Random(3)
    problem = random_legal_layer(rng, family, device)
    rows = some_rows(family, problem, device, rng, 2, 2)
    outcomes = check(problem, family, rows, ordinal=0)
    assert [(o.config_id, o.status, o.message) for o in outcomes] == [
        (row, "ok", "") for row in rows
    ]


@pytest.mark.parametrize("seed", slow_but(range(3), range(8), "more of the same"))
@every_family
def test_deterministic_configs_repeat_to_the_bit(family: Family, seed: int, device: Device) -> None:
    problem, rows = deterministic_problem(family, seed, device)
    inputs = random_inputs(family, problem, seed)
    for row in rows:
        told = f"{problem} {config_dict(family, row)}"
        assert_repeats(Config(family, problem, row, inputs), REPEATS, told)


def deterministic_problem(family: Family, seed: int, device: Device) -> tuple[Problem, list[int]]:
    """Return a random problem whose every config must repeat itself, and configs of it."""
    rng = random.Random(100 + seed)
    while True:
        problem = random_legal_layer(rng, family, device)
        if problem.direction == "wgrad":
            problem = replace(problem, deterministic=True)
        if family.legal(problem, device).any():
            return problem, some_rows(family, problem, device, rng, 2, 3)


@pytest.mark.parametrize("seed", slow_but(range(2), range(4), "more of the same"))
@every_family
def test_a_config_may_be_launched_again_at_once(family: Family, seed: int, device: Device) -> None:
    """Launches that follow one another share their workspaces and do not disturb one another."""
    rng = random.Random(200 + seed)
    problem = random_legal_layer(rng, family, device)
    inputs = random_inputs(family, problem, seed)
    expected = reference(problem, inputs)
    for row in some_rows(family, problem, device, rng, 2, 2):
        config = Config(family, problem, row, inputs)
        for _ in range(10):
            config.enqueue()
        assert not outside(config, expected), f"{problem} {config_dict(family, row)}"
