"""Which layouts kernels of ours read, and what it takes to convert the others."""

from __future__ import annotations

from torch import Tensor

from confpred.pytorch.ready import CHANNELS_LAST


def is_channels_last(x: Tensor) -> bool:
    """Whether `x` is dense with its channels last, beyond doubt: a tensor of one channel or one
    pixel is dense in either layout, and PyTorch takes it for one with its channels first."""
    return x.dim() == 4 and x.is_contiguous(memory_format=CHANNELS_LAST) and not x.is_contiguous()
