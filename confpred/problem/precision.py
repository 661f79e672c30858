"""PyTorch's switch for TF32 in products of matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def allows_tf32() -> bool:
    """Whether PyTorch's products may round float32 inputs to TF32."""
    matmul = _matmul()
    precision = getattr(matmul, "fp32_precision", None)  # since PyTorch 2.9
    allowed: bool = matmul.allow_tf32 if precision is None else precision == "tf32"
    return allowed


@contextmanager
def matmul_tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid it in the block; the switch is the whole process's."""
    before = allows_tf32()
    if before == allowed:
        yield
        return
    matmul = _matmul()
    precision = getattr(matmul, "fp32_precision", None)
    matmul.allow_tf32 = allowed  # sets the newer switch too
    try:
        yield
    finally:
        matmul.allow_tf32 = before
        if precision is not None:
            matmul.fp32_precision = precision


def _matmul() -> Any:
    import torch

    return torch.backends.cuda.matmul
