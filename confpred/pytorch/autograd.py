"""Eager convolution, with gradients or without: what serves calls of one kind.

With gradients it is a `torch.autograd.Function`, which costs the host about as much as PyTorch's
own node of the graph (``benchmarks/host_mechanisms.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confpred.pytorch import policy
from confpred.pytorch.casts import low_precision
from confpred.pytorch.choosing import remember, served
from confpred.pytorch.directions import find_converting
from confpred.pytorch.gradients import Grads, Layer, Mask, find_layer
from confpred.pytorch.layers import Geometry
from confpred.pytorch.ready import CHANNELS_LAST, DTYPES, dense, densely, is_dense
from confpred.pytorch.streams import is_capturing

_has_storage = torch._C._has_storage  # a tensor of a `vmap` has none


class _Convolution(torch.autograd.Function):
    """A layer that has a `Layer`; the weights are cast here, where no graph has to be told."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = layer.dtype
        low = weight if weight.dtype is dtype else low_precision(weight, dtype)
        if bias is not None and bias.dtype is not dtype:
            bias = low_precision(bias, dtype)
        ctx.save_for_backward(x, low)
        ctx.kept = (layer, weight)
        return layer.forward(x, low, bias)

    @staticmethod
    def backward(ctx: Any, *out_grads: Tensor) -> Any:
        (out_grad,) = out_grads
        layer, weight = ctx.kept
        x, low = ctx.saved_tensors
        mask: Mask = ctx.needs_input_grad[1:]
        # The engine casts each gradient to the dtype of the tensor that it is the gradient of.
        if not torch.is_grad_enabled() and _has_storage(out_grad):
            return (None, *layer.backward(out_grad, x, low, mask))
        # Gradients of gradients, or many gradients in one batch: PyTorch has formulas for them.
        arguments = layer.shape.arguments()
        channels = [out_grad.shape[1]] if mask[2] else None
        grads: Grads = torch.ops.aten.convolution_backward(
            out_grad, x, weight.to(out_grad.dtype), channels, *arguments, list(mask)
        )
        return (None, *grads)


@dataclass(frozen=True, slots=True)
class InGraphs:
    """What serves a layer that is ours in CUDA graphs alone: `ours` there, else `theirs`."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return (self.ours if is_capturing() else self.theirs)(x, weight, bias)


# `torch.autograd.Function.apply` without what it does for `torch.func`, whose transforms never come
# here.
_apply: Any = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Convolution)


def find_convolution(
    key: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    original: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    *,
    dtype: torch.dtype,
    mask: Mask,
    transposed: bool = False,
    output_padding: tuple[int, int] = (0, 0),
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """What serves eager calls with tensors like these, remembered under `key`; None for PyTorch's
    own function.

    Args:
        key: all that decides what serves a call.
        x: shape (N, C, H, W), a plain tensor.
        weight: shape (K, C / groups, R, S); of a transposed convolution (C, K / groups, R, S).
        bias: one number an output channel, or None.
        geometry: stride, padding, dilation, groups.
        original: PyTorch's function with the geometry of the call.
        dtype: of the computation: `x`'s, or that of autocast.
        mask: of which of the tensors a gradient will be asked for.
        transposed, output_padding: of a transposed convolution.
    """
    casts = torch.is_autocast_enabled("cuda")
    taken = DTYPES if casts else (dtype,)  # autocast leaves float64 and integers as they are
    if any(t is not None and t.dtype not in taken for t in (x, weight, bias)):
        return remember(key, None)  # PyTorch says what is wrong
    low = x if x.dtype is dtype else x.detach().to(dtype)
    found: Any = find_layer(
        low.detach(), weight, bias, dtype, geometry, mask, transposed, output_padding
    )
    if found is None and not any(mask) and not transposed:
        found = find_converting(low, weight, bias, geometry)
    if isinstance(found, policy.Pending):
        again = partial(
            find_convolution, key, geometry=geometry, original=original, dtype=dtype, mask=mask,
            transposed=transposed, output_padding=output_padding,
        )  # fmt: skip
        return remember(key, found.until_then(original, again))
    if not isinstance(found, Layer):
        return remember(key, found)  # type: ignore[no-any-return]
    layer = found
    if any(mask):
        repack = weight.dtype is dtype and not is_dense(weight)
        repack_bias = bias is not None and not is_dense(bias)
        as_they_are = low is x and not repack and not repack_bias

        def differentiate(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            if x.dtype is not dtype:
                x = x.to(dtype)
            if repack:
                weight = weight.contiguous(memory_format=CHANNELS_LAST)
            if repack_bias and bias is not None:
                bias = bias.contiguous()
            return _apply(layer, x, weight, bias)

        as_ever = partial(_apply, layer) if as_they_are else differentiate
        return remember(key, as_ever if layer.pays else InGraphs(differentiate, original))
    if low is x and weight.dtype is dtype and layer.out is not None and not transposed:
        plain = densely(layer.out, (x, weight, bias))
        return remember(key, plain if layer.pays else InGraphs(plain, original))

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x if x.dtype is dtype else x.to(dtype)
        weight = dense(weight) if weight.dtype is dtype else low_precision(weight, dtype)
        if bias is not None:
            bias = dense(bias) if bias.dtype is dtype else low_precision(bias, dtype)
        return layer.forward(x, weight, bias)

    return remember(key, compute if layer.pays else InGraphs(compute, original))


def find_eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    original: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    *,
    transposed: bool = False,
    output_padding: tuple[int, int] = (0, 0),
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """What serves an eager call under the autocast and gradient modes of the moment; see
    `find_convolution`, which is asked once for each kind of call."""
    dtype, casts = x.dtype, torch.is_autocast_enabled("cuda")
    if casts and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype("cuda")
    mask: Mask = (False, False, False)
    if torch.is_grad_enabled():
        mask = (x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    key = (
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        x.dtype,
        weight.dtype,
        dtype,
        casts,
        x.get_device(),
        weight.get_device(),
        bias if bias is None else (bias.dtype, bias.get_device(), bias.shape, bias.stride()),
        mask,
        transposed,
        output_padding,
        geometry,
    )
    try:
        return served[key]  # type: ignore[no-any-return]
    except KeyError:
        return find_convolution(
            key, x, weight, bias, geometry, original, dtype=dtype, mask=mask,
            transposed=transposed, output_padding=output_padding,
        )  # fmt: skip
