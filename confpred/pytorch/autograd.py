"""Convolution with gradients: in eager mode, and as `torch.compile` sees it.

Eager mode takes a `torch.autograd.Function`, which costs the host no more than PyTorch's own node
of the graph. A compiled program takes operators of the dispatcher, `torch.ops.confpred.conv2d` and
its backward, registered without the wrapping of `torch.library.custom_op`, which costs more than a
launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confpred.errors import InvalidInput
from confpred.pytorch import policy
from confpred.pytorch.casts import low_precision
from confpred.pytorch.choosing import remember, served
from confpred.pytorch.directions import find_converting, forward
from confpred.pytorch.gradients import Grads, Layer, Mask, backward, find_layer
from confpred.pytorch.layers import Geometry
from confpred.pytorch.ready import CHANNELS_LAST, DTYPES, dense, densely, is_dense
from confpred.pytorch.streams import is_capturing

_has_storage = torch._C._has_storage  # a tensor of a `vmap` has none


class _Convolution(torch.autograd.Function):
    """A layer that has a `Layer`; the weights are cast here, where no graph has to be told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        dtype = layer.dtype
        low = weight if weight.dtype is dtype else low_precision(weight, dtype)
        if bias is not None and bias.dtype is not dtype:
            bias = low_precision(bias, dtype)
        ctx.save_for_backward(x, low)
        ctx.layer, ctx.weight = layer, weight
        return layer.forward(x, low, bias)

    @staticmethod
    def backward(ctx: Any, *out_grads: Tensor) -> Any:
        (out_grad,) = out_grads
        x, low = ctx.saved_tensors
        mask: Mask = ctx.needs_input_grad[:3]
        # The engine casts each gradient to the dtype of the tensor that it is the gradient of.
        if not torch.is_grad_enabled() and _has_storage(out_grad):
            return (*ctx.layer.backward(out_grad, x, low, mask), None)
        # Gradients of gradients, or many gradients in one batch: PyTorch has formulas for them.
        arguments = ctx.layer.shape.arguments()
        channels = [out_grad.shape[1]] if mask[2] else None
        grads: Grads = torch.ops.aten.convolution_backward(
            out_grad, x, ctx.weight.to(out_grad.dtype), channels, *arguments, list(mask)
        )
        return (*grads, None)


# `torch.autograd.Function.apply` without what it does for `torch.func`, whose transforms never come
# here.
_apply: Any = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Convolution)
#: What a layer in training costs the host more than PyTorch's own node of the graph, which is
#: C++ (``benchmarks/host_overhead.py``). A layer that saves the GPU less than that is left to
#: PyTorch in eager mode, as the host may be what a step waits for; a CUDA graph has no such cost.
_HOST_MS = 0.06


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
        return remember(key, None)  # type: ignore[no-any-return]  # PyTorch says what is wrong
    low = x if x.dtype is dtype else x.detach().to(dtype)
    found = find_layer(
        low.detach(), weight, bias, dtype, geometry, mask, transposed, output_padding
    )
    if isinstance(found, policy.Compiling):
        again = partial(
            find_convolution, key, geometry=geometry, original=original, dtype=dtype, mask=mask,
            transposed=transposed, output_padding=output_padding,
        )  # fmt: skip
        return remember(key, found.until_then(original, again))  # type: ignore[no-any-return]
    if found is None:
        converting = (
            None if any(mask) or transposed else find_converting(low, weight, bias, geometry)
        )
        return remember(key, converting)  # type: ignore[no-any-return]
    layer = found
    if any(mask):
        repack = weight.dtype is dtype and not is_dense(weight)

        def differentiate(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            if x.dtype is not dtype:
                x = x.to(dtype)
            if repack:
                weight = weight.contiguous(memory_format=CHANNELS_LAST)
            return _apply(x, weight, bias, layer)

        if layer.saves_ms < _HOST_MS:

            def differentiate_in_graphs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
                return (differentiate if is_capturing() else original)(x, weight, bias)

            return remember(key, differentiate_in_graphs)  # type: ignore[no-any-return]
        return remember(key, differentiate)  # type: ignore[no-any-return]
    if low is x and weight.dtype is dtype and layer.out is not None and not transposed:
        return remember(key, densely(layer.out, (x, weight, bias)))  # type: ignore[no-any-return]

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x if x.dtype is dtype else x.to(dtype)
        weight = dense(weight) if weight.dtype is dtype else low_precision(weight, dtype)
        if bias is not None and bias.dtype is not dtype:
            bias = low_precision(bias, dtype)
        return layer.forward(x, weight, bias)

    return remember(key, compute)  # type: ignore[no-any-return]


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
        bias if bias is None else (bias.dtype, bias.get_device(), bias.stride()),
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


_library = torch.library.Library("confpred", "FRAGMENT")
_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_library.define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
    f"{_GEOMETRY}, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"conv2d_backward(Tensor out_grad, Tensor x, Tensor weight, {_GEOMETRY}, bool[] mask)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
Ints = Sequence[int]


def geometry_of(stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Geometry:
    return (
        (stride[0], stride[1]),
        (padding[0], padding[1]),
        (dilation[0], dilation[1]),
        groups,
    )


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    activation: str,
) -> Tensor:
    geometry = geometry_of(stride, padding, dilation, groups)
    return forward(x, weight, bias, residual, geometry, activation)


def _conv2d_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    geometry = geometry_of(stride, padding, dilation, groups)
    grads = backward(out_grad, x, weight, geometry, (mask[0], mask[1], mask[2]))
    # A schema has no optional output, and Inductor counts on the strides that were promised.
    return tuple(
        x.new_empty(0)
        if grad is None
        else grad.contiguous(
            memory_format=CHANNELS_LAST if grad.dim() == 4 else torch.contiguous_format
        )
        for grad in grads
    )


_library.impl("conv2d", _conv2d, "CompositeExplicitAutograd")
_library.impl("conv2d_backward", _conv2d_backward, "CompositeExplicitAutograd")


def _fake_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    activation: str,
) -> Tensor:
    out: Tensor = torch.ops.aten.convolution.default(
        x, weight, bias, stride, padding, dilation, False, [0, 0], groups
    )
    return out


def _fake_conv2d_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    absent = x.new_empty(0)
    return (
        torch.empty_like(x, memory_format=CHANNELS_LAST) if mask[0] else absent,
        torch.empty_like(weight, memory_format=CHANNELS_LAST) if mask[1] else x.new_empty(0),
        x.new_empty(weight.shape[0]) if mask[2] else x.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, residual, *ctx.geometry, activation = inputs
    ctx.fused = activation != "none" or residual is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.fused:
        raise InvalidInput(
            "activation", "fused", "none and no residual, where gradients are asked for"
        )
    x, weight = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    grads = torch.ops.confpred.conv2d_backward(out_grad, x, weight, *ctx.geometry, mask)
    return (*(g if asked else None for g, asked in zip(grads, mask, strict=True)), *(None,) * 6)


torch.library.register_fake("confpred::conv2d", _fake_conv2d, lib=_library)
torch.library.register_fake("confpred::conv2d_backward", _fake_conv2d_backward, lib=_library)
torch.library.register_autograd(
    "confpred::conv2d", _backward, setup_context=_setup_context, lib=_library
)


def traced(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
) -> Tensor:
    """The same in a program that is being traced: an operator that chooses when it runs."""
    out: Tensor = torch.ops.confpred.conv2d(x, weight, bias, residual, *geometry, activation)
    return out
