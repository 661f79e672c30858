"""One kernel for the epilogue of a convolution: bias, residual and activation.

Where a kernel cannot take the tensors, PyTorch's operators compute the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.epilogue import MOST_CHANNELS, MOST_ROWS, epilogue_kernel, epilogue_launch
from confpred.errors import ConfpredError, InvalidInput, UnknownDevice
from confpred.launch.runner import Enqueue, bound
from confpred.problem.activation import ACTIVATIONS, activated
from confpred.problem.operation import KernelSpec
from confpred.pytorch.run.choosing import cached
from confpred.pytorch.run.loading import (
    ALIGNMENT,
    DTYPES,
    alike,
    in_context,
    lies_channels_last,
)

log = logging.getLogger(__name__)


def activation_named(name: str | None) -> str:
    """Return the activation that a caller names; raise `InvalidInput` where there is none such."""
    if name is None:
        return "none"
    if name not in ACTIVATIONS:
        raise InvalidInput("activation", name, f"None or one of {', '.join(ACTIVATIONS)}")
    return name


def apply_epilogue(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> Tensor:
    """Compute ``activation(out + bias + residual)`` in place of `out`, shape (N, K, ...), to which
    nothing else refers. No gradient is recorded. Arithmetic is in float32, rounded once, where
    `can_apply` says so.
    """
    if bias is None and residual is None and activation == "none":
        return out
    if can_apply(out, bias, residual):
        fields: dict[str, Any] = {"residual": residual is not None, "activation": activation}
        kernel = epilogue_kernel(out.shape[1], DTYPES[out.dtype], bias=bias is not None, **fields)
        if _launch(kernel, out, bias=bias, residual=residual):
            return out
    with torch.no_grad():
        if bias is not None:
            out.add_(bias.view(-1, *(1,) * (out.dim() - 2)))
        if residual is not None:
            out.add_(residual)
        activated(activation, out, in_place=True)
    return out


def scale_shift(
    x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, activation: str, *,
    in_place: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``activation(x * scale + shift + residual)``, a scale and a shift a channel, in
    `x`'s dtype and layout. Arithmetic is in float32, rounded once; scale and shift are float32.

    Args:
        in_place: write to `x`, which nothing else refers to.
    """
    if can_apply(x, None, residual):
        kernel = scale_shift_kernel(
            x.shape[1], DTYPES[x.dtype], residual=residual is not None, activation=activation
        )
        out = x if in_place else torch.empty_like(x)
        if _launch(kernel, out, x=x, scale=scale, shift=shift, residual=residual):
            return out
    with torch.no_grad():
        sides = (1,) * (x.dim() - 2)
        wide = x.float() * scale.view(-1, *sides) + shift.view(-1, *sides)
        if residual is not None:
            wide = wide + residual.float()
        return activated(activation, wide).to(x.dtype)


def can_apply(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Return whether a kernel can take these tensors: of one CUDA device and dtype, aligned, not
    empty nor too large; `out` and `residual` dense, channels last and of one shape."""
    if out.dtype not in DTYPES or not alike(out, bias, residual):
        return False
    images = [out] if residual is None else [out, residual]
    if not all(map(lies_channels_last, images)):
        return False
    channels = out.shape[1]
    if bias is not None and (
        bias.shape != (channels,) or not bias.is_contiguous() or bias.is_neg()
    ):
        return False
    return (
        0 < out.numel() <= MOST_ROWS * channels
        and channels <= MOST_CHANNELS
        and all(t.shape == out.shape for t in images)
        and not any(t.data_ptr() % ALIGNMENT or t.is_neg() for t in images)
    )


def scale_shift_kernel(channels: int, dtype: str, *, residual: bool, activation: str) -> KernelSpec:
    """Return the kernel of ``kernels/scale_shift.cu`` for tensors of so many `channels`."""
    like = epilogue_kernel(channels, dtype, bias=False, residual=residual, activation=activation)
    defines = tuple(pair for pair in like.defines if pair[0] != "HAS_BIAS")
    return KernelSpec("scale_shift.cu", "scale_shift", defines)


def _launch(kernel: KernelSpec, out: Tensor, **inputs: Tensor | None) -> bool:
    """Launch `kernel` on the current stream; return False where it cannot be loaded."""
    ordinal, channels, rows = out.get_device(), out.shape[1], out.numel() // out.shape[1]

    def bind() -> Enqueue | None:
        try:
            names, sm_count = ("out", *inputs), driver.device_of(ordinal).sm_count
            launch = epilogue_launch(kernel, rows, channels, sm_count, names)
            return bound(launch, names, ordinal)
        except ConfpredError as error:  # such as a compiler that is not installed: worth a look
            level = logging.DEBUG if isinstance(error, UnknownDevice) else logging.WARNING
            log.log(level, "falling back to PyTorch for %s: %s", kernel.entry, error)
        return None

    with torch.cuda.device(ordinal):
        enqueue = cached(("pointwise", kernel, rows, channels, ordinal), bind)
        if enqueue is None:
            return False
        addresses = [0 if t is None else t.data_ptr() for t in (out, *inputs.values())]
        in_context(ordinal, enqueue, addresses)
    return True
