"""What the grouped families share: the limits of their kernels.

They serve layers of as many filters as channels, group width 1 (depthwise) to 64, a multiple of 8
channels, any window up to 7x7, stride and dilation 1 or 2 along each axis, any padding, float16 or
bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families.common import Array
from confpred.problem.conv2d import Problem

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


def fits_odd_channels(block: Array, channels: Any) -> NDArray[np.bool_]:
    """Which blocks of channels that are no power of two to offer for a layer. They must divide its
    channels, and 64 must not. Blocks of fewer than 48 channels are for narrow layers only, as their
    piece of a pixel is not a whole number of 32-byte sectors."""
    result: NDArray[np.bool_] = (
        (channels % 64 != 0) & (channels % block == 0) & ((block >= 48) | (channels < 4 * block))
    )
    return result
