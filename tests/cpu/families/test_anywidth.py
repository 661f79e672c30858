"""Grouped convolution of any group width: which layers have configs, and how little is padded."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from layers import ANY_WIDTH, ARCHITECTURES, CONVOLUTIONS, H100, random_layer

from confpred.families import anywidth, grouped
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import DIRECTIONS, Problem

LAYER = Problem(n=8, c=72, h=28, w=28, k=72, r=3, s=3, padding=(1, 1), groups=3)
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def family(direction: str):
    return ANY_WIDTH[f"anywidth_{direction}"]


@every_direction
def test_layers_beyond_the_limits_have_none(direction: str) -> None:
    layer = replace(LAYER, direction=direction)
    assert family(direction).legal(layer, H100).any()
    for change in (
        {"groups": 1}, {"groups": 72}, {"c": 513 * 3}, {"k": 513 * 3}, {"dtype": "float32"},
        {"stride": (1, 3)}, {"dilation": (5, 1)}, {"r": 8, "padding": (4, 1)},
    ):  # fmt: skip
        assert not family(direction).legal(replace(layer, **change), H100).any(), change
    for other in set(DIRECTIONS) - {direction}:
        assert not family(other).legal(layer, H100).any()


@every_direction
def test_what_older_families_serve_is_left_to_them(direction: str) -> None:
    rng = random.Random(direction)
    for name in (f"grouped_{direction}", f"depthwise_{direction}", f"anywidth_{direction}"):
        for _ in range(60):
            problem = replace(random_layer(rng, CONVOLUTIONS[name]), dtype="float16")
            served = {n for n, f in CONVOLUTIONS.items() if f.legal(problem, H100).any()}
            assert len({n.partition("_")[0] for n in served} & {"anywidth", "grouped"}) <= 1
            assert f"anywidth_{direction}" not in served or anywidth.handles(problem)
            assert not (anywidth.handles(problem) and grouped.handles(problem))


@every_direction
def test_where_a_model_or_a_near_one_knows_them_they_are_chosen(direction: str) -> None:
    whole, large = replace(LAYER, n=64, h=56, w=56), replace(LAYER, c=64, k=64, groups=64)
    large = replace(large, n=32, h=56, w=56, r=31, s=31, padding=(15, 15))
    for layer, name in ((whole, "anywidth"), (large, "depthwise_large")):
        layer, predictor = replace(layer, direction=direction), Predictor.load()
        for device, source in (("h200", "predicted"), ("h100", "transferred")):
            choice = predictor.choose(layer, device)
            assert (choice.family, choice.source) == (f"{name}_{direction}", source)
            assert choice.is_near == (device == "h100")  # whose own model knows no such family
            assert predictor.expected_ms(layer, device, choice.candidate) == choice.predicted_ms


def test_no_sum_of_a_filter_gradient_is_so_long_that_it_loses_digits() -> None:
    wgrad = family("wgrad")
    for n, size in ((256, 112), (64, 56), (1, 512)):
        layer = replace(LAYER, n=n, h=size, w=size, direction="wgrad")
        configs = wgrad.configs[wgrad.legal(layer, H100)]
        tiles = 1
        for side, name in ((n, "block_n"), (size, "block_p"), (size, "block_q")):
            tiles = tiles * -(-side // configs[name].astype(int))
        pixels = np.prod([configs[f"block_{axis}"].astype(int) for axis in "npq"], axis=0)
        assert len(configs) > 0
        assert (-(-tiles // configs["splits"]) * pixels).max() <= 2**17


@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_width_has_a_config(device) -> None:
    widths = (2, 3, 7, 12, 24, 37, 56, 65, 112, 128, 264, 373, 512)
    windows = ((3, 3, 1), (3, 3, 2), (1, 1, 1), (5, 5, 1), (7, 7, 2), (2, 2, 1))
    for direction, width, (r, s, stride) in product(DIRECTIONS, widths, windows):
        for depth in (width, max(1, width // 3), min(512, 2 * width)):
            problem = Problem(
                16, 3 * width, 28, 28, 3 * depth, r, s, groups=3, stride=(stride,) * 2,
                padding=(r // 2, s // 2), direction=direction,
            )  # fmt: skip
            assert family(direction).legal(problem, device).any(), problem


@pytest.mark.parametrize(
    ("width", "window", "most"), [(24, 3, 1.0), (40, 3, 1.0), (112, 3, 1.0), (12, 3, 4 / 3)]
)
def test_little_is_padded(width: int, window: int, most: float) -> None:
    """Some config multiplies no more channels than the group has, up to whole eights."""
    problem = Problem(8, 3 * width, 28, 28, 3 * width, window, window, groups=3)
    rows = np.flatnonzero(family("fprop").legal(problem, H100))
    features = dict(
        zip(
            family("fprop").feature_names,
            family("fprop").features(problem, H100, rows).T,
            strict=True,
        )
    )
    assert (features["c_waste"] * features["k_waste"]).min() == pytest.approx(most**2)


@pytest.mark.parametrize(("width", "channels"), [(24, 8), (12, 4), (6, 2), (37, 1), (512, 8)])
def test_vectors_are_as_wide_as_the_width_allows(width: int, channels: int) -> None:
    assert anywidth.vector_of(width) == channels


def test_a_deterministic_filter_gradient_is_the_same_launch() -> None:
    problem = replace(LAYER, direction="wgrad", bias=True)
    strict = replace(problem, deterministic=True)
    legal = family("wgrad").legal(problem, H100)
    assert np.array_equal(legal, family("wgrad").legal(strict, H100))
    row = int(np.flatnonzero(legal & (family("wgrad").configs["splits"] > 1))[0])
    assert family("wgrad").launch(problem, row) == family("wgrad").launch(strict, row)
    sweep, add = family("wgrad").launch(problem, row).steps
    assert (sweep.kernel.file, add.kernel.file) == ("anywidth_wgrad.cu", "depthwise_wgrad_sum.cu")
