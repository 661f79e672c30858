"""Which layouts kernels of ours read, and when it pays to convert to them.

A tensor with its channels first (N, C, H, W as they are written) is copied into channels last, and
the output back, where our kernel and both copies together are predicted to take less than PyTorch's
operator on the tensor as it is. The model knows that operator's time on channels-last tensors only;
what it takes on the others is a multiple of that, of which the smallest that was seen is assumed
(``benchmarks/channels_first.py``).
"""

from __future__ import annotations

from torch import Tensor

from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.pytorch.ready import CHANNELS_LAST

#: Time of PyTorch's operator on channels-first tensors over that on channels-last ones: the tenth
#: percentile of the layers measured, depthwise and others.
CHANNELS_FIRST = {True: 0.58, False: 1.47}
#: Share of the device's bandwidth that PyTorch's copies between the layouts reach, and what one
#: takes at least, milliseconds.
COPY_SHARE, COPY_MS = 0.14, 0.004


def is_channels_last(x: Tensor) -> bool:
    """Whether `x` is dense with its channels last, beyond doubt: a tensor of one channel or one
    pixel is dense in either layout, and PyTorch takes it for one with its channels first."""
    return x.dim() == 4 and x.is_contiguous(memory_format=CHANNELS_LAST) and not x.is_contiguous()


def is_channels_first(x: Tensor) -> bool:
    """Whether `x` is dense with its channels first, beyond doubt."""
    return x.dim() == 4 and x.is_contiguous() and not x.is_contiguous(memory_format=CHANNELS_LAST)


def copies_ms(problem: Problem, device: Device) -> float:
    """Milliseconds that the copies of input and output between the layouts take."""
    moved = 2 * problem.itemsize * (problem.input_elements + problem.output_elements)
    return 2 * COPY_MS + 1e3 * moved / (COPY_SHARE * device.dram_bytes_per_s)


def channels_first_ms(problem: Problem, pytorch_ms: float) -> float:
    """The least that PyTorch's operator is expected to take on tensors with their channels first,
    milliseconds, where it takes `pytorch_ms` on the others."""
    return CHANNELS_FIRST[problem.group_width == 1] * pytorch_ms


def converting_pays(
    problem: Problem, ours_ms: float | None, pytorch_ms: float | None, device: Device
) -> bool:
    """Whether our kernel, after and before a copy, is expected to beat PyTorch's operator on a
    tensor with its channels first.

    Args:
        problem: of direction ``fprop``.
        ours_ms, pytorch_ms: predicted for channels-last tensors.
        device: where.
    """
    if ours_ms is None or pytorch_ms is None:
        return False
    return ours_ms + copies_ms(problem, device) < channels_first_ms(problem, pytorch_ms)
