"""The grouped weight-gradient family: what a launch sums.

The walk below follows ``kernels/grouped_wgrad.cu``, not the vectorised Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil, gcd

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import layers_of

from confpred.families.protocol import config_dict
from confpred.families.registry import all_families
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device

FAMILY = all_families()["grouped_wgrad"]


def reduced(window: int, stride: int, dilation: int) -> tuple[int, int, int]:
    """Stride and dilation without their common divisor, and that divisor."""
    divisor = stride if window == 1 else gcd(stride, dilation)
    return stride // divisor, 1 if window == 1 else dilation // divisor, divisor


def walked(
    problem: Problem, scalars: Mapping[str, int], n_tiles: int, part: int
) -> Counter[tuple[int, ...]]:
    """Return the (image tile, gradient row, filter row, input row) that block `part` of a tile
    multiplies, by the kernel's own steps and circular buffer. A gradient row counts once for filter
    row -1."""
    h, p, pad_h, rows = (scalars[name] for name in ("h", "p", "pad_h", "rows"))
    row_step, phases, phase_step = (scalars[name] for name in ("row_step", "phases", "phase_step"))
    flush, slice_rows, q_tiles = (scalars[name] for name in ("flush", "slice_rows", "q_tiles"))
    stride, _, _ = reduced(problem.r, problem.stride[0], problem.dilation[0])
    live = ceil(problem.r / stride)
    first = part // q_tiles * slice_rows
    last = min(first + slice_rows, n_tiles * phases * rows)
    buffer: list[tuple[int, ...] | None] = [None] * live  # the newest gradient row first
    found: Counter[tuple[int, ...]] = Counter()
    while first < last:
        lattice, row = divmod(first, rows)
        tile, phase = divmod(lattice, phases)
        end = min(rows, row + last - first)
        for at in range(row, end + (flush if end == rows else live - 1)):
            gradient = at * phases + phase
            valid = at < end and gradient < p
            buffer = [(tile, gradient) if valid else None, *buffer[:-1]]
            found.update([(*buffer[0], -1, 0)] if buffer[0] else [])
            for i in range(stride):
                y = phase * phase_step - pad_h + (at * stride + i) * row_step
                if 0 <= y < h and (at < end or (at - end + 1) * stride + i < problem.r):
                    for r in range(i, problem.r, stride):
                        met = buffer[r // stride]
                        found.update([(*met, r, y)] if met else [])
        first += end - row
    return found


@given(layers_of(FAMILY, largest=24, images=5), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_every_product_is_summed_once(problem: Problem, seed: int) -> None:
    """Over a filter tile's blocks, each gradient row meets each filter row where it should."""
    rows = np.flatnonzero(FAMILY.legal(problem, get_device("h100")))
    for row in map(int, np.random.default_rng(seed).permutation(rows)[:3]):
        config, launch = config_dict(FAMILY, row), FAMILY.launch(problem, row)
        scalars = launch.steps[0].scalars
        slices, q_tiles, k_tiles = (scalars[name] for name in ("slices", "q_tiles", "k_tiles"))
        n_tiles = ceil(problem.n / config["block_n"])
        assert launch.steps[0].grid == (k_tiles * q_tiles * slices, 1, 1)
        assert scalars["reduction"] == config["reduction"]
        assert q_tiles * config["block_q"] >= problem.q
        assert k_tiles * config["block_k"] >= problem.c
        found: Counter[tuple[int, ...]] = Counter()
        for part in range(0, q_tiles * slices, q_tiles):
            found += walked(problem, scalars, n_tiles, part)
        expected: Counter[tuple[int, ...]] = Counter()
        for tile in range(n_tiles):
            for p in range(problem.p):
                expected[tile, p, -1, 0] = 1
                for r in range(problem.r):
                    y = p * problem.stride[0] - problem.padding[0] + r * problem.dilation[0]
                    if 0 <= y < problem.h:
                        expected[tile, p, r, y] = 1
        assert found == expected


@given(layers_of(FAMILY), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_workspace_holds_the_sums(problem: Problem, seed: int) -> None:
    rows = np.flatnonzero(FAMILY.legal(problem, get_device("h100")))
    elements = problem.filter_elements + problem.bias * problem.k
    for row in map(int, np.random.default_rng(seed).permutation(rows)[:4]):
        launch, reduction = FAMILY.launch(problem, row), FAMILY.configs["reduction"][row]
        scalars = launch.steps[0].scalars
        parts, k_tiles = scalars["slices"] * scalars["q_tiles"], scalars["k_tiles"]
        assert len(launch.steps) == (2 if reduction == 1 else 1)
        assert launch.scratch_bytes == (4 * parts * elements if reduction in (1, 2) else 0)
        tickets = 16 * ceil(k_tiles / 4)
        assert launch.zeroed_bytes == {2: tickets, 3: tickets + 4 * elements}.get(reduction, 0)
        if reduction == 1:
            assert launch.steps[1].scalars["parts"] == parts
            assert launch.steps[1].scalars["elements"] == elements
            assert 128 * launch.steps[1].grid[0] >= elements
