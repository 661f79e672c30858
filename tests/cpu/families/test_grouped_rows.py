"""The grouped families: limits of a device, and what a launch of ``grouped_rows.cu`` covers.

The walk below follows the kernel's source, not the vectorised Python.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import layers_of

from confpred.families.grouped import describe_axis
from confpred.families.registry import all_families
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import get_device

FAMILIES = {direction: all_families()[f"grouped_{direction}"] for direction in ("fprop", "dgrad")}
H100 = get_device("h100")


def small_layers(largest: int) -> st.SearchStrategy[Problem]:
    families = st.sampled_from(list(FAMILIES.values()))
    return families.flatmap(lambda family: layers_of(family, largest=largest, images=9))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_less_shared_memory_leaves_fewer_configs(direction: str) -> None:
    """The shared memory of a block, not of a multiprocessor, which has more."""
    family = all_families()[f"grouped_{direction}"]
    layer = f"n=32 c=256 h=28 w=28 k=256 r=3 s=3 groups=16 padding=1 direction={direction}"
    problem = Problem.parse(layer)
    mask, smem = family.legal(problem, H100), family._shape(problem, family.whole).smem_bytes
    limit = int(np.median(smem[mask]))
    small = replace(H100, smem_per_block=limit)
    assert np.array_equal(family.legal(problem, small), mask & (smem <= limit))
    assert 0 < (mask & (smem <= limit)).sum() < mask.sum()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_blocks_images_are_addressed_in_32_bits(direction: str) -> None:
    family = all_families()[f"grouped_{direction}"]
    layer = "n=4 c=64 h={0} w={0} k=64 r=3 s=3 groups=8 padding=1 direction={1}"
    legal = family.legal(Problem.parse(layer.format(4096, direction)), H100)  # 2^30 elements each
    assert set(family.configs["block_n"][legal].tolist()) == {1}
    assert not family.legal(Problem.parse(layer.format(8192, direction)), H100).any()


@given(small_layers(24), st.integers(0, 1), st.integers(1, 9))
@settings(max_examples=300)
def test_a_walk_meets_the_taps_of_the_definition(problem: Problem, axis: int, band: int) -> None:
    """Along one axis, every output is written once, from all inputs and taps that it is made of."""
    sizes = ((problem.h, problem.w)[axis], (problem.p, problem.q)[axis])
    inputs, outputs = sizes if problem.direction == "fprop" else sizes[::-1]
    walk = describe_axis(problem, axis)
    written: list[int] = []
    met = set()
    for lattice in range(walk.out_step):
        for first in range(0, walk.positions * walk.up, band * walk.up):
            out = walk.out_origin + lattice + first * walk.out_step
            start = walk.in_origin + lattice * walk.in_lattice
            start += first * walk.down // walk.up * walk.in_step
            rows = min(band * walk.up, ceil((outputs - out) / walk.out_step))
            written += [out + row * walk.out_step for row in range(max(0, rows))]
            # The kernel's own loop: step, tap, and the row that they make.
            for step in range(rows * walk.down + walk.taps):
                for tap in range(walk.taps):
                    row, rest = divmod(walk.up * step + walk.up - 1 - tap, walk.down)
                    y = start + step * walk.in_step
                    if not rest and 0 <= row < rows and 0 <= y < inputs:
                        turned = tap if problem.direction == "fprop" else walk.taps - 1 - tap
                        met.add((out + row * walk.out_step, y, turned))
    assert sorted(position for position in written if position >= 0) == list(range(outputs))

    stride, padding, dilation = problem.stride[axis], problem.padding[axis], problem.dilation[axis]
    defined = set()
    for position in range(sizes[1]):
        for tap in range(walk.taps):
            y = position * stride - padding + tap * dilation
            if 0 <= y < sizes[0]:
                ends = (position, y) if problem.direction == "fprop" else (y, position)
                defined.add((*ends, tap))
    assert {entry for entry in met if entry[0] >= 0} == defined
