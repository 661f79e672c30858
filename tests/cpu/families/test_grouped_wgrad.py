"""The grouped weight-gradient family: legality restated config by config, and what a launch sums.

The restatements below follow ``kernels/grouped_wgrad.cu``, not the vectorised Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil, gcd

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import serves_channels
from strategies import layers_of, problems

from confpred.families.protocol import config_dict
from confpred.families.registry import all_families
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, get_device

FAMILY = all_families()["grouped_wgrad"]
INT_MAX = 2**31 - 1
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
devices = st.sampled_from(list(KNOWN.values()))


def reduced(window: int, stride: int, dilation: int) -> tuple[int, int, int]:
    """Stride and dilation without their common divisor, and that divisor."""
    divisor = stride if window == 1 else gcd(stride, dilation)
    return stride // divisor, 1 if window == 1 else dilation // divisor, divisor


def expected_legal(problem: Problem, device: Device, config: dict[str, int]) -> bool:
    """Whether the kernel computes `problem` with `config`, from its source's own constants."""
    width, r, s = problem.group_width, problem.r, problem.s
    if problem.direction != "wgrad" or problem.dtype == "float32":
        return False
    if width not in WIDTHS or problem.k != problem.c or problem.c % 8 or max(r, s) > 7:
        return False
    if max(*problem.stride, *problem.dilation) > 2:
        return False
    block_n, block_q, block_k = config["block_n"], config["block_q"], config["block_k"]
    warp_k, stages, reduction = config["warp_k"], config["stages"], config["reduction"]
    stride_h, dilation_h, _ = reduced(r, problem.stride[0], problem.dilation[0])
    stride_w, dilation_w, _ = reduced(s, problem.stride[1], problem.dilation[1])

    # A warp's gradient channels are of one group, or of whole narrow ones.
    narrow = width <= 8
    if not narrow and width % warp_k:
        return False
    if block_k == 8 and width * r * s <= 9 * 64:
        return False
    if not serves_channels(block_k, problem.c) or (block_k > width and block_k % width):
        return False
    if block_k not in (8, 16, 32, 64) and block_k < width:
        return False
    warps_s = 2 if not narrow and r * s > 27 else 1
    warps = block_k // warp_k * (1 if narrow else width // 16) * warps_s * config["warps_m"]
    threads = 32 * warps
    if not 64 <= threads <= 512:
        return False

    # Shared memory: the stages, and afterwards the block's sums.
    in_pieces, out_pieces = max(block_k, width) // 8, block_k // 8
    columns = (block_q - 1) * stride_w + (s - 1) * dilation_w + 1
    tiles = ceil(block_n * block_q / 16)
    stage = stride_h * block_n * columns * 16 * (in_pieces + 1 - in_pieces % 2)
    stage += tiles * 16 * 16 * (out_pieces + 1 - out_pieces % 2)
    sums = 4 * block_k * (r * s * width + problem.bias)
    if max(stages * stage, sums) > device.smem_per_block:
        return False

    # Copies of a thread a step, and registers.
    in_loads = ceil(block_n * columns * in_pieces / threads)
    out_loads = ceil(block_n * block_q * out_pieces / threads)
    if in_loads > 16 or out_loads > 16:
        return False
    live, warp_n, warp_tiles = ceil(r / stride_h), warp_k // 8, tiles // config["warps_m"]
    products = r * ceil(s / warps_s)
    if narrow:
        products = r * (s // 2) + (stride_h * ceil(live / 2) if s % 2 else 0)
    registers = 4 * warp_n * (products + problem.bias) + 2 * live * warp_tiles * warp_n
    registers += 2 * warp_tiles + in_loads + out_loads + 48
    if registers > 232 or registers * threads > 65_536:
        return False

    # 32-bit offsets from the block's first image, also of columns beside it; one-dimensional grid.
    beside = max(problem.w, problem.q) + 4 * (block_q + 7)
    if block_n * problem.c * max(problem.h, problem.p) * beside > INT_MAX:
        return False
    rows = ceil(problem.n / block_n) * dilation_h * ceil(problem.p / dilation_h)
    slice_rows = ceil(rows / config["splits"])
    q_tiles, k_tiles = ceil(problem.q / block_q), ceil(problem.c / block_k)
    parts = q_tiles * ceil(rows / slice_rows)
    blocks = k_tiles * parts
    elements = problem.filter_elements + (problem.k if problem.bias else 0)
    if blocks > INT_MAX or elements > INT_MAX:
        return False

    # Tiles of the problem's size.
    if block_q >= 2 * problem.q and block_q > 8:
        return False
    if block_n >= 2 * problem.n and block_n * block_q > 16:
        return False
    if block_n > 1 and block_q < problem.q and (block_q > 8 or problem.q > 16):
        return False
    if block_n * block_q <= 16 and problem.n * problem.q > 28:
        return False
    least = min(28 * ceil(problem.q / 28), 32 * ceil(problem.q / 32))
    if q_tiles * block_q >= 1.2 * problem.q + 8 and q_tiles * block_q != least:
        return False
    if block_k >= 2 * problem.c and block_k != 16:
        return False

    # Slices that differ from the next smaller count's, of at least two windows; blocks that fill
    # the device once, not too often.
    if config["splits"] > 1:
        smaller = max(x for x in set(FAMILY.configs["splits"]) if x < config["splits"])
        if slice_rows < 2 * r or slice_rows == ceil(rows / smaller):
            return False
        if blocks > 16 * device.sm_count:
            return False
    if 2 * blocks < device.sm_count and slice_rows > 64:
        return False

    # One block a filter tile needs no reduction, more need one.
    if (reduction == 0) != (parts == 1):
        return False
    if reduction == 2 and parts > 32:
        return False
    if reduction == 3 and problem.deterministic:
        return False
    return 4 * parts * elements <= max(problem.minimum_bytes, 2**20)


@given(problems() | layers_of(FAMILY), devices, st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_legality_equals_its_restatement(problem: Problem, device: Device, seed: int) -> None:
    mask = FAMILY.legal(problem, device)
    rng = np.random.default_rng(seed)
    sample = {*rng.choice(len(mask), 100), *rng.permutation(np.flatnonzero(mask))[:50]}
    for row in map(int, sample):
        config = config_dict(FAMILY, row)
        assert mask[row] == expected_legal(problem, device, config), (str(problem), config)


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
