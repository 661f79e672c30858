"""The families of depthwise convolution of volumes: which layers they take, how launches cover
them, and what their kernels are compiled to."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from layers import H100, random_legal_conv
from layers import VOLUMES as FAMILIES
from ptx.launch import ptx_of
from ptxas import ARCHS, resources
from volume_layers import DEPTHWISE, legal_rows, parsed

from confpred.families.protocol import Family, config_dict
from confpred.families.volume.volume import _describe_axes
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import DTYPES
from confpred.problem.device import KNOWN
from confpred.problem.operation import Step

MOST_STACK_BYTES = 320  # 296 in one of 7x7x7 taps, most have none
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("words", DEPTHWISE)
@every_family
def test_layers_of_networks_and_unusual_ones_have_configs(family: Family, words: str) -> None:
    for device in KNOWN.values():
        assert family.legal(parsed(family, words), device).any(), device.key


@every_family
def test_a_channel_multiplier_is_not_for_the_input_gradient(family: Family) -> None:
    legal = family.legal(parsed(family, "k=48"), H100)
    assert legal.any() == (family.name != "volume_dgrad")


@every_family
def test_nearly_every_config_serves_some_layer(family: Family) -> None:
    met = np.zeros(len(family.configs), np.bool_)
    sizes = (
        (1, 24, 7), (1, 27, 7), (1, 54, 14), (1, 432, 7), (8, 27, 112), (8, 64, 112), (8, 54, 56),
        (8, 99, 112), (8, 432, 28), (8, 1001, 56), (8, 2048, 7),
    )  # fmt: skip
    windows = (
        "", "t=7 r=1 s=1 padding=3x0x0", "t=3 r=1 s=1 padding=1x0x0", "t=5 r=5 s=5 padding=2",
        "t=1 padding=0x1x1",
    )  # fmt: skip
    for (n, c, side), d, dtype, window in product(sizes, (2, 9, 32), DTYPES, windows):
        words = f"n={n} d={d} h={side} w={side} c={c} k={c} groups={c} dtype={dtype} {window}"
        met |= family.legal(parsed(family, words), H100)
    assert met.mean() > 0.99, [config_dict(family, row) for row in np.flatnonzero(~met)[:9]]


def covered(problem: ConvNd, step: Step) -> np.ndarray:
    """Return how often threads of an image's launch come to each of its results: channel, plane,
    row, column."""
    s, macros = step.scalars, {n: int(v) for n, v in step.kernel.defines if str(v).isdigit()}
    found = np.zeros((s["k"], s["z"], s["p"], s["q"]), np.int64)

    def piece(start: int, size: int, most: int) -> slice:
        return slice(max(start, 0), max(min(start + size, most), 0))

    assert step.grid[2] == problem.n
    for x, y, thread in product(range(step.grid[0]), range(step.grid[1]), range(step.block[0])):
        lane, tile = thread % s["lanes_c"], thread // s["lanes_c"]
        c_tile, block = x % s["c_tiles"], x // s["c_tiles"]
        if tile >= s["block_p"] * s["block_q"]:
            continue
        places = []
        for start, count, at, axis in (
            (block // s["q_blocks"], s["block_p"], tile // s["block_q"], "p"),
            (block % s["q_blocks"], s["block_q"], tile % s["block_q"], "q"),
        ):
            size = macros[f"TILE_{axis.upper()}"]
            shift = s[{"p": "shift_h", "q": "shift_w"}[axis]]
            places.append(piece((start * count + at) * size - shift, size, s[axis]))
        up = macros["UP_D"]
        start, groups = up * y * s["band_groups"] - s["shift_d"], s["band_groups"]
        channels = piece((c_tile * s["lanes_c"] + lane) * macros["VEC"], macros["VEC"], s["k"])
        found[channels, piece(start, up * groups, s["z"]), places[0], places[1]] += 1
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["volume_fprop", "volume_dgrad"])
def test_the_tiles_of_an_image_cover_it_once(name: str, seed: int) -> None:
    family, rng = FAMILIES[name], random.Random(f"{name} {seed}")
    problem = random_legal_conv(rng, family, H100)
    rows = legal_rows(family, problem)
    for row in rng.sample(rows, min(6, len(rows))):
        (step,) = family.launch(problem, row).steps
        assert (covered(problem, step) == 1).all(), (problem, config_dict(family, row))


@pytest.mark.parametrize("seed", range(6))
def test_the_tiles_of_a_filters_gradient_cover_the_images_once(seed: int) -> None:
    family, rng = FAMILIES["volume_wgrad"], random.Random(seed)
    problem = p = random_legal_conv(rng, family, H100)
    rows = legal_rows(family, problem)
    for row in rng.sample(rows, min(6, len(rows))):
        step = family.launch(problem, row).steps[0]
        s, macros = step.scalars, dict(step.kernel.defines)
        groups = 1 if not macros["PLANE_EACH"] else p.t
        assert step.grid[0] == s["c_tiles"] * s["splits"]
        assert s["lanes_c"] * groups * s["tiles_at_once"] <= step.block[0]
        assert s["c_tiles"] * s["lanes_c"] * macros["VEC"] >= p.k
        found = np.zeros((p.n, p.z, p.p, p.q), np.int64)
        for split, lane in product(range(s["splits"]), range(s["tiles_at_once"])):
            first = split * s["tiles_at_once"] + lane
            for tile in range(first, s["tiles"], s["splits"] * s["tiles_at_once"]):
                rest, q = divmod(tile, s["q_tiles"])
                rest, down = divmod(rest, s["p_tiles"])
                image, band = divmod(rest, s["bands"])
                starts = (band * s["band_planes"], down * macros["TILE_P"], q * macros["TILE_Q"])
                sizes = (s["band_planes"], macros["TILE_P"], macros["TILE_Q"])
                place = tuple(slice(a, a + b) for a, b in zip(starts, sizes, strict=True))
                found[image][place] += 1
        assert (found == 1).all(), (problem, config_dict(family, row))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_the_axes_describe_the_convolution(direction: str) -> None:
    """Input and output meet at the same taps in the kernel's equation as in the definition."""
    rng = random.Random(direction)
    for _ in range(40):
        problem = random_legal_conv(rng, FAMILIES[f"volume_{direction}"], H100)
        sizes = zip(problem.input_shape, problem.output_shape, problem.filter_shape, strict=True)
        steps = zip(problem.stride, problem.padding, problem.dilation, strict=True)
        for axis, (size, result, window), (stride, pad, dilation) in zip(
            _describe_axes(problem), sizes, steps, strict=True
        ):
            x, o, tap = np.ogrid[:size, :result, :window]
            right = x == o * stride - pad + tap * dilation
            if direction == "dgrad":  # from output to input, the window turned
                right = right.transpose(1, 0, 2)[:, :, ::-1]
            i, o, tap = np.ogrid[: axis.size_in, : axis.size_out, : axis.window]
            meet = axis.up * (i + axis.origin) == axis.down * (o + axis.shift) + axis.dilation * tap
            assert (meet == right).all()
            assert 0 <= axis.shift < axis.up or axis.shift == 0


