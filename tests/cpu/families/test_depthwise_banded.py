"""The depthwise families on tensor cores: which layers they take, how their launches cover a layer,
and what their kernels take of a multiprocessor."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import layers_of

from confpred.families.batch import ProblemBatch
from confpred.families.common import ATOMIC, DIRECT, TWO_KERNELS
from confpred.families.depthwise.depthwise_banded import DepthwiseBanded, most_registers
from confpred.families.depthwise.depthwise_banded_wgrad import DepthwiseBandedWgrad
from confpred.families.protocol import config_dict
from confpred.families.registry import all_families
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, get_device

H100 = get_device("h100")
DIRECTIONS = ("fprop", "dgrad", "wgrad")


def family_of(problem: Problem) -> DepthwiseBanded | DepthwiseBandedWgrad:
    family = all_families()[f"depthwise_banded_{problem.direction}"]
    assert isinstance(family, DepthwiseBanded | DepthwiseBandedWgrad)
    return family


def legal_rows(problem: Problem, device: Device = H100) -> list[int]:
    return [int(row) for row in np.flatnonzero(family_of(problem).legal(problem, device))]


def banded_problems(largest: int = 40, images: int = 40) -> st.SearchStrategy[Problem]:
    """Layers that the families compute, with any epilogue."""
    families = st.sampled_from([all_families()[f"depthwise_banded_{d}"] for d in DIRECTIONS])
    return families.flatmap(lambda f: layers_of(f, largest=largest, images=images))


def test_a_window_of_one_tap_has_no_dilation() -> None:
    layer = "n=2 c=64 h=56 w=56 k=64 r=1 s=3 groups=64 dilation=2x1"
    assert legal_rows(Problem.parse(layer))


@given(banded_problems(), st.sampled_from(list(KNOWN.values())))
def test_legal_configs_fit_the_multiprocessor(problem: Problem, device: Device) -> None:
    family = family_of(problem)
    rows = np.array(legal_rows(problem, device))
    tiling, configs = (
        family._workings(ProblemBatch([problem]), family.whole, rows),
        family.configs[rows],
    )
    blocks = configs["min_blocks"]
    assert (tiling.threads <= 512).all()
    assert (blocks * tiling.threads * most_registers(configs) <= device.regs_per_sm).all()
    assert (blocks * tiling.smem_bytes <= device.smem_per_sm).all()
    assert (tiling.in_items <= 16).all()  # two validity bits each, in a word


@given(banded_problems(largest=30), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_blocks_tile_the_output(problem: Problem, seed: int) -> None:
    """Every output belongs to exactly one run and block, decoded as the kernel decodes it, and is
    one of those that a thread stores in one of the block's steps."""
    assume(problem.direction != "wgrad")
    family = family_of(problem)
    sizes = ((problem.h, problem.w), (problem.p, problem.q))
    for row in map(int, np.random.default_rng(seed).permutation(legal_rows(problem))[:3]):
        config, (step,) = config_dict(family, row), family.launch(problem, row).steps
        n, c, h, w, p, q = (step.scalars[name] for name in ("n", "c", "h", "w", "p", "q"))
        pad_h, band_rows, bands, q_tiles, c_tiles = (
            step.scalars[name] for name in ("pad_h", "band_rows", "bands", "q_tiles", "c_tiles")
        )
        assert ((h, w), (p, q)) == (sizes if problem.direction == "fprop" else sizes[::-1])
        covered = np.zeros((n, p, q, c // 8), np.int64)
        first = min(max(pad_h, 0), problem.r - 1) if bands == 1 else 0
        steps = -(-(band_rows + problem.r - 1 - first) // config["rows"])
        finished = first - (problem.r - 1) + np.arange(steps * config["rows"])
        for block in range(step.grid[0]):
            tile, c_tile = divmod(block, c_tiles)
            runs = config["strips"] // config["run"]
            channels = slice(c_tile * config["block_c"] // 8, (c_tile + 1) * config["block_c"] // 8)
            for run in tile * runs + np.arange(runs):
                rest, q_tile = divmod(int(run), q_tiles)
                image, band = divmod(rest, bands)
                if image >= n:
                    continue
                p0, q0 = band * band_rows, q_tile * 8 * config["run"]
                limit = min(band_rows, p - p0)
                ys = p0 + finished[(finished >= 0) & (finished < limit)]
                covered[image, ys, q0 : q0 + 8 * config["run"], channels] += 1
        assert (covered == 1).all()


@given(banded_problems(largest=30), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_splits_share_the_gradients_sum(problem: Problem, seed: int) -> None:
    """Every gradient pixel is in one run, decoded as the kernel decodes it, each block
    has a tile of runs, and the workspace holds what the kind of reduction needs."""
    assume(problem.direction == "wgrad")
    family = family_of(problem)
    for row in map(int, np.random.default_rng(seed).permutation(legal_rows(problem))[:3]):
        config, launch = config_dict(family, row), family.launch(problem, row)
        of = launch.steps[0].scalars
        n, p, q, bands, q_tiles = (of[name] for name in ("n", "p", "q", "bands", "q_tiles"))
        band_rows, c_tiles, tiles = of["band_rows"], of["c_tiles"], of["tiles"]
        splits, how = of["splits"], of["reduction"]
        assert launch.steps[0].grid[0] == c_tiles * splits
        assert 1 <= splits <= tiles
        assert (c_tiles - 1) * config["block_c"] < problem.c <= c_tiles * config["block_c"]
        covered = np.zeros((n, p, q), np.int64)
        for run in range(tiles * (config["strips"] // config["run"])):
            rest, q_tile = divmod(run, q_tiles)
            image, band = divmod(rest, bands)
            if image < n:
                ys = slice(band * band_rows, (band + 1) * band_rows)
                xs = slice(q_tile * 8 * config["run"], (q_tile + 1) * 8 * config["run"])
                covered[image, ys, xs] += 1
        assert (covered == 1).all()
        sums = problem.filter_elements + (problem.c if problem.bias else 0)
        assert launch.scratch_bytes == (4 * splits * sums if how == TWO_KERNELS else 0)
        assert launch.zeroed_bytes == (4 * (sums + c_tiles) if how == ATOMIC else 0)
        assert (how == DIRECT) == (splits == 1)
        assert len(launch.steps) == (2 if how == TWO_KERNELS else 1)
