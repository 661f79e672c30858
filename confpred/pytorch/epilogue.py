"""Bias, residual and activation in one pass over the output of PyTorch's own convolution.

PyTorch would make a pass over memory for each of them. Where the one kernel cannot serve, its
operators do the same in place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.epilogue import MOST_CHANNELS, MOST_ROWS, epilogue_kernel, epilogue_launch
from confpred.cuda.launch import BoundLaunch
from confpred.errors import ConfpredError, UnknownDevice
from confpred.pytorch.kernels import loaded
from confpred.pytorch.ready import ALIGNMENT, CHANNELS_LAST, DTYPES
from confpred.pytorch.streams import current_device, current_stream

log = logging.getLogger(__name__)

_MOST_KEPT = 65_536
_NAMES = ("out", "bias", "residual")
_bound: dict[Any, BoundLaunch | None] = {}  # None: by PyTorch's operators


def apply_epilogue(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> Tensor:
    """``activation(out + bias + residual)`` in place of `out`, on the current stream.

    No gradient is recorded. Where `can_apply` says so, the arithmetic is in float32 and rounded
    once; nothing is allocated, and nothing is launched where there is nothing to do.

    Args:
        out: shape (N, K, P, Q), which nothing else refers to.
        bias: shape (K,), or None.
        residual: of `out`'s shape, or None.
        activation: one of `confpred.problem.conv2d.ACTIVATIONS`.

    Returns:
        `out`.
    """
    if bias is None and residual is None and activation == "none":
        return out
    if not can_apply(out, bias, residual, activation):
        return _by_pytorch(out, bias, residual, activation)
    device = out.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            return apply_epilogue(out, bias, residual, activation)
    bound = _bound_for(out, bias, residual, activation)
    if bound is None:
        return _by_pytorch(out, bias, residual, activation)
    addresses = [
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
    ]
    bound.enqueue(current_stream(device), addresses)
    return out


def epilogue_of(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor] | None:
    """`apply_epilogue` for tensors that are like these in all but their values and addresses; None
    where PyTorch's operators serve, or nothing is to be done."""
    nothing = bias is None and residual is None and activation == "none"
    if nothing or not can_apply(out, bias, residual, activation):
        return None
    ordinal = out.get_device()
    bound = _bound_for(out, bias, residual, activation)
    if bound is None:
        return None
    enqueue = bound.enqueue

    def finish(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        at_residual = 0 if residual is None else residual.data_ptr()
        if at_residual % ALIGNMENT or current_device() != ordinal:
            return apply_epilogue(out, bias, residual, activation)
        at_bias = 0 if bias is None else bias.data_ptr()
        enqueue(current_stream(ordinal), (out.data_ptr(), at_bias, at_residual))
        return out

    return finish


def can_apply(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str = "none"
) -> bool:
    """Whether the kernel can take these tensors: plain ones of one CUDA device and one dtype of
    float16, bfloat16 and float32; `out` and `residual` channels last, dense, of one shape and
    aligned to 16 bytes, neither empty nor of more than ``MOST_CHANNELS`` channels or ``MOST_ROWS``
    pixels; `bias` dense. What holds for the activation is that it is known, so all of them pass."""
    if not (
        out.is_cuda
        and out.dtype in DTYPES
        and out.dim() == 4
        and out.is_contiguous(memory_format=CHANNELS_LAST)
        and out.data_ptr() % ALIGNMENT == 0
    ):
        return False
    shape = out.shape
    channels, elements = shape[1], out.numel()
    if not 0 < elements <= MOST_ROWS * channels or channels > MOST_CHANNELS:
        return False
    if bias is not None and not (
        bias.dtype is out.dtype
        and bias.get_device() == out.get_device()
        and bias.is_contiguous()
        and bias.shape == (channels,)
    ):
        return False
    return residual is None or (
        residual.dtype is out.dtype
        and residual.get_device() == out.get_device()
        and residual.shape == shape
        and residual.is_contiguous(memory_format=CHANNELS_LAST)
        and residual.data_ptr() % ALIGNMENT == 0
    )


def _bound_for(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> BoundLaunch | None:
    """The launch for tensors that `can_apply` takes; None for PyTorch's operators."""
    key = (
        out.numel(),
        out.shape[1],
        out.dtype,
        bias is not None,
        residual is not None,
        activation,
        out.get_device(),
    )
    try:
        return _bound[key]
    except KeyError:
        return _bind(*key)


def _bind(
    elements: int,
    channels: int,
    dtype: torch.dtype,
    bias: bool,
    residual: bool,
    activation: str,
    ordinal: int,
) -> BoundLaunch | None:
    """The launch for a tensor that is new to this process, kept for the next one; None for
    PyTorch's operators."""
    bound = None
    try:
        kernel = epilogue_kernel(
            channels, DTYPES[dtype], bias=bias, residual=residual, activation=activation
        )
        sm_count = driver.device_of(ordinal).sm_count
        launch = epilogue_launch(kernel, elements // channels, channels, sm_count)
        bound = BoundLaunch([loaded(kernel, 0, ordinal)], launch, _NAMES)
    except UnknownDevice as error:
        log.debug("PyTorch's own operators: %s", error)
    except ConfpredError as error:  # such as a compiler that is not installed: worth a look
        log.warning("PyTorch's own operators: %s", error)
    if len(_bound) < _MOST_KEPT:
        _bound[elements, channels, dtype, bias, residual, activation, ordinal] = bound
    return bound


def _by_pytorch(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> Tensor:
    with torch.no_grad():
        if bias is not None:
            out.add_(bias.view(-1, *(1,) * (out.dim() - 2)))
        if residual is not None:
            out.add_(residual)
        if activation != "none":
            getattr(torch.ops.aten, f"{activation}_")(out)  # confpred's names are PyTorch's
    return out


os.register_at_fork(after_in_child=_bound.clear)
