"""The families of both depthwise gradients: which layers they take, how their launches cover them,
and what their kernels are compiled to."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from layers import GRADIENTS, H100, random_legal_layer
from ptxas import resources
from slow import slow_but

from confpred.families.common import ATOMIC
from confpred.families.protocol import Family, config_dict
from confpred.families.registry import family_named
from confpred.problem.conv2d import DTYPES
from confpred.problem.device import KNOWN, Device
from confpred.problem.gradients import Gradients

FAMILIES = GRADIENTS
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
SIMT, BANDED = (FAMILIES[name] for name in ("depthwise_both", "depthwise_banded_both"))


def layer(r: int, stride: int = 1, **fields: object) -> Gradients:
    usual = {"n": 128, "c": 144, "h": 56, "w": 56, "dtype": "float16"} | fields
    c = usual["c"]
    return Gradients(**{"k": c, "groups": c} | usual, r=r, s=r, stride=stride, padding=r // 2)


def legal_rows(family: Family, problem: Gradients, device: Device = H100) -> list[int]:
    return np.flatnonzero(family.legal(problem, device)).tolist()


@every_family
def test_a_family_is_found_by_its_name(family: Family) -> None:
    assert family_named(family.name) is family
    assert isinstance(family, Family)
    assert not family.configs.flags.writeable
    assert len(np.unique(family.configs)) == len(family.configs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("r", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)])
def test_layers_of_networks_have_configs(r: int, stride: int, dtype: str) -> None:
    problem = layer(r, stride, dtype=dtype)
    banded = legal_rows(BANDED, problem)
    assert bool(banded) == (stride == 1 and dtype != "float32")
    assert banded or legal_rows(SIMT, problem) or r == 7
    if banded:
        assert legal_rows(BANDED, replace(problem, bias=True))


@every_family
def test_other_layers_are_refused(family: Family) -> None:
    assert legal_rows(family, layer(3))
    for other in (
        layer(3, groups=72),
        layer(3, k=288),
        replace(layer(3), padding=3, bias=True),  # pixels that no input pixel meets
        replace(layer(3), dilation=4),
    ):
        assert not legal_rows(family, other)
    assert legal_rows(family, replace(layer(3), padding=2))
    assert not legal_rows(BANDED, layer(3, c=12))
    assert legal_rows(SIMT, layer(3, c=13))


@every_family
def test_a_repeatable_sum_is_not_atomic(family: Family) -> None:
    rows = {
        repeats: legal_rows(family, replace(layer(3), deterministic=repeats))
        for repeats in (False, True)
    }
    assert (family.configs["reduction"][rows[False]] == ATOMIC).any()
    assert not (family.configs["reduction"][rows[True]] == ATOMIC).any()
    assert set(rows[True]) < set(rows[False])


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
@every_family
def test_every_legal_config_covers_the_layer(family: Family, device: Device) -> None:
    rng = random.Random(f"{family.name} {device.key}")
    for _ in range(4):
        problem = random_legal_layer(rng, family, device)
        rows = legal_rows(family, problem, device)
        for row in rng.sample(rows, min(20, len(rows))):
            launch = family.launch(problem, row)
            assert launch == family.launch(problem, row)
            (step, *_), config = launch.steps, config_dict(family, row)
            s = step.scalars
            assert step.grid == (s["c_tiles"] * config["splits"], 1, 1)
            assert step.smem_bytes <= device.smem_per_block
            if family is SIMT:
                vectors = problem.c // config["vec"]
                assert vectors <= s["c_tiles"] * s["lanes_c"]
                assert s["lanes_c"] * s["tiles_at_once"] <= step.block[0] <= 256
                above, left = s["shift_h"], s["shift_w"]
                groups = -(-(problem.h + above) // problem.stride[0])
                assert s["w_tiles"] * config["tile_w"] >= problem.w + left
                assert s["band_groups"] * (s["bands"] - 1) < groups <= s["band_groups"] * s["bands"]
                assert (above, left) < problem.stride or (above, left) == (0, 0)


@every_family
def test_features_and_estimates_are_finite(family: Family) -> None:
    rng = random.Random(f"{family.name} features")
    for _ in range(6):
        problem = random_legal_layer(rng, family, H100)
        rows = np.array(legal_rows(family, problem), np.intp)
        matrix = family.features(problem, H100, rows)
        assert matrix.shape == (len(rows), len(family.feature_names))
        assert np.isfinite(matrix).all()
        assert (family.estimate_s(problem, H100, rows) >= H100.roofline_s(problem)).all()


@pytest.mark.parametrize("seed", slow_but([0], range(6), "eight compiles each"))
@every_family
def test_kernels_of_networks_do_not_spill(family: Family, seed: int) -> None:
    rng, kernels = random.Random(seed), {}
    while len(kernels) < 8:
        problem = layer(rng.choice((3, 5, 7)), rng.choice((1, 2)), n=rng.choice((32, 128)))
        rows = legal_rows(family, problem)
        if rows:
            kernels |= {family.launch(problem, rng.choice(rows)).steps[0].kernel: None}
    for kernel in kernels:
        registers, stack = resources(kernel, H100.arch)
        assert 32 <= registers <= 255
        assert stack <= 128, kernel
