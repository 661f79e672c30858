"""Duties of every kernel family, over random problems."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import (
    CONVOLUTIONS,
    NORMS,
    random_legal_layer,
    random_norm,
    representative,
    served,
)
from strategies import problems, problems_of

from confpred.families.common import ATOMIC
from confpred.families.kernel_text import file_text
from confpred.families.protocol import (
    ABSENT,
    PYTORCH,
    PYTORCH_OPERATOR,
    Candidate,
    Family,
    config_dict,
)
from confpred.families.registry import (
    all_families,
    config_ids,
    config_of,
    config_words,
    family_named,
)
from confpred.problem.device import KNOWN, Device, get_device
from confpred.problem.operation import SCRATCH, ZEROED
from confpred.problem.record import Record

FAMILIES = CONVOLUTIONS | NORMS
WGRAD = [f for f in CONVOLUTIONS.values() if ("wgrad" in dict(served(f)))]
#: Operands that some problems lack; kernels are given a null for them.
LACKING = {
    *("bias", "residual", "bias_grad", "weight", "weight_grad", "residual_grad", "momentum"),
    *(f"{age}running_{name}" for age in ("", "new_") for name in ("mean", "var")),
    *("mean", "invstd", "eps"),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_convolution = pytest.mark.parametrize("family", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
devices = st.sampled_from(list(KNOWN.values()))


def own_problems(family: Family) -> st.SearchStrategy[Record]:
    """Problems of the family's operation, most of which it has configs for."""
    if family.name in CONVOLUTIONS:
        return problems_of(family)
    return st.integers(0, 2**32).map(lambda seed: random_norm(random.Random(seed), family))


@every_family
def test_a_family_is_found_by_its_name_and_keeps_the_protocol(family: Family) -> None:
    assert isinstance(family, Family)
    assert family_named(family.name) is family


@every_family
def test_the_config_table_is_a_constant_of_distinct_rows(family: Family) -> None:
    table = family.configs
    assert len(np.unique(table)) == len(table) > 0
    assert not table.flags.writeable
    assert all(np.issubdtype(table.dtype[name], np.integer) for name in table.dtype.names)
    config = config_dict(family, len(table) - 1)
    assert tuple(config.values()) == tuple(table[-1])
    assert all(type(value) is int for value in config.values())


@every_convolution
@given(data=st.data(), device=devices)
@settings(max_examples=50)
def test_legality_is_a_mask_over_the_table(
    family: Family, data: st.DataObject, device: Device
) -> None:
    problem = data.draw(problems() | problems_of(family))
    mask = family.legal(problem, device)
    assert mask.dtype == np.bool_
    assert mask.shape == family.configs.shape
    if problem.direction not in {direction for direction, _ in served(family)}:
        assert not mask.any()


@every_family
@given(data=st.data(), device=devices)
@settings(max_examples=50)
def test_every_legal_config_can_be_launched(
    family: Family, data: st.DataObject, device: Device
) -> None:
    problem = data.draw(own_problems(family))
    operands = {o.name for o in family.operation.operands(problem)}
    outputs = {o.name for o in family.operation.operands(problem) if o.terms}
    rows = np.flatnonzero(family.legal(problem, device))
    for row in rows[:: max(1, len(rows) // 20)]:
        launch = family.launch(problem, int(row))
        assert launch == family.launch(problem, int(row))
        assert launch.zeroed_bytes >= 0
        assert launch.scratch_bytes >= 0
        used = {name for step in launch.steps for name in step.operands}
        assert outputs <= used
        # Names of operands that the problem lacks, as a null bias, are known all the same.
        assert used <= operands | LACKING | {ZEROED, SCRATCH}
        assert ZEROED in used or not launch.zeroed_bytes
        assert SCRATCH in used or not launch.scratch_bytes
        for step in launch.steps:
            threads = int(np.prod(step.block))
            assert threads % 32 == 0
            assert 32 <= threads <= 1024
            assert 0 <= step.smem_bytes <= device.smem_per_block
            assert 1 <= step.grid[0] < 2**31
            assert all(1 <= size < 2**16 for size in step.grid[1:])
            assert all(type(n) is int for n in (*step.grid, *step.block, *step.scalars.values()))
            assert all(-(2**31) <= value < 2**31 for value in step.scalars.values())
            assert file_text(step.kernel.file)
            assert len(dict(step.kernel.defines)) == len(step.kernel.defines)


@every_family
@given(data=st.data(), device=devices)
@settings(max_examples=50)
def test_features_and_estimates_are_finite(
    family: Family, data: st.DataObject, device: Device
) -> None:
    problem = data.draw(own_problems(family))
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
@given(data=st.data(), device=devices, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_a_config_is_described_alike_whatever_it_is_asked_with(
    family: Family, data: st.DataObject, device: Device, seed: int
) -> None:
    problem = data.draw(own_problems(family))
    rows = np.flatnonzero(family.legal(problem, device))
    some = np.random.default_rng(seed).permutation(len(rows))[:20]
    alone = family.features(problem, device, rows[some])
    assert np.array_equal(alone, family.features(problem, device, rows)[some])


@every_convolution
def test_feature_names_are_distinct_and_each_varies(family: Family) -> None:
    """A column that is constant over many layers would teach a model nothing."""
    assert len(set(family.feature_names)) == len(family.feature_names)
    device = get_device("h100")
    rng = random.Random(0)
    odd = [random_legal_layer(rng, family, device) for _ in range(10)]
    matrices = []
    for layer in representative(family)[::5] + odd:
        rows = np.flatnonzero(family.legal(layer, device))
        matrices.append(family.features(layer, device, rows))
    spans = np.ptp(np.concatenate(matrices), axis=0)
    constant = [name for name, span in zip(family.feature_names, spans, strict=True) if not span]
    assert constant == []


@pytest.mark.parametrize("family", WGRAD, ids=lambda family: family.name)
@given(data=st.data(), device=devices)
@settings(max_examples=50)
def test_what_is_deterministic_is_legal_whether_asked_for_or_not(
    family: Family, data: st.DataObject, device: Device
) -> None:
    problem = data.draw(problems_of(family))
    fast = family.legal(replace(problem, deterministic=False), device)
    repeatable = family.legal(replace(problem, deterministic=True), device)
    assert not np.any(repeatable & ~fast)
    if "reduction" in family.configs.dtype.names:
        assert not np.any(repeatable & (family.configs["reduction"] == ATOMIC))
    assert repeatable.any() == fast.any()


# One value names a way to compute a problem, whoever computes it.


def test_pytorchs_operator_is_a_candidate_like_others() -> None:
    assert PYTORCH_OPERATOR.provider == PYTORCH
    assert PYTORCH not in all_families()
    assert config_of(PYTORCH_OPERATOR) == {}
    assert config_words(PYTORCH_OPERATOR) == ""
    assert config_ids(PYTORCH) == {"": PYTORCH_OPERATOR.config_id}


@pytest.mark.parametrize("name", all_families())
def test_words_name_each_config_of_a_family(name: str) -> None:
    configs = all_families()[name].configs
    ids = config_ids(name)
    assert list(ids.values()) == list(range(len(configs)))
    last = Candidate(name, len(configs) - 1)
    config = {field: configs[field][-1] for field in configs.dtype.names}
    config = {field: value for field, value in config.items() if value != ABSENT}
    assert config_of(last) == config
    assert config_words(last) == " ".join(f"{field}={value}" for field, value in config.items())
