"""Random problems for Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from confpred.problem import ACTIVATIONS, DTYPES, Problem

small = st.integers(1, 7)
pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any layer that PyTorch would compute, of moderate size."""
    groups = draw(st.sampled_from((1, 2, 3, 8, 32)))
    r, s = draw(small), draw(small)
    stride, dilation = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    # The smallest input that a dilated window still fits into, once padded.
    least_h = max(1, dilation[0] * (r - 1) + 1 - 2 * padding[0])
    least_w = max(1, dilation[1] * (s - 1) + 1 - 2 * padding[1])
    return Problem(
        n=draw(st.integers(1, 256)),
        c=groups * draw(st.integers(1, 64)),
        h=draw(st.integers(least_h, least_h + 200)),
        w=draw(st.integers(least_w, least_w + 200)),
        k=groups * draw(st.integers(1, 64)),
        r=r,
        s=s,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from(DTYPES)),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )


@st.composite
def grouped_problems(draw: st.DrawFn, *, largest: int = 120, images: int = 64) -> Problem:
    """Layers that the grouped forward family handles; sides up to `largest`, batch to `images`."""
    width = draw(st.sampled_from((8, 16, 32)))
    groups = draw(st.integers(1, 1024 // width))
    r, s = draw(small), draw(small)
    padding = draw(st.tuples(st.integers(0, r), st.integers(0, s)))
    return Problem(
        n=draw(st.integers(1, images)),
        c=groups * width,
        h=draw(st.integers(max(1, r - 2 * padding[0]), largest)),
        w=draw(st.integers(max(1, s - 2 * padding[1]), largest)),
        k=groups * width,
        r=r,
        s=s,
        padding=padding,
        groups=groups,
        dtype=draw(st.sampled_from(DTYPES)),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )
