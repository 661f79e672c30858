"""PyTorch's own operators, whatever is registered or routed over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.problem.conv2d import Problem
from confpred.pytorch.epilogue import apply_epilogue, epilogue_of
from confpred.pytorch.layers import Geometry

#: PyTorch's own functions, also while `confpred.enable` has put others in their places.
PYTORCH_CONV1D, PYTORCH_CONV2D = F.conv1d, F.conv2d
PYTORCH_CONV_TRANSPOSE2D = F.conv_transpose2d
PYTORCH_FORWARD = torch.nn.Conv2d.forward
PYTORCH_CONV_FORWARD = torch.nn.Conv2d._conv_forward  # which it calls
PYTORCH_CAPTURE_BEGIN = torch.cuda.CUDAGraph.capture_begin
_BACKWARD = torch.ops.aten.convolution_backward.default


def pytorch_forward(*arguments: Any) -> Tensor:
    """PyTorch's own ``aten::convolution``, by the cheapest way in; without gradients only where
    none are recorded."""
    out: Tensor = torch.convolution(*arguments)
    return out


def pytorch_backward(*arguments: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """PyTorch's own ``aten::convolution_backward``."""
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = _BACKWARD(*arguments)
    return grads


def activate(name: str, x: Tensor) -> Tensor:
    if name == "none":
        return x
    activated: Tensor = getattr(F, name)(x)  # confpred's names are PyTorch's
    return activated


def pytorch_apart(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
) -> Tensor:
    """``activation(conv2d(x, weight, bias) + residual)`` by PyTorch's functions one by one, which
    autograd, transforms and tracers see."""
    out = PYTORCH_CONV2D(x, weight, bias, *geometry)
    return activate(activation, out if residual is None else out + residual)


def pytorch_fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
) -> Tensor:
    """What `confpred.pytorch.directions.forward` computes, by PyTorch's own operator; what follows
    it is one kernel, where that is possible."""
    stride, padding, dilation, groups = geometry
    if residual is None and activation == "none":
        return pytorch_forward(x, weight, bias, stride, padding, dilation, False, (0, 0), groups)
    if not x.is_cuda or (residual is not None and residual.requires_grad):
        out = pytorch_forward(x, weight, bias, stride, padding, dilation, False, (0, 0), groups)
        return activate(activation, out if residual is None else out + residual)
    out = pytorch_forward(x, weight, None, stride, padding, dilation, False, (0, 0), groups)
    if residual is None or (residual.shape == out.shape and residual.dtype is out.dtype):
        return apply_epilogue(out, bias, residual, activation)
    return activate(activation, apply_epilogue(out, bias, None, "none") + residual)


def pytorch_for(problem: Problem) -> Callable[..., Any]:
    """PyTorch's own operator in the place of a launch of ours for `problem`: it takes and returns
    what `confpred.pytorch.ready.ReadyLaunch.run` does."""
    p = problem
    layer = (p.stride, p.padding, p.dilation)
    if p.direction == "fprop":
        geometry: Geometry = (*layer, p.groups)

        def forward(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
        ) -> Tensor:
            return pytorch_fused(x, weight, bias, residual, geometry, p.activation)

        return forward
    arguments = (*layer, False, (0, 0), p.groups)

    # Of the operand whose gradient is asked for, PyTorch's operator reads sizes and layout only.
    def of_input(out_grad: Tensor, weight: Tensor) -> Tensor | None:
        x = out_grad.new_empty(p.n, p.h, p.w, p.c).permute(0, 3, 1, 2)
        return pytorch_backward(out_grad, x, weight, None, *arguments, [True, False, False])[0]

    def of_filter(out_grad: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight = x.new_empty(p.k, p.r, p.s, p.group_width).permute(0, 3, 1, 2)
        sizes = [p.k] if p.bias else None
        mask = [False, True, p.bias]
        return pytorch_backward(out_grad, x, weight, sizes, *arguments, mask)[1:]

    return of_input if p.direction == "dgrad" else of_filter


def pytorch_run(
    geometry: Geometry, activation: str, keep: Callable[[Callable[..., Tensor]], Any]
) -> Callable[..., Tensor]:
    """`pytorch_fused` for plain CUDA tensors that are alike in all but their values, where no
    gradients are recorded; the first call gives `keep` what does the same with less work for the
    host."""
    stride, padding, dilation, groups = geometry
    arguments = (stride, padding, dilation, False, (0, 0), groups)

    def first(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if residual is None and activation == "none":
            keep(plain)
            return plain(x, weight, bias, residual)
        out = pytorch_forward(x, weight, None, *arguments)
        finish = epilogue_of(out, bias, residual, activation)
        if finish is None:
            return apply_epilogue(out, bias, residual, activation)

        def fused(
            x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
        ) -> Tensor:
            return finish(torch.convolution(x, weight, None, *arguments), bias, residual)

        keep(fused)
        return finish(out, bias, residual)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        out: Tensor = torch.convolution(x, weight, bias, *arguments)
        return out

    return first
