"""Shared parts of the families of depthwise convolution of volumes: which problems they serve, and
how the threads of a block cover channels.

They serve channels-last layers of rank 3 and group width 1, with filters up to 7x7x7, stride and
dilation 1 or 2 along each axis, any padding, and any of the dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from confpred.families.common import MAX_REGISTERS, ceil_div
from confpred.families.protocol import Array, Mask
from confpred.problem.conv import MAX_RANK, ConvNd

AXES = ("d", "h", "w")
MAX_WINDOW = 7
MAX_STEP = 2  # the largest stride and dilation
#: Most elements of an image: kernels count its pixels in 32 bits, and this leaves room for the
#: padding that they count beyond it.
MAX_IMAGE = 2**30
MAX_IMAGES = 65_535  # of a batch: an image is a block of the grid's last dimension, or fewer
#: Bounds of a thread's registers at which a multiprocessor holds one more block of 128 threads.
_BOUNDS = np.array((64, 72, 80, 96, 128, 168, MAX_REGISTERS))
_MARGIN = 1.08  # of a bound over an estimate, so that kernels do not spill
ROW_WORD = 32  # bits of the words that hold which rows and columns of a tile are inside
LEAST_LANES = 8  # the smallest limit of lanes in the config tables
ACCESS_BYTES = 16  # most that a thread can access at once


def handles(problem: ConvNd) -> bool:
    """Return whether `problem` is a layer that the kernels compute."""
    p = problem
    return (
        p.rank == MAX_RANK
        and p.is_channels_last
        and p.group_width == 1
        and max(p.filter_shape) <= MAX_WINDOW
        and max(*p.stride, *p.dilation) <= MAX_STEP
        and max(p.input_elements, p.output_elements) // p.n <= MAX_IMAGE
        and p.n <= MAX_IMAGES
    )


def dilation(problem: ConvNd) -> tuple[int, ...]:
    """Return the layer's dilation, or 1 along an axis in which the filter has one tap, so that
    there are fewer distinct kernels."""
    axes = zip(problem.dilation, problem.filter_shape, strict=True)
    return tuple(dilation if window > 1 else 1 for dilation, window in axes)


def axis_macros(**sizes: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Return a macro for each axis of each of `sizes`, such as ``STRIDE_D``."""
    return tuple(
        (f"{name}_{axis}".upper(), size)
        for name, axes in sizes.items()
        for axis, size in zip(AXES, axes, strict=True)
    )


def axis_scalars(**sizes: tuple[int, ...]) -> Mapping[str, int]:
    """Return a scalar for each axis of each of `sizes`, such as ``pad_d``."""
    return {name.lower(): size for name, size in axis_macros(**sizes)}


def accessible(vec: Array, problem: ConvNd) -> Mask:
    """Return which vector widths can be accessed at once and are worth it. Fewer than 4 bytes are
    only for an odd count of channels, which leaves nothing else. The output channels of a vector
    share one input channel, or fall into whole groups that each share one."""
    multiplier = problem.k // problem.c
    odd = problem.k % 2 == 1 or (multiplier > 1 and multiplier % 2 == 1)
    fits: Mask = (
        (vec * problem.itemsize <= ACCESS_BYTES)
        & (problem.k % vec == 0)
        & ((vec % multiplier == 0) | (multiplier % vec == 0))
        & ((vec * problem.itemsize >= 4) | odd)
    )
    return fits


def shared_lanes(problem: ConvNd, t: dict[str, Array]) -> None:
    """Add to the fields `t` of some configs how threads cover channels: ``c_tiles``, blocks that
    share them; ``lanes``, neighbouring threads of a block along them, shared out as evenly as
    possible; and ``repeat``, output channels of a thread that share an input channel."""
    vectors = np.maximum(problem.k // t["vec"], 1)  # a width that is not legal may come to none
    t["c_tiles"] = ceil_div(vectors, t["lanes_c"])
    t["lanes"] = ceil_div(vectors, t["c_tiles"])
    t["distinct_lanes"] = (t["lanes_c"] < 2 * vectors) | (t["lanes_c"] == LEAST_LANES)
    t["repeat"] = np.minimum(t["vec"], problem.k // problem.c)


def bound(registers: Array) -> Array:
    """Return the bounds of registers that kernels with these estimates are compiled for."""
    places = np.searchsorted(_BOUNDS, registers * _MARGIN)
    bounds: Array = _BOUNDS[np.minimum(places, len(_BOUNDS) - 1)]
    return bounds
