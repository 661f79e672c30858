"""The depthwise families on tensor cores: which layers they take, how their launches cover a layer,
and what their kernels take of a multiprocessor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import ARCHITECTURES
from ptxas import ARCHS, resources
from strategies import epilogue

from confpred.families.batch import ProblemBatch
from confpred.families.common import ATOMIC, DIRECT, TWO_KERNELS
from confpred.families.depthwise.depthwise_banded import DepthwiseBanded, most_registers
from confpred.families.depthwise.depthwise_banded_wgrad import DepthwiseBandedWgrad
from confpred.families.protocol import config_dict
from confpred.families.registry import all_families
from confpred.families.table import config_columns
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, get_device

H100 = get_device("h100")
DIRECTIONS = ("fprop", "dgrad", "wgrad")
TYPICAL = (
    "n=128 c=768 h=7 w=7 k=768 r=7 s=7 groups=768 padding=3",
    "n=64 c=384 h=14 w=14 k=384 r=7 s=7 groups=384 padding=3 dtype=bfloat16",
    "n=32 c=96 h=56 w=56 k=96 r=7 s=7 groups=96 padding=3",
    "n=128 c=144 h=56 w=56 k=144 r=3 s=3 groups=144 padding=1",
    "n=32 c=240 h=28 w=28 k=240 r=5 s=5 groups=240 padding=2 dtype=bfloat16",
)
half = st.sampled_from(("float16", "bfloat16"))


def family_of(problem: Problem) -> DepthwiseBanded | DepthwiseBandedWgrad:
    family = all_families()[f"depthwise_banded_{problem.direction}"]
    assert isinstance(family, DepthwiseBanded | DepthwiseBandedWgrad)
    return family


def legal_rows(problem: Problem, device: Device = H100) -> list[int]:
    return [int(row) for row in np.flatnonzero(family_of(problem).legal(problem, device))]


@st.composite
def banded_problems(draw: st.DrawFn, *, largest: int = 40, images: int = 40) -> Problem:
    """Layers that the families compute, with any epilogue."""
    direction = draw(st.sampled_from(DIRECTIONS))
    c = 8 * draw(st.integers(1, 20))
    r, s = draw(st.integers(1, 11)), draw(st.integers(1, 9 if direction == "wgrad" else 11))
    padding = draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    least = [max(1, size - 2 * pad) for size, pad in zip((r, s), padding, strict=True)]
    return Problem(
        n=draw(st.integers(1, images)),
        c=c,
        h=draw(st.integers(least[0], max(largest, least[0]))),
        w=draw(st.integers(least[1], max(largest, least[1]))),
        k=c,
        r=r,
        s=s,
        padding=padding,
        groups=c,
        dtype=draw(half),
        direction=direction,
        **epilogue(draw, direction),
    )


@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", TYPICAL)
def test_typical_layers_have_many_configs_of_few_kernels(
    layer: str, direction: str, device: Device
) -> None:
    problem = Problem.parse(f"{layer} direction={direction}")
    rows = legal_rows(problem, device)
    kernels = {family_of(problem).launch(problem, row).steps[0].kernel for row in rows}
    assert len(rows) >= 30
    few = 3 if device.smem_per_block < 2**17 else 5  # large windows need large bands of rows
    assert few <= len(kernels) <= 250


@given(banded_problems())
def test_every_layer_has_a_config(problem: Problem) -> None:
    assert legal_rows(problem)


@pytest.mark.parametrize(
    "change",
    [
        "groups=32",
        "k=128",
        "stride=2",
        "stride=1x2",
        "dilation=2",
        "r=12",
        "c=60 k=60 groups=60",
        "dtype=float32",
        "h=20000 w=20000",
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_layers_have_none(change: str, direction: str) -> None:
    layer = f"n=2 c=64 h=56 w=56 k=64 r=3 s=3 groups=64 direction={direction} {change}"
    words = dict(word.split("=") for word in layer.split())
    problem = Problem.parse(" ".join(f"{name}={value}" for name, value in words.items()))
    assert not legal_rows(problem)


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


@given(banded_problems(), st.data())
@settings(max_examples=60)
def test_one_kernel_serves_every_size(problem: Problem, data: st.DataObject) -> None:
    """Sizes, padding and bands are launch arguments: they do not enter the compiled kernel."""
    rows = legal_rows(problem)
    row, family = data.draw(st.sampled_from(rows)), family_of(problem)
    source = family.launch(problem, row).steps[0].kernel
    names = [name for name, _ in source.defines]
    assert len(set(names)) == len(names)
    other = replace(problem, n=problem.n + 1, h=problem.h + 3, w=problem.w + 5, padding=(7, 7))
    assert family.launch(other, row).steps[0].kernel == source
    config = config_dict(family, row)
    at_run_time = {"bands": 0, "splits": 0, "reduction": 0}
    for other_row in rows:
        other_config = config_dict(family, other_row)
        if {**other_config, **at_run_time} == {**config, **at_run_time}:
            assert family.launch(problem, other_row).steps[0].kernel == source


@pytest.mark.slow(reason="18 compiles a target")
@pytest.mark.parametrize("arch", ARCHS)
def test_registers_are_near_the_estimate_and_hardly_spill(arch: str) -> None:
    """Legality trusts the estimate; a kernel that spills much would be a wrong estimate."""
    rng = np.random.default_rng(0)
    ratios, stacks = [], []
    for direction in DIRECTIONS:
        for r, s, residual in ((3, 3, 0), (5, 5, 1), (7, 7, 0), (7, 7, 1), (11, 9, 0), (3, 1, 0)):
            epilogue = f"activation=silu residual={residual}" if direction == "fprop" else ""
            layer = f"n=64 c=96 h=60 w=60 k=96 r={r} s={s} groups=96 padding={r // 2}x{s // 2}"
            problem = Problem.parse(f"{layer} direction={direction} {epilogue}")
            family = family_of(problem)
            row = int(rng.choice(legal_rows(problem)))
            tiling = family._workings(ProblemBatch([problem]), family.whole, np.array([row]))
            registers, stack = resources(family.launch(problem, row).steps[0].kernel, arch)
            most = most_registers(config_columns(family.configs, np.array([row])))
            ratios.append(registers / min(tiling.registers[0], most[0]))
            stacks.append(stack)
    assert max(stacks) <= 192
    assert np.median(stacks) == 0
    assert min(ratios) > 0.75
    assert max(ratios) < 1.25
    assert 0.85 < np.median(ratios) < 1.15
