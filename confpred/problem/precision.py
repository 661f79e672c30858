"""PyTorch's switches for the precision of products and convolutions, which hold for the whole
process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LESS_EXACT = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",  # since PyTorch 2.7
)


def allows_tf32() -> bool:
    """Return whether PyTorch's products may round float32 inputs to TF32."""
    matmul = _matmul()
    precision = getattr(matmul, "fp32_precision", None)  # since PyTorch 2.9
    allowed: bool = matmul.allow_tf32 if precision is None else precision == "tf32"
    return allowed


def convolutions_allow_tf32() -> bool:
    """Return whether PyTorch's convolutions may round float32 inputs to TF32."""
    import torch

    # Since PyTorch 2.9 there is a switch for each kind of operator, and where they differ the
    # former one for all of cuDNN can no longer be read.
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:
        return torch._C._get_cudnn_allow_tf32()
    return bool(precision("cuda", "conv") == "tf32")


@contextmanager
def matmul_tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in PyTorch's products, within the ``with`` block."""
    before, matmul = allows_tf32(), _matmul()
    if before == allowed:
        yield
        return
    precision = getattr(matmul, "fp32_precision", None)
    matmul.allow_tf32 = allowed  # sets the newer switch too
    try:
        yield
    finally:
        matmul.allow_tf32 = before
        if precision is not None:
            matmul.fp32_precision = precision


@contextmanager
def float32_sums() -> Iterator[None]:
    """Have products in half precision sum in float32, within the ``with`` block. By default cuBLAS
    may add up the parts of a long sum in half precision, with one more rounding each."""
    matmul = _matmul()
    lax = [name for name in _LESS_EXACT if getattr(matmul, name, False)]
    for name in lax:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name in lax:
            setattr(matmul, name, True)


def _matmul() -> Any:
    import torch

    return torch.backends.cuda.matmul
