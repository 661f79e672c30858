"""Layers of the kinds that kernel families compute: random ones, and a list that has everything."""

from __future__ import annotations

import random
from functools import cache
from itertools import cycle, product
from typing import Any

import numpy as np

from confpred.families.protocol import Family
from confpred.families.registry import families_of, kernels_of
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import ACTIVATIONS, DIRECTIONS, DTYPES, Problem
from confpred.problem.device import KNOWN, Device, get_device
from confpred.problem.norm import BatchNorm
from confpred.problem.norm_of_groups import AFFINE, Norm
from confpred.problem.operation import KernelSpec

H100 = get_device("h100")
#: The kernel families of convolution, and of norms: of batch norm and over groups, by name.
_ANY = Problem(n=1, c=1, h=1, w=1, k=1, r=1, s=1)
ANY_WIDTH = {name: f for name, f in families_of(_ANY).items() if name.startswith("anywidth")}
CONVOLUTIONS = kernels_of(_ANY)
GROUP_NORMS = kernels_of(Norm(n=1, p=1, c=1))
ROW_NORMS = {name: family for name, family in GROUP_NORMS.items() if name.startswith("row_norm")}
NORMS = {**kernels_of(BatchNorm(n=2, h=1, w=1, c=1)), **GROUP_NORMS}
#: Those of convolution of lines and of volumes: depthwise, and dense of few channels.
OTHER_RANKS = kernels_of(ConvNd(n=1, c=1, w=1, k=1, s=1))
VOLUMES = {name: family for name, family in OTHER_RANKS.items() if name.startswith("volume")}
LINES = {name: family for name, family in OTHER_RANKS.items() if name.startswith("line")}
DENSE_VOLUMES = {name: f for name, f in OTHER_RANKS.items() if name.startswith("dense")}
#: A board of each architecture, by its target: legality and launches differ between these.
ARCHITECTURES = {device.arch: device for device in reversed(list(KNOWN.values()))}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
#: Others, which the families of any width alone serve, with the output channels of their groups.
ODD_WIDTHS = {3: 6, 24: 24, 40: 24, 112: 112}
#: In place of a group width: of layers with one group, of at most so many channels.
DENSE, MOST_DENSE = 0, 128
#: Their number has no common divisor with the length of any other list here, so that going around
#: all lists together meets every pair.
WINDOWS = (
    (1, 1), (3, 3), (5, 5), (7, 7), (9, 9), (11, 11),
    (1, 7), (7, 1), (2, 4), (1, 11), (11, 1),
)  # fmt: skip
#: Those of the families for large filters, as many.
LARGE_WINDOWS = (
    (13, 13), (31, 31), (5, 51), (51, 5), (1, 51), (12, 9), (29, 17), (51, 51), (64, 3),
    (27, 27), (2, 64),
)  # fmt: skip
VOLUME_WINDOWS = (
    (3, 3, 3), (3, 3, 3), (3, 3, 3), (5, 5, 5), (7, 7, 7), (3, 1, 1), (7, 1, 1), (1, 3, 3),
    (1, 7, 7), (3, 5, 5), (1, 1, 1), (2, 3, 4),
)  # fmt: skip
#: Stride and dilation.
STEPS = ((1, 1), (2, 1), (1, 2), (2, 2))
#: Batch, channels, and height and width; between them they make every tile worth offering.
SIZES = (
    (32, 128, 112),
    (1, 576, 14),
    (128, 1024, 7),
    (5, 99, 45),
    (64, 480, 56),  # blocks of 48, 80 and 96 channels
    (64, 72, 56),  # blocks of 24 channels
)
_MOST_FLOPS = 2**27  # of a random layer: the float64 reference of a test takes tens of milliseconds


def windows(family: Family) -> tuple[tuple[int, int], ...]:
    """Return filter sizes of layers that `family` computes."""
    return LARGE_WINDOWS if family.name.startswith("depthwise_large") else WINDOWS


def multiplier(family: Family) -> int:
    """Return how many output channels an input channel has in layers of `family`, at least."""
    return 2 if family.name.startswith("depthwise_multiplied") else 1