@every_family
def test_one_kernel_serves_every_size(family: Family) -> None:
    """Sizes, padding and batch are launch arguments; so are bands, splits, lanes and threads."""
    rng = random.Random(family.name)
    problem = parsed(family, "n=4 h=28 w=28 c=48 k=48 groups=48")
    other = replace(problem, n=7, c=96, k=96, groups=96, d=10, h=40, w=52, padding=(3, 3, 3))
    rows = sorted(set(legal_rows(family, problem)) & set(legal_rows(family, other)))
    for row in rng.sample(rows, 20):
        kernel = family.launch(problem, row).steps[0].kernel
        assert family.launch(other, row).steps[0].kernel == kernel


@pytest.mark.parametrize("words", ["t=7 r=7 s=7 padding=6 dilation=2", "t=3 r=5 s=5 stride=2x2x1"])
@every_family
def test_all_products_of_a_step_are_unrolled(family: Family, words: str) -> None:
    """A loop over rows that stays one looks at every tap whether it is the row's."""
    problem = parsed(family, f"d=16 h=28 w=28 {words}")
    row = max(legal_rows(family, problem), key=lambda row: family.configs[row].tolist()[:3])
    layout = family._layout(problem, np.array([row]))
    products = layout.get("products", layout["tile_p"] * layout["tile_q"] * layout.get("sums", 0))
    text = ptx_of(family.launch(problem, row).steps[0].kernel, H100.arch)
    assert text.count("fma.rn.f32") >= products


@pytest.mark.slow(reason="five compiles a family and target")
@pytest.mark.parametrize("arch", ARCHS)
@every_family
def test_a_sample_compiles_and_hardly_spills(family: Family, arch: str) -> None:
    rng = random.Random(f"{family.name} {arch}")
    kernels = {}
    while len(kernels) < 5:
        problem = random_legal_conv(rng, family, H100)
        kernels[family.launch(problem, rng.choice(legal_rows(family, problem))).kernels[0]] = None
    for kernel in kernels:
        registers, stack = resources(kernel, arch)
        assert 8 <= registers <= int(dict(kernel.defines)["MAX_REGISTERS"])
        assert stack <= MOST_STACK_BYTES or arch != H100.arch, kernel
