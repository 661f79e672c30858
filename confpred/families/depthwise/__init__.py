"""Shared parts of the depthwise families: the limits of their kernels, the shape of a block, and
how blocks add up the filter's gradient.

They serve layers of group width 1 with filters up to 11x11, stride and dilation 1 or 2 along each
axis, any padding, and any of the dtypes; ``depthwise_large.py`` serves larger filters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from confpred.families.common import (
    ATOMIC,
    DIRECT,
    MAX_INT,
    TWO_KERNELS,
    ceil_div,
    kernel_step,
    sum_step,
)
from confpred.families.protocol import Array, Columns, Mask
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.operation import SCRATCH, Launch, Step

MAX_WINDOW = 11
MAX_STEP = 2  # the largest stride and dilation
#: Most elements of an image: kernels address within it by 32-bit offsets, and this leaves room for
#: the rows of padding that they count beyond it.
MAX_IMAGE = 2**30
MAX_COLUMNS = 32  # input columns of a tile: the kernels keep their validity in one word
LEAST_LANES = 8  # the smallest limit of lanes in the config tables
MAX_THREADS = 256  # of a block: what the kernels are compiled for


@dataclass(frozen=True, slots=True)
class DepthwiseAxis:
    """One dimension of an image or volume as ``depthwise.cu`` and ``volume.cu`` see it: input ``i``
    meets output ``o`` at tap ``r`` where ``up * (i + origin) = down * (o + shift) + dilation *
    r``."""

    size_in: int
    size_out: int
    window: int
    up: int
    down: int
    dilation: int
    origin: int
    shift: int

    @classmethod
    def of(
        cls, direction: str, size: int, result: int, window: int, stride: int, pad: int,
        dilation: int,
    ) -> DepthwiseAxis:  # fmt: skip
        """Return the axis of a layer, with `size` positions of input and `result` of output."""
        if direction == "fprop":
            return cls(size, result, window, 1, stride, dilation, pad, 0)
        # The filter is reversed, so what was a distance to the left is one to the right.
        pad = dilation * (window - 1) - pad
        shift = -pad % stride
        return cls(result, size, window, stride, 1, dilation, (pad + shift) // stride, shift)

    @property
    def groups(self) -> int:
        """Groups of `up` outputs."""
        count: int = self.pieces(self.up)
        return count

    def reach(self, tile: Array) -> Array:
        """Return how many inputs a tile of so many outputs reads."""
        last: Array = self.down * (tile - 1) + self.dilation * (self.window - 1)
        return last // self.up + 1

    def pieces(self, tile: Any) -> Any:
        """Return how many tiles cover the outputs."""
        return ceil_div(self.size_out + self.shift, tile)


def handles(problem: Problem) -> bool:
    """Return whether `problem` is a depthwise layer that the kernels compute."""
    return (
        problem.group_width == 1
        and max(problem.r, problem.s) <= MAX_WINDOW
        and max(*problem.stride, *problem.dilation) <= MAX_STEP
        and max(problem.c * problem.h * problem.w, problem.k * problem.p * problem.q) <= MAX_IMAGE
    )


def dilation(problem: Problem) -> tuple[int, int]:
    """Return the layer's dilation, or 1 along an axis in which the filter has one tap, so that
    there are fewer distinct kernels."""
    vertical, horizontal = problem.dilation
    return vertical if problem.r > 1 else 1, horizontal if problem.s > 1 else 1


def _access(problem: Problem) -> tuple[int, bool]:
    """Return the multiplier, and whether narrow accesses are worth it."""
    multiplier = problem.k // problem.c
    odd = problem.k % 2 == 1 or (multiplier > 1 and multiplier % 2 == 1)
    return multiplier, odd or problem.r * problem.s > 64


def accessible(vec: Array, problem: Any) -> Mask:
    """Return which vector widths can be accessed at once and are worth it. Fewer than 4 bytes are
    only for an odd count of channels, which leaves nothing else, and for large filters, which leave
    no registers for more. The output channels of a vector share one input channel, or fall into
    whole groups that each share one."""
    multiplier, narrow = problem.map(_access)
    fits: Mask = (
        (vec * problem.itemsize <= 16)
        & (problem.k % vec == 0)
        & ((vec % multiplier == 0) | (multiplier % vec == 0))
        & ((vec * problem.itemsize >= 4) | narrow)
    )
    return fits


def share_lanes(
    w: Any, vectors: Array, lanes_c: Array, threads: Array, groups: Array | int = 1
) -> None:
    """Add to the workings `w` how threads cover channels: `vectors` accesses to a pixel, at most
    `lanes_c` of them by one block of about `threads`, each by `groups` threads.

    They are ``c_tiles``, blocks that share the channels; ``lanes``, neighbouring threads of a block
    that run along the channels, shared out as evenly as possible; ``tiles_at_once``, tiles that the
    threads of a block work on side by side; and ``block_threads``, in whole warps.
    """
    vectors = np.maximum(vectors, 1)  # a width that is not legal may come to none
    w.c_tiles = ceil_div(vectors, lanes_c)
    w.lanes = ceil_div(vectors, w.c_tiles)
    w.tiles_at_once = np.maximum(threads // (w.lanes * groups), 1)
    w.block_threads = ceil_div(w.lanes * groups * w.tiles_at_once, 32) * 32


def lane_scalars(w: Any) -> dict[str, int]:
    """Return the kernels' scalars for `share_lanes`."""
    return {"c_tiles": w.c_tiles, "lanes_c": w.lanes, "tiles_at_once": w.tiles_at_once}


