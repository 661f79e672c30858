"""What the grouped families share: the limits of their kernels.

Layers of as many filters as channels, group width 1 (depthwise) to 64 (below 8 in whole pieces of 8
channels), any window up to 7x7, stride and dilation 1 or 2 along each axis, any padding, float16 or
bfloat16.
"""

from __future__ import annotations

from confpred.problem import Problem

DTYPES = ("float16", "bfloat16")
GROUP_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
MAX_WINDOW = 7
MAX_STEP = 2  # the largest stride and dilation


def handles(problem: Problem) -> bool:
    """Whether `problem` is a grouped layer that the kernels compute."""
    return (
        problem.dtype in DTYPES
        and problem.group_width in GROUP_WIDTHS
        and problem.k == problem.c
        and problem.c % 8 == 0
        and max(problem.r, problem.s) <= MAX_WINDOW
        and max(*problem.stride, *problem.dilation) <= MAX_STEP
    )
