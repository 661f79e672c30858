"""The depthwise families: which layers they take, and how their launches cover a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import layers_of

from confpred.families.common import ATOMIC, DIRECT, TWO_KERNELS
from confpred.families.depthwise.depthwise import _axes
from confpred.families.protocol import Family, config_dict
from confpred.families.registry import all_families
from confpred.problem.conv2d import DIRECTIONS, Problem
from confpred.problem.device import Device, get_device

H100 = get_device("h100")


def family_of(problem: Problem) -> Family:
    return all_families()[f"depthwise_{problem.direction}"]


def legal_rows(problem: Problem, device: Device = H100) -> list[int]:
    return [int(row) for row in np.flatnonzero(family_of(problem).legal(problem, device))]


def depthwise_problems(largest: int = 40, images: int = 9) -> st.SearchStrategy[Problem]:
    """Layers that the families handle, in every direction, with any epilogue."""
    families = st.sampled_from([all_families()[f"depthwise_{d}"] for d in DIRECTIONS])
    return families.flatmap(lambda f: layers_of(f, largest=largest, images=images))


@pytest.mark.parametrize("multiplier", [2, 3, 4, 6])
def test_a_channel_multiplier_is_forward_only(multiplier: int) -> None:
    layer = f"n=4 c=24 h=14 w=14 k={24 * multiplier} r=3 s=3 groups=24 padding=1"
    assert legal_rows(Problem.parse(layer))
    for direction in ("dgrad", "wgrad"):
        assert not legal_rows(Problem.parse(f"{layer} direction={direction}"))


@given(depthwise_problems())
@settings(max_examples=60)
def test_the_axes_describe_the_convolution(problem: Problem) -> None:
    """Input and output meet at the same taps in the kernel's equation as in the definition."""
    assume(problem.direction != "wgrad")
    problem = replace(problem, bias=False, residual=False, activation="none")
    sizes = ((problem.h, problem.p, problem.r), (problem.w, problem.q, problem.s))
    for axis, (size, result, window), stride, pad, dilation in zip(
        _axes(problem), sizes, problem.stride, problem.padding, problem.dilation, strict=True
    ):
        x, o, tap = np.ogrid[:size, :result, :window]
        expected = x == o * stride - pad + tap * dilation
        if problem.direction == "dgrad":  # the axis goes from output to input, the window turned
            expected = expected.transpose(1, 0, 2)[:, :, ::-1]
        i, o, tap = np.ogrid[: axis.size_in, : axis.size_out, : axis.window]
        found = axis.up * (i + axis.origin) == axis.down * (o + axis.shift) + axis.dilation * tap
        assert (found == expected).all()
        assert 0 <= axis.shift < axis.up or axis.shift == 0


@pytest.mark.slow(reason="sixty random layers, every pixel of each")
@given(depthwise_problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_blocks_tile_the_image(problem: Problem, seed: int) -> None:
    """Every output belongs to exactly one thread, decoded as ``depthwise.cu`` decodes it."""
    assume(problem.direction != "wgrad")
    vertical, horizontal = _axes(problem)
    family = family_of(problem)
    for row in map(int, np.random.default_rng(seed).permutation(legal_rows(problem))[:3]):
        config, (step,) = config_dict(family, row), family.launch(problem, row).steps
        of = step.scalars
        n, k, p, q = of["n"], of["k"], of["p"], of["q"]
        bands, q_tiles, c_tiles, lanes_c = of["bands"], of["q_tiles"], of["c_tiles"], of["lanes_c"]
        assert (n, k, of["multiplier"]) == (problem.n, problem.k, problem.k // problem.c)
        assert (of["h"], of["w"]) == (vertical.size_in, horizontal.size_in)
        assert (p, q) == (vertical.size_out, horizontal.size_out)
        tiles_at_once = of["tiles_at_once"]
        assert lanes_c * tiles_at_once <= step.block[0] <= 256
        covered = np.zeros((n, p, q, k), np.int64)
        block, thread = np.divmod(np.arange(step.grid[0] * step.block[0]), step.block[0])
        lane_tile, lane_c = np.divmod(thread, lanes_c)
        block_tile, c_tile = np.divmod(block, c_tiles)
        tiles = block_tile * tiles_at_once + lane_tile
        channels = (c_tile * lanes_c + lane_c) * config["vec"]
        for tile, k0 in zip(
            tiles[lane_tile < tiles_at_once], channels[lane_tile < tiles_at_once], strict=True
        ):
            image, band = divmod(int(tile) // q_tiles, bands)
            column = int(tile) % q_tiles * config["tile_q"] - of["shift_w"]
            if image >= n or k0 >= k:
                continue
            top = vertical.up * band * of["band_groups"] - of["shift_h"]
            bottom = top + vertical.up * of["band_groups"]
            covered[
                image,
                max(top, 0) : max(bottom, 0),
                max(column, 0) : max(column + config["tile_q"], 0),
                k0 : k0 + config["vec"],
            ] += 1
        assert (covered == 1).all()


@given(depthwise_problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_splits_share_the_gradients_sum(problem: Problem, seed: int) -> None:
    """Every output pixel enters the sums once, each sum is one thread's, and the workspace holds
    what the kind of reduction needs."""
    assume(problem.direction == "wgrad")
    family = family_of(problem)
    for row in map(int, np.random.default_rng(seed).permutation(legal_rows(problem))[:3]):
        config, launch = config_dict(family, row), family.launch(problem, row)
        of = launch.steps[0].scalars
        band_rows, bands, q_tiles, c_tiles = (
            of[name] for name in ("band_rows", "bands", "q_tiles", "c_tiles")
        )
        lanes_c, splits, how = of["lanes_c"], of["splits"], of["reduction"]
        source = dict(launch.steps[0].kernel.defines)
        block_r, row_groups = source["BLOCK_R"], -(-problem.r // int(source["BLOCK_R"]))
        assert launch.steps[0].grid[0] == c_tiles * splits
        assert lanes_c * row_groups * of["tiles_at_once"] <= launch.steps[0].block[0] <= 256
        assert (row_groups - 1) * int(block_r) < problem.r
        assert (c_tiles - 1) * lanes_c * config["vec"] < problem.c
        assert c_tiles * lanes_c * config["vec"] >= problem.c
        assert (bands - 1) * band_rows < problem.p <= bands * band_rows
        assert (q_tiles - 1) * config["tile_q"] < problem.q <= q_tiles * config["tile_q"]
        sums = problem.filter_elements + (problem.c if problem.bias else 0)
        partials = 4 * splits * sums if how == TWO_KERNELS else 0
        assert launch.scratch_bytes == partials
        assert launch.zeroed_bytes == (4 * (sums + c_tiles) if how == ATOMIC else 0)
        assert (how == DIRECT) == (splits == 1)
        assert len(launch.steps) == (2 if how == TWO_KERNELS else 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_vectors_leave_no_channel_over(direction: str) -> None:
    family = all_families()[f"depthwise_{direction}"]
    layer = f"n=4 c=10 h=14 w=14 k=10 r=3 s=3 groups=10 padding=1 direction={direction}"
    legal = family.legal(Problem.parse(layer), H100)
    assert legal.any()
    assert (10 % family.configs["vec"][legal] == 0).all()
