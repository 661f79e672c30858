"""`conv2d`: PyTorch's function with a fused epilogue, by kernels that are chosen, compiled once and
launched.

    conv2d --+-- gradients ------> convolve, then PyTorch's activation and sum
             +-- torch.compile --> torch.ops.confpred.conv2d --+
             `-- inference ------------------------------------+--> forward

         a kernel is legal and predicted to win: launched on PyTorch's current stream
         else: PyTorch's own operator
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from confpred.errors import InvalidInput
from confpred.problem.conv2d import ACTIVATIONS
from confpred.problem.limits import Limits
from confpred.pytorch.autograd import find_eager
from confpred.pytorch.directions import forward
from confpred.pytorch.fallback import PYTORCH_CONV2D, activate, pytorch_apart
from confpred.pytorch.layers import Geometry, Pair
from confpred.pytorch.operators import traced
from confpred.pytorch.routing import is_watched

_PLAIN = (Tensor, Parameter)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Tensor | None = None,
    limits: Limits | None = None,
) -> Tensor:
    """``activation(torch.nn.functional.conv2d(x, weight, bias, ...) + residual)``, by the fastest
    kernel.

    Our kernels serve channels-last CUDA tensors of grouped and depthwise layers, and cuDNN's plans
    those of dense layers, in the forward and in the backward pass. Everything else goes to PyTorch,
    in the mode that the caller has set (logged at level debug); so does every layer where PyTorch's
    operator (measured with cuDNN's benchmark mode on) is predicted to be faster. Works under
    ``torch.compile`` and autocast. The filter's gradient is repeatable to the bit where PyTorch is
    asked for deterministic algorithms.

    Args:
        x: input, shape (N, C, H, W), ``memory_format=torch.channels_last``.
        weight: filters, shape (K, C / groups, R, S), of `x`'s dtype.
        bias: shape (K,), or None.
        stride, padding, dilation: an integer, or a pair (vertical, horizontal).
        groups: C and K are multiples of it.
        activation: None, ``"relu"``, ``"silu"``, ``"gelu"`` (the exact one, with erf), ``"relu6"``
            or ``"hardswish"``.
        residual: shape (N, K, P, Q), added before the activation, or None.
        limits: what the choice keeps within, in place of what `confpred.enable` was told. Under
            ``torch.compile`` and where gradients are recorded, PyTorch's own operator then serves.

    Returns:
        Shape (N, K, P, Q), of `x`'s dtype.

    Raises:
        InvalidInput: `activation` is unknown, `limits` are none, or a tensor argument has the wrong
            rank.
        RuntimeError: PyTorch refuses the arguments.
    """
    name = "none" if activation is None else activation
    if name not in ACTIVATIONS:
        raise InvalidInput("activation", activation, f"None or one of {', '.join(ACTIVATIONS)}")
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidInput("limits", limits, "None or a confpred.Limits")
    tensors = (("x", x, 4), ("weight", weight, 4), ("bias", bias, 1), ("residual", residual, 4))
    for argument, tensor, rank in tensors:
        if tensor is not None and tensor.dim() != rank:
            raise InvalidInput(argument, tuple(tensor.shape), f"a tensor of {rank} dimensions")
    geometry: Geometry = (
        _pair("stride", stride),
        _pair("padding", padding),
        _pair("dilation", dilation),
        groups,
    )
    compiling = torch.compiler.is_compiling()
    given = [tensor for _, tensor, _ in tensors if tensor is not None]
    plain = all(type(tensor) in _PLAIN for tensor in given)
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    limited = limits is not None and (compiling or differentiable)
    if limited or (not compiling and (not plain or is_watched())):
        return pytorch_apart(x, weight, bias, residual, geometry, name)
    if differentiable and not compiling:

        def original(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return PYTORCH_CONV2D(x, weight, bias, *geometry)

        # The activation's gradient needs its input, so neither the activation nor the residual is
        # fused.
        serve = find_eager(x, weight, bias, geometry, original) or original
        out = serve(x, weight, bias)
        if residual is not None:
            autocast = x.is_cuda and torch.is_autocast_enabled("cuda")
            out = out + (residual.to(out.dtype) if autocast else residual)
        return activate(name, out)
    place: Any = id(weight) if limits is None else (id(weight), limits)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        residual = None if residual is None else residual.to(dtype)
    if differentiable:
        out = traced(x, weight, bias, None, geometry, "none")
        return activate(name, out if residual is None else out + residual)
    if compiling:
        return traced(x, weight, bias, residual, geometry, name)
    return forward(x, weight, bias, residual, geometry, name, place, limits)


def _pair(name: str, value: int | Pair) -> Pair:
    if isinstance(value, int):
        return (value, value)
    if len(value) != 2:
        raise InvalidInput(name, value, "an integer or a pair of integers")
    return (value[0], value[1])
