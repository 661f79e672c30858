"""Convolution as `torch.compile` sees it: two operators of PyTorch's dispatcher.

`torch.ops.confpred.conv2d` and its backward choose when they run. They are registered without the
wrapping of `torch.library.custom_op`, which costs more than a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from confpred.errors import InvalidInput
from confpred.pytorch.directions import forward
from confpred.pytorch.gradients import backward
from confpred.pytorch.layers import Geometry
from confpred.pytorch.ready import CHANNELS_LAST

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
    return (
        torch.empty_like(x, memory_format=CHANNELS_LAST) if mask[0] else x.new_empty(0),
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
