"""What the hot path asks CUDA's runtime, by PyTorch's own functions below its Python ones.

`torch.cuda.current_device`, `torch.cuda.current_stream` and `torch.empty_strided` come to these;
PyTorch's compiler calls them too. They make no objects on the way, which is several microseconds a
call. On a PyTorch without CUDA they are never called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Sizes = tuple[int, ...]
_C: Any = torch._C


def _absent(*_: Any) -> Any:
    return False


_built = torch.backends.cuda.is_built()
current_device = _C._cuda_getDevice if _built else _absent
current_stream = _C._cuda_getCurrentRawStream if _built else _absent
is_capturing = _C._cuda_isCurrentStreamCapturing if _built else _absent


def _plain_empty(size: Sizes, stride: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


#: An uninitialised tensor of a size, strides and dtype on the current CUDA device.
empty: Callable[[Sizes, Sizes, torch.dtype], Tensor]
empty = getattr(_C._dynamo.guards, "_empty_strided_cuda", _plain_empty)
