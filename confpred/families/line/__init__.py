"""Shared parts of the families of depthwise 1-D convolution of contiguous rows: the limits of their
kernels, and the part of a row that a tile of outputs reads, as ``kernels/line.cuh`` has it.

They serve layers of group width 1 whose tensors are channels first, with up to 64 taps, any
padding and cut, and any of the dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from confpred.families.common import MAX_INT, ceil_div, macros
from confpred.families.protocol import Array, Mask
from confpred.problem.conv import ConvNd

MAX_TAPS = 64
MAX_STRIDE = 4
MAX_THREADS = 256  # of a block: what the kernels are compiled for
MAX_VECTORS = 160  # accesses from the first to the last input of a tile, most between its taps
ACCESS_BYTES = 16  # most that a thread can access at once
LEAST_LANES = 16  # the smallest limit of lanes in the config table


def handles(problem: ConvNd) -> bool:
    """Return whether `problem` is a depthwise layer that the kernels compute."""
    p = problem
    return (
        p.rank == 1
        and not p.is_channels_last
        and p.group_width == 1
        and p.s <= MAX_TAPS
        and p.stride[-1] in (1, 2, MAX_STRIDE)
        and max(p.n * p.k, p.k * p.s, p.w + p.padding[-1], p.q) <= MAX_INT // 8
    )


def axis(problem: ConvNd) -> tuple[int, int, int, int, int]:
    """Return ``up``, ``down`` and ``pad`` of the kernel (see ``line.cuh``), and the lengths of the
    rows that it reads and writes."""
    p = problem
    if p.direction != "dgrad":
        return 1, p.stride[-1], p.padding[-1], p.w, p.q
    return p.stride[-1], 1, spread(p) * (p.s - 1) - p.padding[-1], p.q, p.w


def spread(problem: ConvNd) -> int:
    """Return the layer's dilation, or 1 where it has one tap."""
    return problem.dilation[-1] if problem.s > 1 else 1


def windows(problem: ConvNd, tile: Array) -> dict[str, Array]:
    """Return how tiles of `tile` outputs read and write rows, by name.

    They are ``in_vec`` and ``out_vec``, elements of an access; ``phase`` and ``first``, where a
    tile's inputs begin; ``vectors``, accesses from the first to the last of these; and ``loads``,
    about how many of them some output reads.
    """
    up, down, pad, width, result = axis(problem)
    widest = ACCESS_BYTES // problem.itemsize
    in_vec = np.array([_divisor(widest, width, size * down // up) for size in tile.tolist()])
    out_vec = np.array([_divisor(widest, result, size) for size in tile.tolist()])
    phase = -pad % (up * in_vec)
    last = (down * (tile - 1) + spread(problem) * (problem.s - 1) + phase) // up
    vectors = last // in_vec + 1
    # A tap's outputs read one run, and those of neighbouring taps may meet.
    run = ceil_div(down * (tile - 1) // up + 1, in_vec) + 1
    return {
        "in_vec": in_vec,
        "out_vec": out_vec,
        "phase": phase,
        "first": (-pad - phase) // up,
        "vectors": vectors,
        "loads": np.minimum(vectors, problem.s * run),
    }


def _divisor(widest: int, *sizes: int) -> int:
    """Return the largest power of two up to `widest` that divides all of `sizes`."""
    return int(np.gcd.reduce((widest, *sizes)))


def tiles_fit(problem: ConvNd, tile: Array, vectors: Array) -> Mask:
    """Return which tiles the kernels can be compiled for, and are not twice as long as the rows."""
    up, _, _, _, result = axis(problem)
    fits: Mask = (tile % up == 0) & (vectors <= MAX_VECTORS) & ((tile < 2 * result) | (tile == 4))
    return fits


def window_macros(problem: ConvNd, t: Any) -> tuple[tuple[str, int], ...]:
    """Return the macros of ``line.cuh`` for the inputs `t` of one config."""
    up, down, *_ = axis(problem)
    defines: Any = macros(
        S=problem.s, UP=up, DOWN=down, DILATION=spread(problem), PHASE=int(t["phase"]),
        TILE=int(t["tile"]), IN_VEC=int(t["in_vec"]), OUT_VEC=int(t["out_vec"]),
    )  # fmt: skip
    return defines
