"""Custom operators: what autograd and `torch.compile` see of `conv2d`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.errors import InvalidInput
from confpred.pytorch.directions import filter_grad, forward, input_grad
from confpred.pytorch.ready import CHANNELS_LAST, Geometry


@torch.library.custom_op("confpred::conv2d", mutates_args=())
def conv2d_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
) -> Tensor:
    geometry = _geometry(stride, padding, dilation, groups)
    return forward(x.detach(), weight.detach(), bias, residual, geometry, activation)


@conv2d_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


@torch.library.custom_op("confpred::conv2d_input_grad", mutates_args=())
def _input_grad_op(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return input_grad(out_grad, x, weight, _geometry(stride, padding, dilation, groups))


@_input_grad_op.register_fake
def _(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("confpred::conv2d_filter_grad", mutates_args=())
def _filter_grad_op(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor,
    with_bias: bool,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    geometry = _geometry(stride, padding, dilation, groups)
    weight_grad, bias_grad = filter_grad(out_grad, x, weight, with_bias, geometry)
    return (
        weight_grad.contiguous(memory_format=CHANNELS_LAST),
        x.new_empty(0) if bias_grad is None else bias_grad,
    )


@_filter_grad_op.register_fake
def _(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor,
    with_bias: bool,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    weight_grad = torch.empty_like(weight, memory_format=CHANNELS_LAST)
    return weight_grad, x.new_empty(weight.shape[0] if with_bias else 0)


def _geometry(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry:
    return (
        (stride[0], stride[1]),
        (padding[0], padding[1]),
        (dilation[0], dilation[1]),
        groups,
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
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    eager = type(out_grad) is Tensor and not torch.compiler.is_compiling()
    geometry = _geometry(*ctx.geometry)
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        grad_x = (
            input_grad(out_grad, x, weight, geometry)
            if eager
            else _input_grad_op(out_grad, x, weight, *ctx.geometry)
        )
    if needs_weight:
        grad_weight, grad_bias = (
            filter_grad(out_grad, x, weight, needs_bias, geometry)
            if eager
            else _filter_grad_op(out_grad, x, weight, needs_bias, *ctx.geometry)
        )
    elif needs_bias:
        grad_bias = out_grad.sum((0, 2, 3))
    return (grad_x, grad_weight, grad_bias if needs_bias else None, *(None,) * 6)


conv2d_op.register_autograd(_backward, setup_context=_setup_context)
