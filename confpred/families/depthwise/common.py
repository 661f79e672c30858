"""What the depthwise families share: the limits of their kernels, the shape of a block, and how
blocks add up the filter's gradient.

Layers of group width 1 with windows up to 11x11, stride and dilation 1 or 2 (in each axis), any
padding, any of the dtypes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from confpred.families.common import ATOMIC, DIRECT, TWO_KERNELS, Array, agreed_macros
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import dtype_macro
from confpred.problem.operation import KernelSpec, Launch, Step

MAX_WINDOW = 11
MAX_STEP = 2  # of stride and of dilation
#: Elements of one image, within which the kernels address by 32-bit offsets; the rows of padding
#: that they count past it stay in range.
MAX_IMAGE = 2**30
MAX_COLUMNS = 32  # input columns of a tile: the kernels keep their validity in one word
MAX_THREADS = 256  # of a block: what the kernels are compiled for


def handles(problem: Problem) -> bool:
    """Whether `problem` is a depthwise layer that the kernels compute."""
    return (
        problem.group_width == 1
        and max(problem.r, problem.s) <= MAX_WINDOW
        and max(*problem.stride, *problem.dilation) <= MAX_STEP
        and max(problem.c * problem.h * problem.w, problem.k * problem.p * problem.q) <= MAX_IMAGE
    )


def dilation(problem: Problem) -> tuple[int, int]:
    """The layer's dilation, or 1 along an axis in which the window has one tap: that tells fewer
    kernels apart."""
    vertical, horizontal = problem.dilation
    return vertical if problem.r > 1 else 1, horizontal if problem.s > 1 else 1


def accessible(vec: Array, problem: Problem) -> NDArray[np.bool_]:
    """Which vector widths are one access each to memory, and worth it: narrower than 4 bytes only
    where odd counts of channels leave nothing else, or a large window no registers for two. The
    output channels of a vector share either one input channel, or whole vectors of them."""
    multiplier = problem.k // problem.c
    odd = problem.k % 2 == 1 or (multiplier > 1 and multiplier % 2 == 1)
    large = problem.r * problem.s > 64
    fits: NDArray[np.bool_] = (
        (vec * problem.itemsize <= 16)
        & (problem.k % vec == 0)
        & ((vec % multiplier == 0) | (multiplier % vec == 0))
        & ((vec * problem.itemsize >= 4) | odd | large)
    )
    return fits


@dataclass(frozen=True, slots=True)
class Lanes:
    """How threads cover channels; arrays over the rows of a config table.

    Attributes:
        c_tiles: blocks that share the channels.
        lanes_c: neighbouring threads of a block that run along them, as evenly as possible.
        tiles_at_once: tiles that a block has threads for beside that.
        threads: of a block, whole warps.
    """

    c_tiles: Array
    lanes_c: Array
    tiles_at_once: Array
    threads: Array

    @classmethod
    def of(cls, vectors: Array, lanes_c: Array, threads: Array, groups: Array | int = 1) -> Lanes:
        """For `vectors` accesses to a pixel, at most `lanes_c` of them in a block of about
        `threads`, each `groups` times."""
        vectors = np.maximum(
            vectors, 1
        )  # a width that is not legal may have none, but is asked for
        c_tiles = -(-vectors // lanes_c)
        lanes = -(-vectors // c_tiles)
        tiles_at_once = (threads // (lanes * groups)).clip(1)
        whole = -(-lanes * groups * tiles_at_once // 32) * 32
        return cls(c_tiles, lanes, tiles_at_once, whole)

    def features(self) -> dict[str, Array]:
        """By name."""
        return {
            "lanes": self.lanes_c,
            "c_tiles": self.c_tiles,
            "tiles_at_once": self.tiles_at_once,
            "block_threads": self.threads,
        }


def distinct_lanes(vectors: Array, lanes_c: Array) -> NDArray[np.bool_]:
    """Which limits of lanes are not more than twice what `vectors` accesses to a pixel need, or the
    least that there is."""
    least = lanes_c.min(initial=MAX_THREADS)
    result: NDArray[np.bool_] = (lanes_c < 2 * vectors) | (lanes_c == least)
    return result


def worth_loading_ahead(prefetch: Array, taps: int) -> NDArray[np.bool_]:
    """Which distances hide latency that the arithmetic of a window of `taps` does not hide."""
    result: NDArray[np.bool_] = (prefetch == 1) | (prefetch * taps <= 50)
    return result


#: The pointers that the kernels of a filter's gradient take, in their order.
WGRAD_OPERANDS = ("filter_grad", "bias_grad", "out_grad", "in", "zeroed", "scratch")
_SUM_COLUMNS = 32  # elements of a block of ``depthwise_wgrad_sum.cu``
_SUM_THREADS = 256


def reductions(splits: Iterable[int]) -> list[tuple[int, int]]:
    """Each count of blocks that share a channel with each way to add up their sums; one block alone
    has nothing to add."""
    return [(1, DIRECT), *itertools.product(splits, (TWO_KERNELS, ATOMIC))]


def with_sums(step: Step, problem: Problem, splits: int, reduction: int, c_tiles: int) -> Launch:
    """The launch whose `step` leaves the sums of `splits` blocks of each of `c_tiles` pieces of the
    channels, with what adds them up."""
    elements = problem.filter_elements + (problem.c if problem.bias else 0)
    if reduction == TWO_KERNELS:
        smem_bytes = 4 * _SUM_THREADS
        agreed = agreed_macros(threads=_SUM_THREADS, smem_bytes=smem_bytes, columns=_SUM_COLUMNS)
        total = Step(
            KernelSpec(
                file="depthwise_wgrad_sum.cu",
                entry="depthwise_wgrad_sum",
                defines=(dtype_macro(problem), *agreed),
            ),
            grid=(-(-elements // _SUM_COLUMNS), 1, 1),
            block=(_SUM_THREADS, 1, 1),
            smem_bytes=smem_bytes,
            operands=("filter_grad", "bias_grad", "scratch"),
            scalars={
                "filter_elements": problem.filter_elements,
                "elements": elements,
                "splits": splits,
            },
        )
        return Launch((step, total), scratch_bytes=4 * splits * elements)
    if reduction == ATOMIC:
        return Launch((step,), zeroed_bytes=4 * (elements + c_tiles))
    return Launch((step,))
