"""Families of norms: legality, launches and what their kernels are compiled to."""

from __future__ import annotations

import random
from typing import Any

import norms
import pytest
from layers import ARCHITECTURES, GROUP_NORMS, H100, ROW_NORMS
from norms import FAMILIES, legal_rows, random_problem
from ptxas import ARCHS, resources

from confpred.cuda.compiler import ptx_of
from confpred.families.protocol import Family, config_dict
from confpred.problem.conv2d import DTYPES
from confpred.problem.device import Device

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
#: Row norms have no tiles (test_row_norm.py).
TILED = {name: family for name, family in FAMILIES.items() if name not in ROW_NORMS}
every_tiled_family = pytest.mark.parametrize("family", TILED.values(), ids=TILED)
CLUSTERED = [name for name in TILED if name in GROUP_NORMS]
ONE_PASS = [name for name in TILED if "one_pass" in name or name in CLUSTERED]


def layer_of(family: Family, **fields: Any) -> Any:
    usual = {"n": 128, "h": 28, "w": 28, "c": 144, "activation": "silu"}
    return norms.layer_of(family, **usual | fields)


@every_family
def test_the_other_direction_is_refused(family: Family) -> None:
    (other,) = {"forward", "backward"} - {family.direction}
    assert not family.legal(layer_of(family, direction=other), H100).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [1, 3, 6, 8, 96, 144, 480, 2048, 65_536])
@every_family
def test_every_number_of_channels_has_configs(family: Family, c: int, dtype: str) -> None:
    problem = layer_of(family, c=c, n=4, h=7, w=7, dtype=dtype)
    rows = legal_rows(family, problem)
    if c == 1 and family.name in ROW_NORMS:
        return  # nothing to normalise
    if c == 65_536 and (family.name in ONE_PASS or family.name in ROW_NORMS):
        return  # more columns than threads may wait for one another, or a group of too many
    assert rows
    for row in rows:
        config = config_dict(family, row)
        assert c % config["vector"] == 0
        assert config["vector"] * problem.itemsize <= 16


@pytest.mark.parametrize("c", [32, 96, 144, 480, 1152])
@every_tiled_family
def test_few_threads_are_idle(family: Family, c: int) -> None:
    """At 96 or 144 channels too, which leave a third of a tile of 64 empty."""
    problem = layer_of(family, c=c)
    for row in legal_rows(family, problem):
        (step, *_) = family.launch(problem, row).steps
        used = step.scalars["lanes"] * step.scalars["at_once"]
        assert step.block[0] - 32 < used <= step.block[0] <= config_dict(family, row)["threads"]


@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=ARCHITECTURES)
@every_tiled_family
def test_blocks_are_cut_as_the_kernel_counts_them(family: Family, device: Device) -> None:
    rng = random.Random(family.name)
    for _ in range(6):
        problem = random_problem(rng, family)
        rows = legal_rows(family, problem, device)
        for row in rng.sample(rows, min(20, len(rows))):
            for step in family.launch(problem, row).steps:
                s = step.scalars
                assert s["lanes"] * s["at_once"] <= step.block[0]
                assert step.grid[0] * step.grid[2] == s["tiles"] * s["splits"]
                assert 1 <= s["splits"] <= s["steps"], "each split has a step"
                columns = problem.c // int(dict(step.kernel.defines)["VECTOR"])
                whole = s["lanes"] if "width" in s else 1  # a tile has whole groups
                assert columns <= s["tiles"] * s["lanes"] < columns + s["tiles"] * whole
                if step.cooperative:
                    assert step.grid[0] * step.grid[1] <= device.sm_count * int(
                        dict(step.kernel.defines)["MIN_BLOCKS"]
                    )


def test_a_frozen_layer_takes_one_launch() -> None:
    for name in ("batch_norm_two_pass", "batch_norm_two_pass_backward"):
        family = FAMILIES[name]
        for frozen, steps in ((True, 1), (False, 2)):
            problem = layer_of(family, frozen=frozen)
            assert len(family.launch(problem, legal_rows(family, problem)[0]).steps) == steps


@pytest.mark.parametrize("name", ONE_PASS)
def test_blocks_that_wait_for_one_another_fit_the_device(name: str) -> None:
    """Their registers too, by what the compiler made of them: else the driver refuses them."""
    family = FAMILIES[name]
    problem = layer_of(family, c=256, residual=True)
    kernels = {}
    for row in legal_rows(family, problem):
        step = family.launch(problem, row).steps[0]
        kernels[step.kernel] = step
    for step in random.Random(0).sample(list(kernels.values()), 4):
        per_sm = int(dict(step.kernel.defines)["MIN_BLOCKS"])
        registers, stack = resources(step.kernel, H100.arch)
        assert per_sm * step.block[0] * registers <= H100.regs_per_sm
        smem_bytes = step.smem_bytes + H100.smem_reserved_per_block
        assert per_sm * smem_bytes <= H100.smem_per_sm
        assert stack <= 64, "the kernel spills"


@pytest.mark.parametrize("name", ONE_PASS)
def test_a_tensor_that_fits_is_kept_in_shared_memory(name: str) -> None:
    family = FAMILIES[name]
    problem = layer_of(family, n=32, h=14, w=14, c=480)
    rows = legal_rows(family, problem)
    kept = [family.launch(problem, row).steps[0].scalars for row in rows]
    assert any(s["kept"] * s["splits"] >= s["steps"] for s in kept)
    assert any(s["kept"] == 0 for s in kept) != (name in CLUSTERED)


@pytest.mark.slow(reason="eight compiles a family and target")
@pytest.mark.parametrize("arch", ARCHS)
@every_family
def test_a_sample_compiles_and_hardly_spills(family: Family, arch: str) -> None:
    rng, kernels = random.Random(f"{family.name} {arch}"), {}
    while len(kernels) < 8:
        problem = random_problem(rng, family)
        for row in rng.sample(legal_rows(family, problem), 1):
            kernels |= dict.fromkeys(family.launch(problem, row).kernels)
    for kernel in kernels:
        registers, stack = resources(kernel, arch)
        assert 8 <= registers <= 255
        assert stack <= 64 or arch != H100.arch, kernel


@pytest.mark.slow(reason="every template of two layers, and their references")
@every_family
def test_every_template_of_a_layer_compiles(family: Family) -> None:
    for fields in ({}, {"dtype": "float32", "residual": True, "activation": "gelu"}):
        problem = layer_of(family, **fields)
        kernels = {}
        for row in legal_rows(family, problem):
            kernels |= dict.fromkeys(family.launch(problem, row).kernels)
        for output in family.operation.operands(problem):
            if output.terms:
                kernels[family.operation.reference(problem, output.name).kernel] = None
        for kernel in kernels:
            assert kernel.entry in ptx_of(kernel, H100.arch)


@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("name", CLUSTERED)
def test_a_tile_of_a_sample_may_be_a_cluster(name: str, device: Device) -> None:
    """Then any number of samples is in a launch; else all blocks that wait must be running."""
    family = FAMILIES[name]
    problem, found = layer_of(family, n=600, h=64, w=64, c=320), set()
    for row in legal_rows(family, problem, device):
        (step,) = family.launch(problem, row).steps
        cluster, splits = config_dict(family, row)["cluster"], step.scalars["splits"]
        found.add(cluster)
        assert dict(step.kernel.defines)["CLUSTER"] == cluster
        assert step.grid[1:] == (600, cluster or 1)
        assert splits == (cluster or 1), "600 samples are too many to wait for one another"
        assert not step.cooperative
    assert found == ({0, 2, 4, 8} if device.arch in ("sm_90a", "sm_100", "sm_120") else {0})
