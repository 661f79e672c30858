"""The grouped forward family: its legality restated one config at a time, and what a launch covers.

The restatement below follows ``kernels/grouped_fprop.cu``, not the vectorised Python.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import grouped_problems, problems

from confpred.device import KNOWN, Device, get_device
from confpred.families import all_families, config_dict
from confpred.problem import Problem

FAMILY = all_families()["grouped_fprop"]
INT_MAX = 2**31 - 1
devices = st.sampled_from(list(KNOWN.values()))


def expected_legal(problem: Problem, device: Device, config: dict[str, int]) -> bool:
    """Whether the kernel computes `problem` with `config`, from its source's own constants."""
    width, r, s = problem.group_width, problem.r, problem.s
    if width not in (8, 16, 32) or problem.k != problem.c or r > 7 or s > 7:
        return False
    if problem.stride != (1, 1) or problem.dilation != (1, 1):
        return False
    block_n, block_q, block_c = config["block_n"], config["block_q"], config["block_c"]
    warps = config["warps_c"] * config["warps_m"]
    threads = 32 * warps

    # Whole groups for every warp along the channels, whole 16-pixel tiles along the pixels.
    if block_c % width or (block_c // width) % config["warps_c"]:
        return False
    tiles = ceil(block_n * block_q / 16)
    if tiles % config["warps_m"]:
        return False
    # Paired taps at width 8 leave no 16-byte rows for ldmatrix to fetch the filter from; and a
    # filter as small as 3x3x16 is better kept in registers.
    if config["filter_shared"] and (width == 8 or width * r * s <= 3 * 3 * 16):
        return False

    # Shared memory: input stages, two finished rows, the filter; pixels padded to an odd number
    # of 16-byte pieces.
    pieces = block_c // 8
    pixel = 16 * (pieces if pieces % 2 else pieces + 1)
    columns = block_q + s - 1
    smem = config["stages"] * block_n * columns * pixel + 2 * tiles * 16 * pixel
    if config["filter_shared"]:
        filter_pieces = r * s * width // 8
        smem += block_c * 16 * (filter_pieces if filter_pieces % 2 else filter_pieces + 1)
    if smem > device.smem_per_block:
        return False

    # Copies of a thread a step: their validity is kept in one 32-bit word.
    loads = ceil(block_n * columns * pieces / threads)
    stores = ceil(block_n * block_q * pieces / threads)
    if loads > 32:
        return False
    warp_tiles = tiles // config["warps_m"]
    warp_groups = block_c // width // config["warps_c"]
    registers = r * warp_groups * warp_tiles * (width // 8) * 4
    if config["filter_shared"]:
        registers += 8
    elif width == 8:  # a register of two channels for each of a pair of taps
        registers += warp_groups * r * ceil(s / 2) * 2
    else:
        registers += warp_groups * r * s * (width // 16) * (width // 8) * 2
    registers += 5 * warp_tiles + loads + stores + 32
    if registers > 255 or registers * threads > 65_536:
        return False

    # 32-bit offsets from the block's first image, and a one-dimensional grid.
    if block_n * problem.c * max(problem.h * problem.w, problem.p * problem.q) > INT_MAX:
        return False
    blocks = ceil(problem.n / block_n) * ceil(problem.q / block_q) * ceil(problem.c / block_c)
    if blocks * config["bands"] > INT_MAX:
        return False

    # No tile twice as large as the problem, unless none smaller exists.
    oversized = block_n >= 2 * problem.n or block_q >= 2 * problem.q
    if oversized and block_n * block_q > 16:
        return False
    if block_c >= 2 * problem.c and block_c > max(16, width):
        return False

    # Bands of at least two rows, and not the bands that half as many would give.
    if config["bands"] > 1:
        rows = ceil(problem.p / config["bands"])
        if rows < 2 or rows == ceil(problem.p / (config["bands"] // 2)):
            return False
    return True


@given(problems() | grouped_problems(), devices, st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_legality_equals_its_restatement(problem: Problem, device: Device, seed: int) -> None:
    mask = FAMILY.legal(problem, device)
    rng = np.random.default_rng(seed)
    sample = {*rng.choice(len(mask), 100), *rng.permutation(np.flatnonzero(mask))[:50]}
    for row in map(int, sample):
        config = config_dict(FAMILY, row)
        assert mask[row] == expected_legal(problem, device, config), (str(problem), config)


@pytest.mark.parametrize(
    "layer",
    [
        "n=32 c=64 h=64 w=64 k=64 r=3 s=3 groups=8 padding=1",
        "n=128 c=1024 h=16 w=16 k=1024 r=3 s=3 groups=128 padding=1",
        "n=32 c=256 h=28 w=28 k=256 r=3 s=3 groups=16 padding=1",
        "n=64 c=512 h=14 w=14 k=512 r=3 s=3 groups=32 padding=1 bias=true activation=relu",
        "n=32 c=512 h=14 w=14 k=512 r=3 s=3 groups=16 padding=1",
        "n=32 c=128 h=56 w=56 k=128 r=5 s=5 groups=16 padding=2 dtype=bfloat16",
    ],
)
@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_typical_layers_have_many_configs(layer: str, device: Device) -> None:
    assert FAMILY.legal(Problem.parse(layer), device).sum() >= 200


@pytest.mark.parametrize("width", [8, 16, 32])
def test_the_smallest_images_have_fewer(width: int) -> None:
    """Wide tiles and many bands have nothing to cover in a network's last, 7x7 stage."""
    layer = Problem.parse(f"n=32 c=1024 h=7 w=7 k=1024 r=3 s=3 groups={1024 // width} padding=1")
    assert FAMILY.legal(layer, get_device("h100")).sum() >= 100


@pytest.mark.parametrize(
    "change",
    [
        "stride=2",
        "stride=1x2",
        "dilation=2",
        "groups=1",
        "groups=64",
        "groups=16",
        "k=128 groups=8",
        "r=8 padding=4",
        "s=9 padding=4",
    ],
)
def test_other_layers_have_none(change: str) -> None:
    layer = "n=32 c=64 h=56 w=56 k=64 r=3 s=3 groups=8"
    words = dict(word.split("=") for word in f"{layer} {change}".split())
    problem = Problem.parse(" ".join(f"{name}={value}" for name, value in words.items()))
    assert not FAMILY.legal(problem, get_device("h100")).any()


@given(grouped_problems(largest=40, images=9), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_blocks_tile_the_output(problem: Problem, seed: int) -> None:
    """Every output element belongs to exactly one block, decoded as the kernel decodes it."""
    rows = np.flatnonzero(FAMILY.legal(problem, get_device("h100")))
    for row in map(int, np.random.default_rng(seed).permutation(rows)[:3]):
        config, launch = config_dict(FAMILY, row), FAMILY.launch(problem, row)
        n, c, h, w, p, q, pad_h, pad_w, band_rows, bands, q_tiles, c_tiles = launch.scalars
        assert (n, c, h, w) == (problem.n, problem.c, problem.h, problem.w)
        assert (p, q, pad_h, pad_w) == (problem.p, problem.q, *problem.padding)
        assert launch.block == (32 * config["warps_c"] * config["warps_m"], 1, 1)
        covered = np.zeros((n, p, q, c // 8), np.int64)
        for block in range(launch.grid[0]):
            rest, c_tile = divmod(block, c_tiles)
            rest, q_tile = divmod(rest, q_tiles)
            n_tile, band = divmod(rest, bands)
            covered[
                n_tile * config["block_n"] : (n_tile + 1) * config["block_n"],
                band * band_rows : (band + 1) * band_rows,
                q_tile * config["block_q"] : (q_tile + 1) * config["block_q"],
                c_tile * config["block_c"] // 8 : (c_tile + 1) * config["block_c"] // 8,
            ] += 1
        assert (covered == 1).all()


@given(grouped_problems(), st.data())
def test_one_kernel_serves_every_size(problem: Problem, data: st.DataObject) -> None:
    """Sizes and bands are launch arguments: they do not enter the compiled kernel."""
    rows = np.flatnonzero(FAMILY.legal(problem, get_device("h100")))
    if not len(rows):
        return
    row = int(data.draw(st.sampled_from(list(rows))))
    source = FAMILY.source(problem, row)
    names = [name for name, _ in source.defines]
    assert len(set(names)) == len(names)
    other = Problem(
        **{**problem.to_json(), "n": problem.n + 1, "h": problem.h + 3, "w": problem.w + 5}
    )
    assert FAMILY.source(other, row) == source
    config = config_dict(FAMILY, row)
    same_tile = [
        i
        for i in np.flatnonzero(FAMILY.configs["block_n"] == config["block_n"])
        if {**config_dict(FAMILY, int(i)), "bands": 0} == {**config, "bands": 0}
    ]
    assert {FAMILY.source(problem, int(i)) for i in same_tile} == {source}