@cache
def served(family: Family) -> tuple[tuple[str, int], ...]:
    """Return the directions and group widths that `family` has configs for; ``DENSE`` is one of
    them."""
    window = (13, 13) if windows(family) is LARGE_WINDOWS else (3, 3)
    fixed = {"window": window, "step": (1, 1), "dtype": "float16", "times": multiplier(family)}
    return tuple(
        (direction, width)
        for direction, width in product(DIRECTIONS, (*WIDTHS, *ODD_WIDTHS, DENSE))
        if family.legal(_layer(SIZES[0], direction, width, **fixed), H100).any()
    )


def representative(family: Family) -> list[Problem]:
    """Layers of `family`, in each of ``SIZES``, that meet every pair of a group width, window,
    stride and dilation, dtype and epilogue that it has kernels for."""
    steps, dtypes, flags = cycle(STEPS), cycle(DTYPES), cycle((True, False, True, True, False))
    activations = cycle((*ACTIVATIONS, "none"))
    found = []
    rounds = -(-len(WIDTHS) // len(served(family)))  # more for a family of one width
    for _, (direction, width), window in product(range(rounds), served(family), windows(family)):
        epilogue = (next(flags), next(activations), next(flags))
        step, dtype = next(steps), next(dtypes)
        for other in (dtype, *DTYPES):  # the next one where the family lacks this one
            layers = [
                _layer(size, direction, width, window, step, other, epilogue, multiplier(family))
                for size in SIZES
                if width == DENSE or width in ODD_WIDTHS or size[1] % width == 0
            ]
            legal = [layer for layer in layers if family.legal(layer, H100).any()]
            if legal:
                found += legal
                break
    return found


def _layer(
    size: tuple[int, int, int],
    direction: str,
    width: int,
    window: tuple[int, int],
    step: tuple[int, int],
    dtype: str,
    epilogue: tuple[bool, str, bool] = (False, "none", False),
    times: int = 1,
) -> Problem:
    (n, c, side), (bias, activation, residual), dilation = size, epilogue, step[1]
    groups = 1 if width == DENSE else max(c // width, 2 if width in ODD_WIDTHS else 1)
    c = min(c // 8 * 8, MOST_DENSE) if width == DENSE else groups * width
    k = groups * ODD_WIDTHS.get(width, c // groups)
    return Problem(
        n=n, c=c, h=side, w=side, k=k * times, r=window[0], s=window[1], stride=step[0],
        padding=tuple(dilation * (taps // 2) for taps in window),
        dilation=dilation, groups=groups, dtype=dtype,
        direction=direction,
        **_epilogue(direction, bias, activation, residual, deterministic=residual),
    )  # fmt: skip


def _epilogue(
    direction: str, bias: bool, activation: str, residual: bool, deterministic: bool
) -> dict[str, object]:
    """Return the part of the epilogue that `direction` has."""
    return {
        "fprop": {"bias": bias, "activation": activation, "residual": residual},
        "dgrad": {},
        "wgrad": {"bias": bias, "deterministic": deterministic},
    }[direction]


def first_kernel(family: Family) -> KernelSpec:
    """Return the kernel of the first config that is legal for the first layer of
    `representative`."""
    problem = representative(family)[0]
    row = int(np.flatnonzero(family.legal(problem, H100))[0])
    return family.launch(problem, row).steps[0].kernel


def random_layer(rng: random.Random, family: Family) -> Problem:
    """Return an odd-shaped layer of a direction and group width of `family`, which need not have a
    legal config: one image, one group, tiles larger than the image, padding larger than the window.
    """
    direction, width = rng.choice(served(family))
    if windows(family) is LARGE_WINDOWS:
        return _random_large_layer(rng, direction)
    groups = rng.choice(
        [g for g in (1, 2, 3, 5, 8, 13, 16, 24, 40) if g * width <= max(192, 2 * width)]
    )
    times = max(rng.choice((1, 1, 1, 1, 2, 3)), multiplier(family))
    c, k = width * groups, ODD_WIDTHS.get(width, width) * groups * times
    if width == DENSE:
        groups, (c, k) = 1, (8 * rng.randint(1, MOST_DENSE // 8) for _ in range(2))
    largest = 11 if width == 1 else 7
    window = [rng.choice((3, 3, rng.randint(1, 7), rng.randint(1, largest))) for _ in range(2)]
    padding = [rng.randint(0, size + 1) for size in window]
    stride, dilation = ([rng.choice((1, 1, 2)) for _ in range(2)] for _ in range(2))
    least = [
        max(1, d * (f - 1) + 1 - 2 * z) for d, f, z in zip(dilation, window, padding, strict=True)
    ]
    return Problem(
        n=rng.choice((1, 1, 2, 3, 5, 9)),
        c=c,
        h=least[0] + rng.randint(0, 40),
        w=least[1] + rng.randint(0, 70),
        k=k,
        r=window[0],
        s=window[1],
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=groups,
        dtype=rng.choice(DTYPES),
        direction=direction,
        **_epilogue(
            direction,
            bias=rng.random() < 0.5,
            activation=rng.choice(ACTIVATIONS),
            residual=rng.random() < 0.5,
            deterministic=rng.random() < 0.5,
        ),
    )


def _random_large_layer(rng: random.Random, direction: str) -> Problem:
    """Return a depthwise layer with a large filter, square or a strip: images smaller than it, more
    padding than it needs, none."""
    large = rng.choice((12, 13, 17, 31, 51, rng.randint(12, 64)))
    small = rng.choice((1, 2, 5, rng.randint(1, 11)))
    window = rng.choice(((large, large), (large, small), (small, large)))
    padding = [rng.choice((size // 2, size // 2, rng.randint(0, size))) for size in window]
    least = [max(1, f - 2 * z) for f, z in zip(window, padding, strict=True)]
    c = rng.choice((8, 8, 16, 24, 40, 3, 10, 12, 21))
    return Problem(
        n=rng.choice((1, 1, 2, 3, 5)), c=c, k=c, groups=c,
        h=least[0] + rng.choice((0, 1, rng.randint(2, 40))),
        w=least[1] + rng.choice((0, 1, rng.randint(2, 70))),
        r=window[0], s=window[1], padding=tuple(min(size, 64) for size in padding),
        dtype=rng.choice(DTYPES[:2]), direction=direction,
        **_epilogue(
            direction,
            bias=rng.random() < 0.5,
            activation=rng.choice(ACTIVATIONS),
            residual=rng.random() < 0.5,
            deterministic=rng.random() < 0.5,
        ),
    )  # fmt: skip


def random_legal_layer(
    rng: random.Random, family: Family, device: Device, most_flops: int = _MOST_FLOPS
) -> Problem:
    """Return a small `random_layer` that `family` has configs for."""
    while True:
        problem = random_layer(rng, family)
        if problem.flops <= most_flops and family.legal(problem, device).any():
            return problem


def random_norm(rng: random.Random, family: Any, most_elements: int = 24_000) -> Any:
    """Return a small norm that `family` has configs for."""
    if family.name in GROUP_NORMS:
        return random_group_norm(rng, family, most_elements)
    return random_batch_norm(rng, family, most_elements)


def random_batch_norm(rng: random.Random, family: Any, most_elements: int) -> BatchNorm:
    """Return a small batch norm that `family` has configs for: odd channels, a row, two images."""
    while True:
        direction, activation = family.direction, rng.choice(ACTIVATIONS)
        problem = BatchNorm(
            n=rng.choice((2, 2, 3, 5)),
            h=rng.choice((1, rng.randint(2, 12), rng.randint(13, 40))),
            w=rng.randint(1, 40),
            c=rng.choice((1, 3, 8, 10, 16, 24, 36, 48, 96, 144, 264)),
            dtype=rng.choice(DTYPES),
            activation=activation,
            residual=rng.random() < 0.4 and (direction == "forward" or activation != "none"),
            direction=direction,
            affine=rng.random() < 0.8,
            frozen=rng.random() < 0.2,
        )
        if problem.rows * problem.c <= most_elements and family.legal(problem, H100).any():
            return problem


def random_group_norm(rng: random.Random, family: Family, most_elements: int) -> Norm:
    """Return a small norm that `family` has configs for: a row or many, odd channels, groups of
    one channel and of all, weights of each kind, RMS norm."""
    while True:
        dtype, direction = rng.choice(DTYPES), family.direction
        activation, affine = rng.choice(ACTIVATIONS), rng.choice(AFFINE)
        p = rng.choice((1, 1, rng.randint(2, 40), rng.randint(41, 400)))
        n = rng.choice((1, 2, 5, rng.randint(6, 300)))
        c = rng.choice((1, 3, 7, 8, 10, 16, 24, 36, 48, 64, 96, 100, 144, 264, 328, 1000))
        groups = rng.choice((1, 1, *(g for g in range(1, c + 1) if c % g == 0)))
        if n * p * c > most_elements:
            continue
        problem = Norm(
            n=n,
            p=p,
            c=c,
            groups=groups,
            dtype=dtype,
            activation=activation,
            residual=rng.random() < 0.4 and (direction == "forward" or activation != "none"),
            direction=direction,
            affine=affine,
            weights="float32" if affine == "none" else rng.choice(("float32", dtype)),
            adaptive=affine != "none" and rng.random() < 0.3,
            centred=(p, groups) != (1, 1) or rng.random() < 0.6,
        )
        if family.legal(problem, H100).any():
            return problem


def random_volume(rng: random.Random, direction: str, dense: bool = False) -> ConvNd:
    """Return a small layer, which need not have a legal config: odd channels, one plane, tiles
    larger than the volume, padding larger than the window, a cut."""
    window = rng.choice(VOLUME_WINDOWS)
    padding = [rng.randint(0, size + 1) for size in window]
    stride, dilation = ([rng.choice((1, 1, 2)) for _ in range(3)] for _ in range(2))
    least = [
        max(1, d * (f - 1) + 1 - 2 * z) for d, f, z in zip(dilation, window, padding, strict=True)
    ]
    d, h, w = (low + rng.randint(0, 9) for low in least)
    c = rng.choice((8, 16, 24, 32, 40) if dense else (1, 2, 3, 6, 8, 10, 16, 24, 54))
    k = 8 * rng.randint(1, 5) if dense else c
    k *= 1 if dense or direction == "dgrad" else rng.choice((1, 1, 1, 2, 3))
    width = (w + 2 * padding[2] - dilation[2] * (window[2] - 1) - 1) // stride[2] + 1
    fields: dict[str, Any] = {"bias": rng.random() < 0.5, "deterministic": False}
    if direction == "wgrad":
        fields["deterministic"] = rng.random() < 0.5
    else:
        fields |= {"activation": rng.choice(ACTIVATIONS), "residual": rng.random() < 0.5}
    return ConvNd(
        n=rng.choice((1, 1, 2, 3)), c=c, d=d, h=h, w=w,
        k=k, t=window[0], r=window[1], s=window[2], stride=tuple(stride), padding=tuple(padding),
        dilation=tuple(dilation), cut=rng.choice((0, 0, min(2, width - 1))),
        groups=1 if dense else c, dtype=rng.choice(DTYPES), direction=direction, **fields,
    )  # fmt: skip


def random_line(rng: random.Random, direction: str) -> ConvNd:
    """Return a small layer: rows of any length, causal or not, strided, dilated, up to 64 taps."""
    channels, taps = rng.randint(1, 5), rng.choice((1, 2, 3, 4, 5, 7, 11, 31, 64))
    dilation, padding = rng.choice((1, 1, 2, 3, 8)), rng.randint(0, 2 * taps)
    stride, cut = rng.choice((1, 1, 2, 4)), rng.choice((0, 0, 1, 3))
    least = max(dilation * (taps - 1) + 1 - 2 * padding, 1) + cut * stride
    finishes = direction != "wgrad"
    return ConvNd(
        rank=1, n=rng.randint(1, 3), c=channels, groups=channels,
        k=channels * (1 if direction == "dgrad" else rng.choice((1, 1, 2, 3))),
        w=-(-least // 8) * 8 + rng.choice((0, 8, 16, 32, 40, 50, 64, 1)), s=taps, stride=stride,
        padding=padding, dilation=dilation, cut=cut, layout="channels_first",
        dtype=rng.choice(DTYPES), direction=direction, bias=rng.random() < 0.5,
        activation=rng.choice(ACTIVATIONS) if finishes else "none",
        residual=finishes and rng.random() < 0.5,
    )  # fmt: skip


def random_legal_conv(
    rng: random.Random, family: Family, device: Device, most_flops: int = 2**21
) -> ConvNd:
    """Return a `random_line` or `random_volume` that `family` has configs for."""
    direction, dense = family.name.rpartition("_")[2], family.name in DENSE_VOLUMES
    while True:
        is_line = family.name in LINES
        problem = random_line(rng, direction) if is_line else random_volume(rng, direction, dense)
        if problem.flops <= most_flops and family.legal(problem, device).any():
            return problem
