"""Random problems for Hypothesis."""

from __future__ import annotations

import random

from convs import random_conv
from hypothesis import strategies as st
from layers import ANY_WIDTH, DENSE, multiplier, random_layer, served

from confpred.families.protocol import Family
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import ACTIVATIONS, DIRECTIONS, DTYPES, Problem

small = st.integers(1, 7)
pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any layer that PyTorch would compute, of moderate size, in any direction."""
    groups = draw(st.sampled_from((1, 2, 3, 8, 32)))
    r, s = draw(small), draw(small)
    stride, dilation = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    # The smallest input that a dilated window still fits into, once padded.
    least_h = max(1, dilation[0] * (r - 1) + 1 - 2 * padding[0])
    least_w = max(1, dilation[1] * (s - 1) + 1 - 2 * padding[1])
    direction = draw(st.sampled_from(DIRECTIONS))
    forward, wgrad = direction == "fprop", direction == "wgrad"
    return Problem(
        n=draw(st.integers(1, 256)),
        c=groups * draw(st.integers(1, 64)),
        h=draw(st.integers(least_h, least_h + 200)),
        w=draw(st.integers(least_w, least_w + 200)),
        k=groups * draw(st.integers(1, 64)),
        r=r, s=s, stride=stride, padding=padding, dilation=dilation, groups=groups,
        dtype=draw(st.sampled_from(DTYPES)), direction=direction,
        bias=(forward or wgrad) and draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)) if forward else "none",
        residual=forward and draw(st.booleans()),
        deterministic=wgrad and draw(st.booleans()),
    )  # fmt: skip


def convs() -> st.SearchStrategy[ConvNd]:
    """Small convolutions of any rank, layout and direction."""
    return st.integers(0, 2**32).map(lambda seed: random_conv(random.Random(seed)))


@st.composite
def layers_of(draw: st.DrawFn, family: Family, *, largest: int = 120, images: int = 64) -> Problem:
    """Layers that `family` handles; sides up to `largest`, batch up to `images`."""
    direction, width = draw(st.sampled_from([s for s in served(family) if s[1] != DENSE]))
    large = family.name.startswith("depthwise_large")
    plain = large or family.name.startswith("depthwise_banded")
    odd = family.name in ANY_WIDTH
    eights = plain or family.name.startswith("grouped")
    steps = st.tuples(*(st.just(1) if plain else st.integers(1, 2) for _ in range(2)))
    window = 11 if width == 1 and not family.name.startswith("grouped") else 7
    r, s = (draw(st.integers(1, most)) for most in (window, min(window, 9) if plain else window))
    if large:
        r, s = draw(st.sampled_from(((r, s + 51), (r + 51, s), (r + 20, s + 20))))
    unit = max(8, width) if eights and not large else width if odd else 1
    c = unit * draw(st.integers(2 if odd else 1, max(2, 160 // unit) if odd else 160 // unit))
    times = 1 if eights or not (odd or direction == "fprop") else draw(st.integers(1, 4))
    dilation, stride = draw(steps), draw(steps)
    if multiplier(family) > 1:
        times, dilation = draw(st.integers(2, 4)), (1, 1)
    padding = draw(st.tuples(st.integers(0, r), st.integers(0, s)))
    least = [
        max(1, d * (size - 1) + 1 - 2 * pad)
        for d, size, pad in zip(dilation, (r, s), padding, strict=True)
    ]
    forward = direction == "fprop"
    return Problem(
        n=draw(st.integers(1, images)), c=c, k=c * times,
        h=draw(st.integers(least[0], max(least[0], largest))),
        w=draw(st.integers(least[1], max(least[1], largest))),
        r=r, s=s, stride=stride, padding=padding, dilation=dilation, groups=c // width,
        dtype=draw(st.sampled_from(DTYPES[:2] if eights or odd else DTYPES)),
        direction=direction, bias=direction != "dgrad" and draw(st.booleans()),
        residual=forward and draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)) if forward else "none",
        deterministic=direction == "wgrad" and draw(st.booleans()),
    )  # fmt: skip


def problems_of(family: Family) -> st.SearchStrategy[Problem]:
    """Layers of the directions and group widths that `family` computes."""
    return st.randoms(use_true_random=False).map(lambda rng: random_layer(rng, family))