def worth_sharing(t: Columns, w: Any, device: Device) -> Mask:
    """Return which counts of blocks that share a channel's sums are worth it, by `share_lanes`:
    enough for half of the device, and no more than sixteen to a multiprocessor, as far as there are
    tiles for their threads; and the kernels can count them."""
    splits = t["splits"]
    worth: Mask = (
        (np.maximum(w.blocks, w.tiles + splits * t["threads"]) <= MAX_INT)
        & (
            (splits == 1)
            | ((splits * w.tiles_at_once < 2 * w.tiles) & (w.blocks <= 16 * device.sm_count))
        )
        & ((2 * w.blocks >= device.sm_count) | (2 * splits * w.tiles_at_once >= w.tiles))
    )
    return worth


def distinct_lanes(vectors: Array, lanes_c: Array) -> Mask:
    """Return which limits of lanes are less than twice the `vectors` accesses that a pixel takes,
    or are the smallest limit."""
    return (lanes_c < 2 * vectors) | (lanes_c == LEAST_LANES)


def worth_loading_ahead(prefetch: Array, taps: int) -> Mask:
    """Return which distances of loading ahead hide latency that the arithmetic of a filter of
    `taps` does not hide already."""
    return (prefetch == 1) | (prefetch * taps <= 50)


#: The pointers that the kernels take, in their order.
FPROP_OPERANDS = ("out", "in", "filter", "bias", "residual")
DGRAD_OPERANDS = ("in_grad", "out_grad", "filter", "bias", "residual")
WGRAD_OPERANDS = ("filter_grad", "bias_grad", "out_grad", "in", "zeroed", "scratch")
_SUM_COLUMNS = 32  # elements that a block of ``depthwise_wgrad_sum.cu`` adds up


def reductions(splits: Iterable[int]) -> list[tuple[int, int]]:
    """Return each count of blocks that share a channel with each way to add up their sums. One
    block alone has nothing to add."""
    return [(1, DIRECT), *itertools.product(splits, (TWO_KERNELS, ATOMIC))]


def wgrad_launch(
    name: str,
    problem: ConvNd,
    defines: tuple[tuple[str, Any], ...],
    threads: int,
    t: Mapping[str, int],
    scalars: Mapping[str, int],
) -> Launch:
    """Return the launch of the kernel `name`, whose blocks of `threads` share sums among the
    ``splits`` of the layout `t`, which has ``blocks`` and ``smem_bytes``, too."""
    operands = ("filter_grad", "bias_grad", "out_grad", "in", SCRATCH)
    step = kernel_step(name, operands, defines, t["blocks"], threads, t["smem_bytes"], scalars)
    splits = t["splits"]
    return with_sums(step, problem, splits, TWO_KERNELS if splits > 1 else DIRECT)


def with_sums(
    step: Step, problem: Problem | ConvNd, splits: int, reduction: int, c_tiles: int = 0
) -> Launch:
    """Return the launch of `step` and of the kernel that adds up its sums, those of `splits` blocks
    for each of `c_tiles` tiles of the channels."""
    elements = problem.filter_elements + (problem.k if problem.bias else 0)
    if reduction == TWO_KERNELS:
        sizes = {"filter_elements": problem.filter_elements, "elements": elements, "splits": splits}
        add = sum_step("depthwise_wgrad_sum", problem, elements, _SUM_COLUMNS, 4, sizes)
        return Launch((step, add), scratch_bytes=4 * splits * elements)
    return Launch((step,), zeroed_bytes=4 * (elements + c_tiles) if reduction == ATOMIC else 0)
