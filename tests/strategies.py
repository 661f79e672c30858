"""Random problems for Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from layers import random_layer

from confpred.families.protocol import Family
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
        r=r,
        s=s,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from(DTYPES)),
        direction=direction,
        bias=(forward or wgrad) and draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)) if forward else "none",
        residual=forward and draw(st.booleans()),
        deterministic=wgrad and draw(st.booleans()),
    )


def epilogue(draw: st.DrawFn, direction: str) -> dict[str, Any]:
    """Any bias, residual, activation and demand to be repeatable that `direction` has."""
    forward = direction == "fprop"
    return {
        "bias": direction != "dgrad" and draw(st.booleans()),
        "residual": forward and draw(st.booleans()),
        "activation": draw(st.sampled_from(ACTIVATIONS)) if forward else "none",
        "deterministic": direction == "wgrad" and draw(st.booleans()),
    }


def problems_of(family: Family) -> st.SearchStrategy[Problem]:
    """Layers of the directions and group widths that `family` computes."""
    return st.randoms(use_true_random=False).map(lambda rng: random_layer(rng, family))
