"""What every kernel family owes its callers, over random problems."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import grouped_problems, problems

from confpred.device import KNOWN, Device, get_device
from confpred.families import Family, all_families, config_dict
from confpred.problem import Problem

FAMILIES = all_families()
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
devices = st.sampled_from(list(KNOWN.values()))


@every_family
def test_a_family_is_found_by_its_name_and_keeps_the_protocol(family: Family) -> None:
    assert isinstance(family, Family)
    assert FAMILIES[family.name] is family


@every_family
def test_the_config_table_is_a_constant_of_distinct_rows(family: Family) -> None:
    table = family.configs
    assert len(np.unique(table)) == len(table) > 0
    assert not table.flags.writeable
    assert all(np.issubdtype(table.dtype[name], np.integer) for name in table.dtype.names)
    config = config_dict(family, len(table) - 1)
    assert tuple(config.values()) == tuple(table[-1])
    assert all(type(value) is int for value in config.values())


@every_family
@given(problem=problems() | grouped_problems(), device=devices)
def test_legality_is_a_mask_over_the_table(
    family: Family, problem: Problem, device: Device
) -> None:
    mask = family.legal(problem, device)
    assert mask.dtype == np.bool_
    assert mask.shape == family.configs.shape


@every_family
@given(problem=grouped_problems(), device=devices)
def test_every_legal_config_can_be_launched(
    family: Family, problem: Problem, device: Device
) -> None:
    rows = np.flatnonzero(family.legal(problem, device))
    for row in rows[:: max(1, len(rows) // 50)]:
        launch = family.launch(problem, int(row))
        threads = int(np.prod(launch.block))
        assert threads % 32 == 0
        assert 32 <= threads <= 1024
        assert 0 <= launch.smem_bytes <= device.smem_per_block
        assert 1 <= launch.grid[0] < 2**31
        assert all(1 <= size < 2**16 for size in launch.grid[1:])
        assert all(type(value) is int and 0 <= value < 2**31 for value in launch.scalars)
        assert family.workspace_bytes(problem, int(row)) >= 0


@every_family
@given(problem=grouped_problems(), device=devices)
def test_features_and_estimates_are_finite(
    family: Family, problem: Problem, device: Device
) -> None:
    rows = np.flatnonzero(family.legal(problem, device))
    matrix = family.features(problem, device, rows)
    assert matrix.shape == (len(rows), len(family.feature_names))
    assert matrix.dtype == np.float32
    assert np.isfinite(matrix).all()
    seconds = family.estimate_s(problem, device, rows)
    assert seconds.shape == rows.shape
    assert np.isfinite(seconds).all()
    # An estimate below the roofline would be a promise that no kernel can keep.
    assert (seconds >= device.roofline_s(problem)).all()


@every_family
@given(problem=grouped_problems(), device=devices, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_a_config_is_described_alike_whatever_it_is_asked_with(
    family: Family, problem: Problem, device: Device, seed: int
) -> None:
    rows = np.flatnonzero(family.legal(problem, device))
    some = np.random.default_rng(seed).permutation(len(rows))[:20]
    alone = family.features(problem, device, rows[some])
    assert np.array_equal(alone, family.features(problem, device, rows)[some])


@every_family
def test_feature_names_are_distinct_and_each_varies(family: Family) -> None:
    """A column that is constant over many layers would teach a model nothing."""
    assert len(set(family.feature_names)) == len(family.feature_names)
    device = get_device("h100")
    layers = (
        "n=32 c=64 h=56 w=56 k=64 r=3 s=3 groups=8 padding=1",
        "n=1 c=256 h=13 w=17 k=256 r=5 s=1 groups=16 bias=true activation=gelu",
        "n=128 c=528 h=9 w=28 k=528 r=1 s=3 groups=33 dtype=bfloat16 activation=relu",
        "n=32 c=512 h=14 w=14 k=512 r=5 s=5 groups=16 padding=2",
    )
    matrices = []
    for layer in map(Problem.parse, layers):
        rows = np.flatnonzero(family.legal(layer, device))
        matrices.append(family.features(layer, device, rows))
    spans = np.ptp(np.concatenate(matrices), axis=0)
    constant = [name for name, span in zip(family.feature_names, spans, strict=True) if not span]
    assert constant == []
