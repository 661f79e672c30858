"""The families of ``kernels/grouped_rows.cu``: their legality restated one config at a time, and
what a launch covers.

The restatements below follow the kernel's source, not the vectorised Python.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import serves_channels
from strategies import layers_of, problems

from confpred.families.grouped import axis_of
from confpred.families.protocol import config_dict
from confpred.families.registry import all_families
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, get_device

FAMILIES = {direction: all_families()[f"grouped_{direction}"] for direction in ("fprop", "dgrad")}
H100 = get_device("h100")
INT_MAX = 2**31 - 1
devices = st.sampled_from(list(KNOWN.values()))
#: Layers that either of the families handles.
layers = st.sampled_from(list(FAMILIES.values())).flatmap(layers_of)


def small_layers(largest: int) -> st.SearchStrategy[Problem]:
    families = st.sampled_from(list(FAMILIES.values()))
    return families.flatmap(lambda family: layers_of(family, largest=largest, images=9))


def moves(stride: int, dilation: int, taps: int, direction: str) -> tuple[int, int, int]:
    """Along one axis: rows in for a row out, rows out for a row in, and interleaved lattices."""
    if taps == 1:
        dilation = stride  # a single tap is as far apart from the next as one likes
    if direction == "dgrad":
        return (1, 2, 1) if (stride, dilation) == (2, 1) else (1, 1, max(stride, dilation))
    return (2, 1, 1) if (stride, dilation) == (2, 1) else (1, 1, 2 if stride < dilation else 1)


def expected_legal(problem: Problem, device: Device, config: dict[str, int]) -> bool:
    """Whether the kernel computes `problem` with `config`, from its source's own constants."""
    group, r, s = problem.group_width, problem.r, problem.s
    if group not in (1, 2, 4, 8, 16, 32, 64) or problem.k != problem.c or problem.c % 8:
        return False
    if r > 7 or s > 7 or problem.dtype == "float32":
        return False
    if max(*problem.stride, *problem.dilation) > 2:
        return False
    width = max(8, group)
    forward = problem.direction == "fprop"
    down_h, up_h, lattices_h = moves(problem.stride[0], problem.dilation[0], r, problem.direction)
    down_w, up_w, lattices_w = moves(problem.stride[1], problem.dilation[1], s, problem.direction)
    axes = axis_of(problem, 0), axis_of(problem, 1)
    assert [(a.down, a.up, a.out_step) for a in axes] == [
        (down_h, up_h, lattices_h),
        (down_w, up_w, lattices_w),
    ]
    block_n, block_q, block_c = config["block_n"], config["block_q"], config["block_c"]
    warps_c, warps_m = config["warps_c"], config["warps_m"]
    warps = warps_c * warps_m
    threads = 32 * warps

    # Whole groups for every warp along the channels, or a part of a wide one; whole 16-pixel tiles
    # along the pixels.
    warp_channels = block_c // warps_c
    divided = width == 64 or (width == 32 and r * s > 25)
    if block_c % width or (warp_channels % width and not (divided and warp_channels >= 16)):
        return False
    tiles = ceil(block_n * block_q / 16)
    odd = block_c not in (8, 16, 32, 64)
    if tiles % warps_m or (warps > 4 and not odd and (width < 64 or r * s <= 9)):
        return False
    if not serves_channels(block_c, problem.c):
        return False
    # Paired taps at width 8 leave no 16-byte rows for ldmatrix to fetch the filter from; and a
    # filter as small as 3x3x16 is better kept in registers.
    if config["filter_shared"] and (width == 8 or width * r * s <= 3 * 3 * 16):
        return False
    # Measured, and never better by much.
    warp_tiles = tiles // warps_m
    if width < 32 and (warps_m == 4 or warp_tiles * warp_channels > 32):
        return False
    if warp_channels > (2 * width if warps_m == 1 else width):
        return False
    if width == 64 and r * s <= 9 and config["filter_shared"] and warp_tiles == 1:
        return False
    if width < 64 and (block_q == 28 or (block_q == 14 and block_n == 4)):
        return False

    # Shared memory: input stages, each with its residual, one or two finished rows of outputs (two
    # of them where a row in makes two rows out), the filter; pixels padded to an odd number of
    # 16-byte pieces.
    pieces = block_c // 8
    pixel = 16 * (pieces if pieces % 2 else pieces + 1)
    shifts = ceil(s / up_w)
    columns = down_w * (block_q - 1) + shifts
    out_row = up_w * tiles * 16 * pixel
    smem = config["stages"] * (block_n * columns * pixel + problem.residual * out_row)
    smem += out_row * up_h * (1 if down_h == 2 else 2)
    if config["filter_shared"] or group >= (32 if forward else 8):
        filter_pieces = r * s * group // 8
        smem += block_c * 16 * (filter_pieces if filter_pieces % 2 else filter_pieces + 1)
    if smem > device.smem_per_block:
        return False

    # Copies of a thread a step: their validity is kept in one 32-bit word.
    loads = ceil(block_n * columns * pieces / threads)
    out_pixels = (up_w - 1) * tiles * 16 + block_n * block_q
    stores = ceil(out_pixels * pieces / threads)
    if max(loads, stores) > 32:
        return False
    live = (r - 1) // down_h + 1
    registers = live * up_w * warp_tiles * (warp_channels // 8) * 4
    if config["filter_shared"]:
        registers += 8
    else:
        # A register holds two input channels; at width 8 taps come in pairs, and each parity of
        # output columns has filter columns of its own.
        columns_used = [ceil((s - parity) / up_w) for parity in range(up_w)]
        taps = sum(ceil(count / 2) if width == 8 else count for count in columns_used)
        registers += r * taps * ceil(width / 16) * (warp_channels // 8) * 2
    registers += 5 * warp_tiles + loads + stores + 32
    if registers > 255 or registers * threads > 65_536:
        return False

    # 32-bit offsets from the block's first image, and a one-dimensional grid.
    if block_n * problem.c * max(problem.h * problem.w, problem.p * problem.q) > INT_MAX:
        return False
    rows, across = (axis.positions for axis in axes)
    blocks = ceil(problem.n / block_n) * ceil(across / block_q) * ceil(problem.c / block_c)
    if blocks * config["bands"] * lattices_h * lattices_w > INT_MAX:
        return False

    # No tile twice as large as the problem, unless none smaller exists.
    oversized = block_n >= 2 * problem.n or block_q >= 2 * across
    if oversized and block_n * block_q > 16:
        return False
    if block_c >= 2 * problem.c and block_c > max(16, group):
        return False

    # Bands of at least two rows, and not the bands that half as many would give.
    if config["bands"] > 1:
        band = ceil(rows / config["bands"])
        if band < 2 or band == ceil(rows / (config["bands"] // 2)):
            return False
    return True


@given(problems() | layers, devices, st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_legality_equals_its_restatement(problem: Problem, device: Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for direction, family in FAMILIES.items():
        mask = family.legal(problem, device)
        if problem.direction != direction:
            assert not mask.any()
            continue
        sample = {*rng.choice(len(mask), 100), *rng.permutation(np.flatnonzero(mask))[:50]}
        for row in map(int, sample):
            config = config_dict(family, row)
            assert mask[row] == expected_legal(problem, device, config), (str(problem), config)


@pytest.mark.parametrize("direction", FAMILIES)
def test_less_shared_memory_leaves_fewer_configs(direction: str) -> None:
    """The shared memory of a block, not of a multiprocessor, which has more."""
    family = FAMILIES[direction]
    layer = f"n=32 c=256 h=28 w=28 k=256 r=3 s=3 groups=16 padding=1 direction={direction}"
    problem = Problem.parse(layer)
    mask, smem = family.legal(problem, H100), family._shape(problem, family.whole).smem_bytes
    limit = int(np.median(smem[mask]))
    small = replace(H100, smem_per_block=limit)
    assert np.array_equal(family.legal(problem, small), mask & (smem <= limit))
    assert 0 < (mask & (smem <= limit)).sum() < mask.sum()


@pytest.mark.parametrize("direction", FAMILIES)
def test_a_blocks_images_are_addressed_in_32_bits(direction: str) -> None:
    family, table = FAMILIES[direction], FAMILIES[direction].configs
    layer = "n=4 c=64 h={0} w={0} k=64 r=3 s=3 groups=8 padding=1 direction={1}"
    legal = family.legal(Problem.parse(layer.format(4096, direction)), H100)  # 2^30 elements each
    assert set(table["block_n"][legal].tolist()) == {1}
    assert not family.legal(Problem.parse(layer.format(8192, direction)), H100).any()


@given(small_layers(24), st.integers(0, 1), st.integers(1, 9))
@settings(max_examples=300)
def test_a_walk_meets_the_taps_of_the_definition(problem: Problem, axis: int, band: int) -> None:
    """Along one axis, every output is written once, from all inputs and taps that it is made of."""
    sizes = ((problem.h, problem.w)[axis], (problem.p, problem.q)[axis])
    inputs, outputs = sizes if problem.direction == "fprop" else sizes[::-1]
    walk = axis_of(problem, axis)
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


@given(small_layers(40), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_blocks_tile_the_output(problem: Problem, seed: int) -> None:
    """Every output element belongs to exactly one block, decoded as the kernel decodes it."""
    family = FAMILIES[problem.direction]
    rows = np.flatnonzero(family.legal(problem, H100))
    for row in map(int, np.random.default_rng(seed).permutation(rows)[:3]):
        config, (step,) = config_dict(family, row), family.launch(problem, row).steps
        n, c, h, w, p, q = (step.scalars[name] for name in ("n", "c", "h", "w", "p", "q"))
        band_rows, bands, q_tiles, c_tiles = (
            step.scalars[name] for name in ("band_rows", "bands", "q_tiles", "c_tiles")
        )
        sizes = ((problem.h, problem.w), (problem.p, problem.q))
        assert ((h, w), (p, q)) == (sizes if problem.direction == "fprop" else sizes[::-1])
        assert (n, c) == (problem.n, problem.c)
        assert step.block == (32 * config["warps_c"] * config["warps_m"], 1, 1)
        origin_h, step_h = step.scalars["out_origin_h"], step.scalars["out_step_h"]
        origin_w, step_w = step.scalars["out_origin_w"], step.scalars["out_step_w"]
        pair = axis_of(problem, 1).up
        covered = np.zeros((n, p, q, c // 8), np.int64)
        for block in range(step.grid[0]):
            rest, c_tile = divmod(block, c_tiles)
            rest, lattice_w = divmod(rest, step_w)
            rest, q_tile = divmod(rest, q_tiles)
            rest, lattice_h = divmod(rest, step_h)
            n_tile, band = divmod(rest, bands)
            ys = origin_h + lattice_h + step_h * (band * band_rows + np.arange(band_rows))
            columns = pair * config["block_q"]
            xs = origin_w + lattice_w + step_w * (q_tile * columns + np.arange(columns))
            images = slice(n_tile * config["block_n"], (n_tile + 1) * config["block_n"])
            channels = slice(c_tile * config["block_c"] // 8, (c_tile + 1) * config["block_c"] // 8)
            for y in ys[(ys >= 0) & (ys < p)]:
                covered[images, y, xs[(xs >= 0) & (xs < q)], channels] += 1
        assert (covered == 1).all()
