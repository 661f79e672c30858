"""Grouped convolution of any group width on tensor cores: the limits of the kernels, and how they
walk a layer's rows and columns.

The layers have at least two groups of 2 to 512 input channels and of 1 to 512 output channels each,
filters up to 7x7, stride 1 or 2, dilation 1 to 4 along each axis, any padding, float16 or bfloat16.
Layers that `confpred.families.grouped` serves are left to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from confpred.families import grouped
from confpred.families.common import MAX_INT
from confpred.families.protocol import Array, Floats, Mask
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device

MIN_WIDTH, MAX_WIDTH = 2, 512
MAX_WINDOW = 7
MAX_STRIDE = 2
MAX_DILATION = 4
#: Vectors of a row of a tile, at most: a lane keeps where those of its part lie in registers.
MOST_ROW_VECTORS = 32 * 16
#: Shared memory of a block, at most, for each of its threads: a multiprocessor of an H100 holds at
#: least eight warps so.
MOST_THREAD_BYTES = 896
#: Share of the rate of shared memory that reads of fragments reach.
_SHARED = 0.8


def handles(problem: Problem) -> bool:
    """Return whether `problem` is a grouped layer that the kernels compute."""
    return (
        problem.dtype in grouped.DTYPES
        and problem.groups > 1
        and MIN_WIDTH <= problem.group_width <= MAX_WIDTH
        and depth_of(problem) <= MAX_WIDTH
        and max(problem.r, problem.s) <= MAX_WINDOW
        and max(problem.stride) <= MAX_STRIDE
        and max(problem.dilation) <= MAX_DILATION
        and max(problem.w * problem.c, problem.q * problem.k) <= MAX_INT
        and not grouped.handles(problem)
    )


def depth_of(problem: Problem) -> int:
    """Return the output channels of one group."""
    return problem.k // problem.groups


def vector_of(width: int) -> int:
    """Return how many channels at the start of every group of `width` lie at their own
    alignment."""
    return min(width & -width, 8)


def is_first(pieces: int, most: Array, options: tuple[int, ...]) -> Mask:
    """Return which of `options` are the smallest that cut `pieces` of 8 channels into as many
    parts; another one would be the same kernel again. `most` is the column of options."""
    kept, seen = [], set()
    for option in options:
        parts = -(-8 * pieces // option)
        if parts not in seen:
            seen.add(parts)
            kept.append(option)
    first: Mask = (most[:, None] == kept).any(1)
    return first


def shared_s(read: Any, device: Device) -> Floats:
    """Return the time to read so many bytes of shared memory: a multiprocessor reads 128 a clock,
    as many as it has lanes for multiply-adds."""
    return read / (_SHARED * device.simt_flops / 2)


@dataclass(frozen=True, slots=True)
class Walk:
    """How a kernel walks a layer's rows, or its columns; the names are the kernel's.

    Attributes:
        taps: R or S.
        met: how many taps a lattice meets, at most.
        down, step: inputs from one position of a tile to the next, and from one tap to the next.
        halved: 0 where each output meets all taps; else outputs of one parity are a lattice, which
            meets all taps or none (1), or every second one (2).
        in_step: distance of two inputs.
        positions: how many outputs one lattice has.
    """

    taps: int
    met: int
    down: int
    step: int
    halved: int
    in_step: int
    positions: int

    @property
    def lattices(self) -> int:
        return 1 + (self.halved > 0)  # an array of several problems' too


def describe_axes(problem: Problem) -> tuple[Walk, Walk]:
    """Return the rows and the columns of `problem`."""
    return _describe_axis(problem, 0), _describe_axis(problem, 1)


def _describe_axis(problem: Problem, axis: int) -> Walk:
    taps = (problem.r, problem.s)[axis]
    inputs, outputs = ((problem.h, problem.p), (problem.w, problem.q))[axis]
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    if problem.direction != "dgrad":
        steps = grouped.steps_of(taps, stride, dilation)
        return Walk(taps, taps, steps.stride, steps.dilation, 0, steps.step, outputs)
    dilation = dilation if taps > 1 else 1
    if stride == 1:
        return Walk(taps, taps, 1, dilation, 0, 1, inputs)
    positions = -(-inputs // 2)
    if dilation % 2:
        return Walk(taps, -(-taps // 2), 1, dilation, 2, 1, positions)
    return Walk(taps, taps, 1, dilation // 2, 1, 1, positions)
