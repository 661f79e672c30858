"""Grouped convolution on tensor cores, group widths 1 to 64: the limits of the kernels, and how
they walk a layer's rows, columns and filters.

The layers have as many filters as channels, group width 1 (depthwise) to 64, a multiple of 8
channels, filters up to 7x7, stride and dilation 1 or 2 along each axis, any padding, float16 or
bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from confpred.families.protocol import Array, Mask
from confpred.problem.conv2d import Problem

DTYPES = ("float16", "bfloat16")
GROUP_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
MAX_WINDOW = 7
MAX_STEP = 2  # the largest stride and dilation


def handles(problem: Problem) -> bool:
    """Return whether `problem` is a grouped layer that the kernels compute."""
    return (
        problem.dtype in DTYPES
        and problem.group_width in GROUP_WIDTHS
        and problem.k == problem.c
        and problem.c % 8 == 0
        and max(problem.r, problem.s) <= MAX_WINDOW
        and max(*problem.stride, *problem.dilation) <= MAX_STEP
    )


def is_odd(block: Array) -> Mask:
    """Return which blocks have a count of channels that is no power of two."""
    return block & (block - 1) > 0


def fits_odd_channels(block: Array, channels: Any) -> Mask:
    """Return which blocks of channels that are no power of two to offer for a layer. They must
    divide its channels, and 64 must not. Blocks of fewer than 48 channels are for narrow layers
    only, as their part of a pixel is not a whole number of 32-byte sectors."""
    return (channels % 64 != 0) & (channels % block == 0) & ((block >= 48) | (channels < 4 * block))


Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GroupedAxis:
    """How the kernel walks a layer's rows, or its columns; the names are the kernel's.

    A position of a tile is an output of the kernel, or two neighbouring ones where an input feeds
    twice as many outputs (``up``).

    Attributes:
        taps: R or S.
        down, up: how many inputs the walk goes on for an output, and how many outputs an input
            feeds: 1 or 2, and one of the two is 1.
        in_origin, in_lattice, in_step: the input that the first tap of position 0 meets, how far
            it moves from one lattice to the next, and the distance of one step.
        out_origin, out_step: the output of position 0, and the distance of one step, which is
            also the number of lattices.
        positions: how many positions one lattice has.
    """

    taps: int
    down: int
    up: int
    in_origin: int
    in_lattice: int
    in_step: int
    out_origin: int
    out_step: int
    positions: int

    def scalars(self, side: str) -> dict[str, int]:
        """Return the kernel's scalars for its rows (`side` is ``h``) or its columns (``w``)."""
        names = ("in_origin", "in_lattice", "in_step", "out_origin", "out_step")
        return {f"{name}_{side}": getattr(self, name) for name in names}


def describe_axes(problem: Problem) -> tuple[GroupedAxis, GroupedAxis]:
    """Return the rows and the columns of `problem`."""
    return describe_axis(problem, 0), describe_axis(problem, 1)


def describe_axis(problem: Problem, axis: int) -> GroupedAxis:
    """Return the rows (0) or the columns (1) of `problem`."""
    taps = (problem.r, problem.s)[axis]
    inputs, outputs = ((problem.h, problem.p), (problem.w, problem.q))[axis]
    stride, padding = problem.stride[axis], problem.padding[axis]
    # With one tap any dilation is right; taking the stride's leaves the kernel no stride to handle.
    dilation = problem.dilation[axis] if taps > 1 else stride
    if problem.direction == "fprop":
        # input = stride * output + dilation * tap - padding
        steps = steps_of(taps, stride, dilation)
        return GroupedAxis(
            taps=taps,
            down=steps.stride,
            up=1,
            in_origin=-padding,
            in_lattice=stride,
            in_step=steps.step * steps.dilation,
            out_origin=0,
            out_step=steps.dilation,
            positions=-(-outputs // steps.dilation),
        )
    # The kernel reads the gradient of the layer's output and writes that of its input, with its
    # taps reversed: w = stride * q + dilation * (taps - 1 - tap) - padding.
    unit = {"taps": taps, "down": 1, "up": 1, "out_origin": 0}
    if stride == 1:
        return GroupedAxis(
            **unit,
            in_origin=padding - dilation * (taps - 1),
            in_lattice=1,
            in_step=dilation,
            out_step=dilation,
            positions=-(-inputs // dilation),
        )
    if dilation == stride:
        # Taps meet every second column only, as in a layer of unit stride. The other lattice reads
        # from behind the last column, where there are only zeros.
        live = padding % 2
        met = (live + padding) // 2 - (taps - 1)
        return GroupedAxis(
            **unit,
            in_origin=outputs if live else met,
            in_lattice=met - outputs if live else outputs - met,
            in_step=1,
            out_step=2,
            positions=-(-inputs // 2),
        )
    # Pairs of outputs begin where the last tap meets the first of a pair.
    out_origin = -((padding + taps) % 2)
    return GroupedAxis(
        taps=taps,
        down=1,
        up=2,
        in_origin=(out_origin + padding + 2 - taps) // 2,
        in_lattice=0,
        in_step=1,
        out_origin=out_origin,
        out_step=1,
        positions=-(-(inputs - out_origin) // 2),
    )


@dataclass(frozen=True, slots=True)
class Steps:
    """A filter's steps along one axis, after the common factor of stride and dilation is divided
    out.

    Attributes:
        stride, dilation: divided by their common factor, so one of the two is 1.
        step: the common factor, in input elements.
    """

    stride: int
    dilation: int
    step: int


def steps_of(window: int, stride: int, dilation: int) -> Steps:
    """Return the steps of a filter of so many taps along one axis."""
    if window == 1:
        dilation = stride  # with one tap any will do: take the one that leaves no stride
    step = gcd(stride, dilation)
    return Steps(stride // step, dilation // step, step)


@dataclass(frozen=True, slots=True)
class Window:
    """Parameters of a kernel apart from its config: filter size, group width, steps, bias
    gradient."""

    group_width: int
    r: int
    s: int
    vertical: Steps
    horizontal: Steps
    bias: bool


def window_of(problem: Problem) -> Window:
    """Return the part of `problem` that decides its kernels."""
    p, (down, across) = problem, zip(problem.stride, problem.dilation, strict=True)
    return Window(p.group_width, p.r, p.s, steps_of(p.r, *down), steps_of(p.s, *across), p.bias)


def flush_steps(problem: Problem) -> int:
    """Return how many steps without a gradient row follow an image's last one.

    They must be enough for the input rows that the last gradient row still meets, and enough to
    clear it from the buffer for the next image. Steps in which the
    next image brings only padding help to clear it, so fewer are needed where there is padding.
    """
    axis = window_of(problem).vertical
    live = -(-problem.r // axis.stride)
    rows = -(-problem.p // axis.dilation)
    flush = 0
    for phase in range(axis.dilation):
        # Input rows begin at `top`; a step brings in `stride` of them, `pitch` apart.
        top = phase * problem.stride[0] - problem.padding[0]
        pitch = axis.step * axis.dilation
        step = axis.stride * pitch
        hidden = -((top + step - pitch) // step)  # steps whose last row is above the image
        met = -((top + rows * step - problem.h) // step)  # those whose first one is not below it
        hidden, met = (min(max(0, steps), live - 1) for steps in (hidden, met))
        flush = max(flush, live - 1 - hidden, met)
    return flush
