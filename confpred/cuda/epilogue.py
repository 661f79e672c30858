"""The launch of ``kernels/epilogue.cu``, which follows a convolution of another library."""

from __future__ import annotations

from math import gcd

from confpred.families.common import MAX_INT, agreed_macros
from confpred.problem.operation import KernelSpec, Launch, Step

#: Most output channels of a tensor. A step of the grid is a multiple of them, and fits in 31 bits.
MOST_CHANNELS = 65_536
#: Most images times pixels of a tensor; its elements are counted in 64 bits.
MOST_ROWS = MAX_INT
_THREADS, _BLOCKS_PER_SM = 256, 4
_IN_FLIGHT = 4  # loads that a thread has under way
_BYTES = 16  # of a load, where the channels can be cut into such


def epilogue_kernel(
    channels: int, dtype: str, *, bias: bool, residual: bool, activation: str
) -> KernelSpec:
    """The kernel for tensors of so many `channels` and this `dtype` (``float16``, ``bfloat16`` or
    ``float32``): one of two for all numbers of channels."""
    elements = _BYTES // (4 if dtype == "float32" else 2)
    return KernelSpec(
        "epilogue.cu",
        "epilogue",
        (
            ("DTYPE", f"DTYPE_{dtype.upper()}"),
            ("ACTIVATION", f"ACTIVATION_{activation.upper()}"),
            ("HAS_BIAS", int(bias)),
            ("HAS_RESIDUAL", int(residual)),
            ("VECTOR", 1 if channels % elements else elements),
            ("IN_FLIGHT", _IN_FLIGHT),
            *agreed_macros(threads=_THREADS, blocks_per_sm=_BLOCKS_PER_SM),
        ),
    )


def epilogue_launch(kernel: KernelSpec, rows: int, channels: int, sm_count: int) -> Launch:
    """`kernel` on a tensor of ``rows * channels`` elements, the operand ``out``, on a device of
    `sm_count` multiprocessors; ``bias`` and ``residual`` are the other operands.

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
        operands=("out", "bias", "residual"),
        scalars={"rows": rows, "channels": channels},
    )
    return Launch((step,))
