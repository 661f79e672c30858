"""The launch of ``kernels/epilogue.cu``, which follows a convolution of another library.

PyTorch's own operator computes a convolution and its bias. This kernel computes the remaining
steps of the problem, in one pass over the output. PyTorch's time for such a problem is the sum of
both.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from confpred.families.common import MAX_INT, agreed_macros
from confpred.families.kernel_text import identity_of
from confpred.problem.activation import activation_macro
from confpred.problem.conv2d import Problem
from confpred.problem.operation import KernelSpec, Launch, Step
from confpred.problem.record import ITEMSIZES, Record

FILE = "epilogue.cu"
#: Most output channels of a tensor. A step of the grid is a multiple of them, and fits in 31 bits.
MOST_CHANNELS = 65_536
#: Most images times pixels of a tensor; its elements are counted in 64 bits.
MOST_ROWS = MAX_INT
_THREADS, _BLOCKS_PER_SM = 256, 4
_IN_FLIGHT = 4  # loads that a thread has under way
_BYTES = 16  # of a load, where the channels can be cut into such


def left_to_pytorch(problem: Problem) -> Problem:
    """Return the part of `problem` that PyTorch's operator computes: the convolution alone, if more
    than a bias follows it."""
    if not problem.has_epilogue:
        return problem
    return replace(problem, bias=False, activation="none", residual=False)


def epilogue_source(problem: Record) -> str:
    """Return the identity of the kernel that follows PyTorch's operator; empty if none does."""
    follows = isinstance(problem, Problem) and problem.has_epilogue
    return identity_of(FILE) if follows else ""


def epilogue_kernel(
    channels: int, dtype: str, *, bias: bool, residual: bool, activation: str
) -> KernelSpec:
    """Return the kernel for tensors of so many `channels` and this `dtype`; one of two kernels
    serves all numbers of channels."""
    elements = _BYTES // ITEMSIZES[dtype]
    return KernelSpec(
        FILE,
        "epilogue",
        (
            ("DTYPE", f"DTYPE_{dtype.upper()}"),
            activation_macro(activation),
            ("HAS_BIAS", int(bias)),
            ("HAS_RESIDUAL", int(residual)),
            ("VECTOR", 1 if channels % elements else elements),
            ("IN_FLIGHT", _IN_FLIGHT),
            *agreed_macros(threads=_THREADS, blocks_per_sm=_BLOCKS_PER_SM),
        ),
    )


def epilogue_of(problem: Problem, sm_count: int) -> Launch:
    """Return the pass over the output of `problem` for all that follows the convolution."""
    p = problem
    kernel = epilogue_kernel(
        p.k, p.dtype, bias=p.bias, residual=p.residual, activation=p.activation
    )
    return epilogue_launch(kernel, p.n * p.p * p.q, p.k, sm_count)


def epilogue_launch(
    kernel: KernelSpec,
    rows: int,
    channels: int,
    sm_count: int,
    operands: tuple[str, ...] = ("out", "bias", "residual"),
) -> Launch:
    """Return the launch of `kernel` on a tensor of ``rows * channels`` elements, the operand
    ``out``, on a device of `sm_count` multiprocessors; `operands` are named in the kernel's order.

    The grid is as large as the device holds at once, or smaller where the tensor is, and its
    threads are a multiple of the accesses of a row, which the kernel counts on.
    """
    columns = channels // int(dict(kernel.defines)["VECTOR"])
    whole = columns // gcd(columns, _THREADS)  # the fewest blocks whose threads make whole rows
    most = max(1, sm_count * _BLOCKS_PER_SM // whole)
    needed = -(-rows * columns // (_THREADS * whole))
    step = Step(
        kernel,
        grid=(whole * min(most, needed), 1, 1),
        block=(_THREADS, 1, 1),
        smem_bytes=0,
        operands=operands,
        scalars={"rows": rows, "channels": channels},
    )
    return Launch((step,))
