"""Kernels of convolution of lines and volumes on a GPU, with poison around operands, against
float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from launching import Config, assert_repeats, outside
from layers import DENSE_VOLUMES, LINES, OTHER_RANKS, random_legal_conv
from references import random_inputs, reference_nd, some_rows
from slow import slow_but

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
SCAN = "rank=3 n=2 c=24 d=12 h=28 w=28 k=24 t=3 r=3 s=3 padding=1"
SPEECH = "n=4 c=96 w=504 k=96 s=31 padding=15 groups=96 layout=channels_first"
VIDEOS = ("", "stride=1x2x2", "t=5 r=5 s=5 padding=2", "t=7 r=1 s=1")
SPEECHES = ("", "s=4 padding=3 cut=3", "w=501 stride=2", "s=3 dilation=64 padding=64", "s=64")
SCANS = (
    "",
    "c=24 k=48 stride=2",
    "t=5 r=5 s=5 padding=2 c=16 k=16",
    "t=2 r=2 s=2 stride=2 padding=0 c=40 k=32",
)
LAYERS = [
    (family, change)
    for name, family in OTHER_RANKS.items()
    for change in (SPEECHES if name in LINES else SCANS if name in DENSE_VOLUMES else VIDEOS)
]
every_family = pytest.mark.parametrize("family", OTHER_RANKS.values(), ids=OTHER_RANKS)


@pytest.mark.parametrize("seed", slow_but(range(8), range(40), "more of the same"))
@every_family
def test_random_configs_of_a_random_problem_are_correct(
    family: Family, seed: int, device: Device
) -> None:
    rng = random.Random(f"{family.name} {seed}")
    problem = random_legal_conv(rng, family, device, MOST_FLOPS)
    inputs = random_inputs(family, problem, seed)
    right = reference_nd(problem, inputs)
    for row in some_rows(family, problem, device, rng, KERNELS, CONFIGS):
        config = Config(family, problem, row, inputs)
        for _ in range(3):  # launches that follow one another share their workspaces
            config.enqueue()
        wrong = outside(config, right)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], DTYPES, "more of the same"))
@pytest.mark.parametrize(("family", "change"), LAYERS)
def test_every_config_of_a_layer_of_a_network_is_right(
    family: Family, change: str, dtype: str, device: Device
) -> None:
    if dtype == "float32" and family.name in DENSE_VOLUMES:
        dtype = "float16"  # tensor cores have no float32
    problem = layer_of(family, f"dtype={dtype} {change}")
    rows = np.flatnonzero(family.legal(problem, device)).tolist()
    outcomes = check(problem, family, rows, ordinal=0)
    assert [outcome for outcome in outcomes if outcome.status != "ok"] == []
    assert outcomes


@pytest.mark.parametrize("activation", slow_but(["silu", "gelu"], ACTIVATIONS, "more of the same"))
@pytest.mark.parametrize("name", [name for name in OTHER_RANKS if not name.endswith("wgrad")])
def test_every_epilogue_is_right(name: str, activation: str, device: Device) -> None:
    family = OTHER_RANKS[name]
    problem = layer_of(family, f"activation={activation} bias=true residual=true")
    rows = np.flatnonzero(family.legal(problem, device)).tolist()
    outcomes = check(problem, family, rows[:: max(1, len(rows) // 8)], ordinal=0)
    assert [outcome for outcome in outcomes if outcome.status != "ok"] == []


@every_family
def test_a_result_repeats_to_the_bit(family: Family, device: Device) -> None:
    problem = layer_of(family, "bias=true")
    if problem.direction == "wgrad":
        problem = replace(problem, deterministic=True)
    inputs = random_inputs(family, problem, 0)
    for row in some_rows(family, problem, device, random.Random(0), 3, 3):
        assert_repeats(Config(family, problem, row, inputs), 6, f"config {row}")


@every_family
def test_what_is_not_written_is_seen(family: Family, device: Device) -> None:
    problem = layer_of(family, "")
    inputs = random_inputs(family, problem, 0)
    config = Config(family, problem, int(np.argmax(family.legal(problem, device))), inputs)
    assert outside(config, reference_nd(problem, inputs)) == {
        o.name: o.elements for o in config.outputs
    }


@pytest.mark.parametrize("text", [VIDEO, SPEECH])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pytorchs_operators_are_timed(direction: str, text: str) -> None:
    problem = ConvNd.parse(f"{text} direction={direction}")
    outcome = measure_pytorch(CONV, problem, ordinal=0, seed=0)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.time_ms > 0


def layer_of(family: Family, change: str) -> ConvNd:
    """Return `VIDEO`, `SCAN` or `SPEECH` in the family's direction, with other words."""
    is_dense, direction = family.name in DENSE_VOLUMES, family.name.rpartition("_")[2]
    text = SPEECH if family.name in LINES else SCAN if is_dense else VIDEO
    words = dict(word.split("=") for word in f"{text} direction={direction} {change}".split())
    return ConvNd.parse(" ".join(f"{name}={value}" for name, value in words.items()))
