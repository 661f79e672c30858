"""The small functions that kernel families share."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layers import H100

from confpred.families import common
from confpred.families.common import (
    Occupancy,
    cut,
    distinct_bands,
    epilogue_macros,
)
from confpred.families.kernel_text import file_text
from confpred.families.registry import all_families
from confpred.families.table import config_table, crossed
from confpred.problem.activation import activation_feature
from confpred.problem.conv2d import ACTIVATIONS, DTYPES, Problem, dtype_macro

sizes = st.integers(1, 500)


@given(size=sizes, pieces=st.integers(1, 64))
def test_pieces_cover_a_size_and_none_is_empty(size: int, pieces: int) -> None:
    piece, count = cut(size, pieces)
    assert (count - 1) * piece < size <= count * piece
    assert count <= pieces
    assert [x.tolist() for x in cut(size, np.array([pieces]))] == [[piece], [count]]


def test_crossed_rows_are_those_of_a_product() -> None:
    parts = ((1, 2), ((3, 4), (5, 6), (7, 8)), (9,), (10, 11))
    rows = [(a, *b, c, d) for a, b, c, d in itertools.product(*parts)]
    assert crossed(*parts).tolist() == [list(row) for row in rows]
    table = config_table("abcde", crossed(*parts))
    assert table.tolist() == config_table("abcde", rows).tolist() == rows


@given(size=sizes)
def test_distinct_bands_are_what_differs_of_all_counts(size: int) -> None:
    counts = np.array([1, 2, 4, 8, 16, 32, 64])
    heights = cut(size, counts)[0]
    kept = heights[distinct_bands(size, counts)].tolist()
    several = {height for height in heights.tolist() if height >= 2}
    assert kept == sorted({size} | several, reverse=True)


@pytest.mark.parametrize(
    ("threads", "registers", "smem_bytes", "held"),
    [
        (32, 16, 0, 32),  # as many blocks as there are at most
        (256, 16, 0, 8),  # as many warps
        (1024, 64, 0, 1),  # registers
        (128, 32, 100_000, 2),  # shared memory, of which the driver takes some
        (1024, 255, 0, 1),  # what does not fit still counts as one
    ],
)
def test_a_multiprocessor_holds_what_its_scarcest_resource_allows(
    threads: int, registers: int, smem_bytes: int, held: int
) -> None:
    blocks, threads, registers, smem_bytes = (
        np.array([x]) for x in (198, threads, registers, smem_bytes)
    )
    found = Occupancy.of(H100, blocks, threads, registers, smem_bytes)
    waves = 198 / (132 * held)
    assert found.per_sm == held
    assert found.sm_blocks == 2
    assert found.waves == waves
    assert found.wave_waste == pytest.approx(np.ceil(waves) / waves)
    assert found.rounds == pytest.approx(2 / min(2, held))
    assert found.resident == pytest.approx(min(198 / 132, held))
    assert found.features()["warps_per_sm"] == pytest.approx(found.resident * threads / 32)


def test_a_feature_that_a_family_derives_stands_in_for_the_problems() -> None:
    family = all_families()["grouped_dgrad"]
    problem = Problem(4, 64, 28, 28, 64, 3, 3, stride=2, padding=1, groups=8, direction="dgrad")
    rows = np.flatnonzero(family.legal(problem, H100))[:5]
    matrix = family.features(problem, H100, rows)
    columns = dict(zip(family.feature_names, matrix.T, strict=True))
    assert columns["log_n"].tolist() == [2.0] * 5
    assert columns["log_p"].tolist() == [np.float32(np.log2(problem.h))] * 5
    assert columns["block_q"].tolist() == family.configs["block_q"][rows].tolist()


def test_the_kernels_know_every_dtype_and_activation() -> None:
    text = file_text("common.cuh") + file_text("activations.cuh")
    known = set(re.findall(r"#define (\w+)", text))
    layer = Problem(1, 8, 9, 9, 8, 3, 3, groups=8)
    for dtype in DTYPES:
        assert dtype_macro(replace(layer, dtype=dtype))[1] in known
    for activation in ACTIVATIONS:
        assert dict(epilogue_macros(replace(layer, activation=activation)))["ACTIVATION"] in known


def test_models_take_a_leaky_relu_for_relu6() -> None:
    """Others keep their numbers, by which models were trained."""
    assert [*map(activation_feature, ACTIVATIONS[:9])] == [0, 1, 2, 3, 4, 5, 4, 4, 4]


def test_the_kernels_have_the_same_numbers_for_the_ways_to_add_sums() -> None:
    (words,) = re.findall(r"enum { (DIRECT\b.*) };", file_text("common.cuh"))
    assert [getattr(common, word) for word in words.split(", ")] == [0, 1, 2, 3]


def test_few_bytes_in_flight_bound_the_rate_of_memory() -> None:
    fast, slow = common.memory_s(10**9, H100, np.array([1e6, 1e3]))
    assert fast == 1e9 / H100.dram_bytes_per_s
    assert slow == pytest.approx(1e9 * common.LOAD_S / (H100.sm_count * 1e3))
    assert slow > fast
