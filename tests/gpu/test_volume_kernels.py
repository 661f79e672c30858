"""Kernels of depthwise convolution of volumes on a GPU, with poison around their operands, against
float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from launching import Config, assert_repeats, outside
from layers import VOLUMES, random_legal_volume
from references import random_inputs, reference_nd, some_rows

from confpred.families.protocol import Family, config_dict
from confpred.measure.kernels import check
from confpred.measure.pytorch import measure_pytorch
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv import CONV, ConvNd
from confpred.problem.conv2d import DIRECTIONS, DTYPES
from confpred.problem.device import Device

KERNELS, CONFIGS = 4, 4  # of a problem, and of a kernel
MOST_FLOPS = 2**27
VIDEO = "rank=3 n=4 c=54 d=8 h=28 w=28 k=54 t=3 r=3 s=3 padding=1 groups=54"
every_family = pytest.mark.parametrize("family", VOLUMES.values(), ids=VOLUMES)


@pytest.mark.parametrize("seed", range(40))
@every_family
def test_random_configs_of_a_random_problem_are_correct(
    family: Family, seed: int, device: Device
) -> None:
    rng = random.Random(f"{family.name} {seed}")
    problem = random_legal_volume(rng, family, device, MOST_FLOPS)
    inputs = random_inputs(family, problem, seed)
    right = reference_nd(problem, inputs)
    for row in some_rows(family, problem, device, rng, KERNELS, CONFIGS):
        config = Config(family, problem, row, inputs)
        for _ in range(3):  # launches that follow one another share their workspaces
            config.enqueue()
        wrong = outside(config, right)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", ["", "stride=1x2x2", "t=5 r=5 s=5 padding=2", "t=7 r=1 s=1"])
@every_family
def test_every_config_of_a_layer_of_a_network_is_right(
    family: Family, change: str, dtype: str, device: Device
) -> None:
    problem = video(family, f"dtype={dtype} {change}")
    rows = np.flatnonzero(family.legal(problem, device)).tolist()
    outcomes = check(problem, family, rows, ordinal=0)
    assert [outcome for outcome in outcomes if outcome.status != "ok"] == []
    assert outcomes


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["volume_fprop", "volume_dgrad"])
def test_every_epilogue_is_right(name: str, activation: str, device: Device) -> None:
    family = VOLUMES[name]
    problem = video(family, f"activation={activation} bias=true residual=true")
    rows = np.flatnonzero(family.legal(problem, device)).tolist()
    outcomes = check(problem, family, rows[:: max(1, len(rows) // 8)], ordinal=0)
    assert [outcome for outcome in outcomes if outcome.status != "ok"] == []


@every_family
def test_a_result_repeats_to_the_bit(family: Family, device: Device) -> None:
    problem = video(family, "bias=true")
    if problem.direction == "wgrad":
        problem = replace(problem, deterministic=True)
    inputs = random_inputs(family, problem, 0)
    for row in some_rows(family, problem, device, random.Random(0), 3, 3):
        assert_repeats(Config(family, problem, row, inputs), 6, f"config {row}")


@every_family
def test_what_is_not_written_is_seen(family: Family, device: Device) -> None:
    problem = video(family, "")
    inputs = random_inputs(family, problem, 0)
    config = Config(family, problem, int(np.argmax(family.legal(problem, device))), inputs)
    assert outside(config, reference_nd(problem, inputs)) == {
        o.name: o.elements for o in config.outputs
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pytorchs_operators_are_timed(direction: str) -> None:
    problem = ConvNd.parse(f"{VIDEO} direction={direction}")
    outcome = measure_pytorch(CONV, problem, ordinal=0, seed=0)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.time_ms > 0


def video(family: Family, change: str) -> ConvNd:
    """Return `VIDEO` in the family's direction, with other words."""
    direction = family.name.rpartition("_")[2]
    words = dict(word.split("=") for word in f"{VIDEO} direction={direction} {change}".split())
    return ConvNd.parse(" ".join(f"{name}={value}" for name, value in words.items()))
