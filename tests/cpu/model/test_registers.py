"""Registers of compiled kernels are known for every layer and config that shares them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layers import CONVOLUTIONS

from confpred.errors import ModelError
from confpred.families.common import Occupancy
from confpred.families.protocol import CompiledFamily
from confpred.model.features import Pool, Registers, kernels_of, registers_text
from confpred.problem.conv2d import Kind, Problem
from confpred.problem.device import get_device

FAMILY = CONVOLUTIONS["grouped_fprop"]
H100 = get_device("h100")
LAYER = Problem(16, 64, 28, 28, 64, 3, 3, padding=1, groups=8)
ROWS = np.flatnonzero(FAMILY.legal(LAYER, H100))


def table(registers: np.ndarray, problem: Problem = LAYER, rows: np.ndarray = ROWS) -> Registers:
    return Registers(FAMILY, registers_text(FAMILY, [(problem, rows, registers)]))


def test_every_family_of_this_package_says_what_its_kernels_are_compiled_for() -> None:
    for family in CONVOLUTIONS.values():
        assert isinstance(family, CompiledFamily)
        assert set(family.kernel_fields) <= set(family.configs.dtype.names)


@pytest.mark.parametrize("name", sorted(CONVOLUTIONS))
def test_configs_of_one_number_launch_one_kernel(name: str) -> None:
    """And layers of one kind, whatever their sizes."""
    family = CONVOLUTIONS[name]
    direction = name.rpartition("_")[2]
    width = {"grouped": 8, "anywidth": 12}.get(name.partition("_")[0], 1)
    layers = [
        Problem(n, c, size, size, c, 3, 3, padding=1, groups=c // width, direction=direction)
        for n, size, most in ((8, 28, 64), (33, 19, 128))
        for c in (most // width * width,)
    ]
    assert Kind.of(layers[0]) == Kind.of(layers[1])
    kernels, found = kernels_of(family), {}
    for layer in layers:
        for row in np.flatnonzero(family.legal(layer, H100))[::37].tolist():
            kernel = family.launch(layer, row).steps[0].kernel
            assert found.setdefault(int(kernels[row]), kernel) == kernel


def test_registers_are_those_of_the_kernel_or_of_one_most_like_it() -> None:
    known = table(np.full(len(ROWS), 96))
    assert (known.of(replace(LAYER, n=3, h=60), ROWS) == 96).all()
    assert (known.of(replace(LAYER, bias=True, activation="relu"), ROWS) == 96).all()
    assert (known.of(replace(LAYER, dtype="bfloat16"), ROWS) == 96).all()
    assert (known.of(replace(LAYER, r=5, s=5), ROWS) == 0).all()


def test_a_kind_of_its_own_goes_before_one_that_is_like_it() -> None:
    relu = replace(LAYER, activation="relu")
    few = ROWS[:1]
    text = registers_text(
        FAMILY, [(LAYER, ROWS, np.full(len(ROWS), 96)), (relu, few, np.array([128]))]
    )
    known = Registers(FAMILY, text)
    same = kernels_of(FAMILY)[ROWS] == kernels_of(FAMILY)[few[0]]
    assert (known.of(relu, ROWS) == np.where(same, 128, 96)).all()


def test_the_features_follow_from_the_registers_that_are_known() -> None:
    registers = np.full(len(ROWS), 129)
    registers[: len(ROWS) // 2] = 0  # not recorded
    known = table(registers)
    pool = Pool([FAMILY])
    plain, corrected = (
        dict(
            zip(pool.feature_names, pool.features(FAMILY, LAYER, H100, ROWS, which).T, strict=True)
        )
        for which in (None, known)
    )
    is_known = known.of(LAYER, ROWS) > 0
    assert 0 < is_known.sum() < len(ROWS)
    assert (corrected["registers"][is_known] == 129).all()
    blocks = np.rint(2.0 ** plain["log_blocks"]).astype(np.int64)
    wide = [plain[n].astype(np.int64) for n in ("threads", "smem_bytes")]
    filled = Occupancy.of(H100, blocks, wide[0], np.full(len(ROWS), 136), wide[1]).features()
    for name, column in corrected.items():
        if name in ("blocks_per_sm", "warps_per_sm", "waves", "wave_waste"):
            assert column[is_known] == pytest.approx(filled[name][is_known], rel=1e-4)
        elif name != "registers":
            assert np.array_equal(column, plain[name], equal_nan=True)
        assert np.array_equal(column[~is_known], plain[name][~is_known], equal_nan=True)


def test_nothing_recorded_makes_no_table() -> None:
    assert registers_text(FAMILY, [(LAYER, ROWS, None)]) is None
    assert registers_text(FAMILY, [(LAYER, ROWS, np.zeros(len(ROWS), np.int64))]) is None


def test_a_table_of_other_configs_is_refused() -> None:
    with pytest.raises(ModelError, match="of other configs"):
        Registers(FAMILY, f'{{"{Kind.of(LAYER)}": [96]}}').of(LAYER, ROWS)
