"""Row norm's families: legality, launches and what their kernels are compiled to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from layers import H100, ROW_NORMS
from norms import legal_rows, random_problem
from ptxas import ARCHS, resources

from confpred.families.protocol import Family, config_dict
from confpred.problem.conv2d import ACTIVATIONS, DTYPES
from confpred.problem.device import KNOWN, Device
from confpred.problem.norm_of_groups import AFFINE, Norm
from confpred.problem.operation import KernelSpec

every_family = pytest.mark.parametrize("family", ROW_NORMS.values(), ids=ROW_NORMS)


def layer_of(family: Family, **fields: object) -> Norm:
    return Norm(**{"n": 25_088, "p": 1, "c": 384, "direction": family.direction} | fields)


def sample_kernels(family: Family, count: int, seed: str) -> Iterator[KernelSpec]:
    """Yield kernels of random configs of large layers, as networks have them."""
    rng = random.Random(f"{family.name} {seed}")
    for _ in range(count):
        activation, dtype, affine = rng.choice(ACTIVATIONS), rng.choice(DTYPES), rng.choice(AFFINE)
        problem = layer_of(
            family,
            c=rng.choice((96, 192, 320, 333, 640, 768, 1000, 1024, 2048, 4096, 8192)),
            dtype=dtype,
            activation=activation,
            residual=rng.random() < 0.4 and (family.direction == "forward" or activation != "none"),
            affine=affine,
            weights="float32" if affine == "none" else rng.choice(("float32", dtype)),
            centred=rng.random() < 0.6,
        )
        yield family.launch(problem, rng.choice(legal_rows(family, problem))).steps[0].kernel


@every_family
def test_what_the_kernels_do_not_compute_is_refused(family: Family) -> None:
    (other,) = {"forward", "backward"} - {family.direction}
    for fields in ({"direction": other}, {"p": 2}, {"groups": 2}, {"adaptive": True}, {"c": 8200}):
        assert not family.legal(layer_of(family, **fields), H100).any(), fields


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [3, 7, 10, 36, 100, 1000, 2052, 5120, 8190, 8191, 8192])
@every_family
def test_every_number_of_channels_has_configs(family: Family, c: int, dtype: str) -> None:
    for n in (1, 25_088):
        problem = layer_of(family, n=n, c=c, dtype=dtype)
        assert legal_rows(family, problem)
        for row in legal_rows(family, problem):
            config = config_dict(family, row)
            assert c % config["vector"] == 0
            assert config["vector"] * problem.itemsize <= 16


@pytest.mark.slow(reason="every count of channels")
@pytest.mark.parametrize("dtype", DTYPES)
@every_family
def test_no_number_of_channels_is_left_out(family: Family, dtype: str) -> None:
    for c in range(3, 8193):
        problem = layer_of(family, c=c, dtype=dtype, activation="silu", residual=True)
        assert family.legal(problem, H100).any(), c


@pytest.mark.parametrize("c", [96, 192, 384, 768, 1024, 2048, 4096])
@every_family
def test_a_layer_has_some_tens_of_configs(family: Family, c: int) -> None:
    assert 10 <= len(legal_rows(family, layer_of(family, c=c))) <= 60


@pytest.mark.parametrize("c", [24, 96, 144, 320, 1000, 4096])
@every_family
def test_few_lanes_are_idle(family: Family, c: int) -> None:
    """At 96 or 144 channels too, which leave a third of a power of two empty."""
    problem = layer_of(family, c=c)
    for row in legal_rows(family, problem):
        macros = dict(family.launch(problem, row).steps[0].kernel.defines)
        covered = macros["LANES"] * macros["ACCESSES"] * macros["VECTOR"]
        assert c <= covered <= c * 4 / 3
        assert macros["FULL"] == (covered == c)


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
@every_family
def test_rows_are_cut_as_the_kernel_counts_them(family: Family, device: Device) -> None:
    rng = random.Random(family.name)
    for n in (1, 40, 25_088):
        problem = replace(random_problem(rng, family), n=n)
        rows = legal_rows(family, problem, device)
        for row in rng.sample(rows, min(20, len(rows))):
            config, (step, *_) = config_dict(family, row), family.launch(problem, row).steps
            at_once = config["threads"] // config["lanes"]
            assert step.block[0] == at_once * config["lanes"] == config["threads"]
            assert (step.grid[0] - 1) * at_once < n, "each block has a row"
            assert config["blocks"] > 0 or step.grid[0] * at_once >= n


@pytest.mark.parametrize("affine", AFFINE)
def test_gradients_of_weights_take_a_second_launch(affine: str) -> None:
    for family in ROW_NORMS.values():
        problem = layer_of(family, affine=affine)
        launch = family.launch(problem, legal_rows(family, problem)[0])
        sums = AFFINE.index(affine) * problem.is_backward
        assert len(launch.steps) == 1 + bool(sums)
        assert launch.scratch_bytes == 4 * sums * problem.c * launch.steps[0].grid[0]


@every_family
def test_the_least_memory_is_the_fastest_estimate(family: Family) -> None:
    """More accesses under way, and fewer idle lanes, are ranked before."""
    problem = layer_of(family)
    rows = np.array(legal_rows(family, problem))
    seconds = family.estimate_s(problem, H100, rows)
    best = config_dict(family, int(rows[np.argmin(seconds)]))
    assert problem.c % (best["lanes"] * best["vector"]) == 0
    assert seconds.min() < 1.5 * H100.roofline_s(problem) + 6e-6


@every_family
def test_a_few_kernels_compile_and_hardly_spill(family: Family) -> None:
    for kernel in sample_kernels(family, 4, "few"):
        registers, stack = resources(kernel, H100.arch)
        assert registers <= 255
        assert stack <= 64, kernel


@pytest.mark.slow(reason="sixteen compiles a family and target")
@pytest.mark.parametrize("arch", ARCHS)
@every_family
def test_a_sample_compiles_and_hardly_spills(family: Family, arch: str) -> None:
    for kernel in sample_kernels(family, 16, arch):
        registers, stack = resources(kernel, arch)
        assert 8 <= registers <= 255
        assert stack <= 64 or arch != H100.arch, kernel
