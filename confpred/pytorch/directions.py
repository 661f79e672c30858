"""The three directions of a convolution of tensors: by a kernel of ours, or PyTorch's operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.pytorch.ready import ALIGNMENT, CHANNELS_LAST, DTYPES, Geometry, launch, ready_launch


def activate(name: str, x: Tensor) -> Tensor:
    if name == "none":
        return x
    activated: Tensor = getattr(F, name)(x)  # confpred's names are PyTorch's
    return activated


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
) -> Tensor:
    """Launch the chosen kernel, or PyTorch's operator; no gradients."""
    if _ours(x, weight, bias, residual):
        epilogue = (bias is not None, activation, residual is not None, False)
        ready = ready_launch(
            "fprop", x.shape, weight.shape, x.dtype, x.device.index, geometry, epilogue
        )
        if ready is not None and (residual is None or residual.shape == ready.outputs[0][0]):  # type: ignore[index]
            return launch(ready, x, (x, weight, bias, residual))[0]
    stride, padding, dilation, groups = geometry
    out = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return activate(activation, out if residual is None else out + residual)


def input_grad(out_grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Gradient of `x`; of `x` itself, only the shape and the layout are used."""
    if _ours(x, weight, out_grad):
        epilogue = (False, "none", False, False)
        ready = ready_launch(
            "dgrad", x.shape, weight.shape, x.dtype, x.device.index, geometry, epilogue
        )
        if ready is not None:
            return launch(ready, out_grad, (out_grad, weight))[0]
    grad: Tensor = _pytorch_backward(out_grad, x, weight, geometry, [True, False, False])[0]
    return grad


def filter_grad(
    out_grad: Tensor, x: Tensor, weight: Tensor, with_bias: bool, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `weight`, of which only the shape is used, and of the bias."""
    if _ours(x, weight, out_grad):
        deterministic = (
            torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
        )
        epilogue = (with_bias, "none", False, deterministic)
        ready = ready_launch(
            "wgrad", x.shape, weight.shape, x.dtype, x.device.index, geometry, epilogue
        )
        if ready is not None:
            grads = launch(ready, x, (out_grad, x))
            return grads[0], grads[1] if with_bias else None
    grads = _pytorch_backward(out_grad, x, weight, geometry, [False, True, with_bias])
    return grads[1], grads[2]


def _pytorch_backward(
    out_grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> Any:
    stride, padding, dilation, groups = geometry
    return torch.ops.aten.convolution_backward(
        out_grad,
        x,
        weight,
        [weight.shape[0]] if mask[2] else None,
        stride,
        padding,
        dilation,
        False,  # not transposed, so there is no padding of the output
        (0, 0),
        groups,
        mask,
    )


def _ours(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels of ours can take these tensors, as far as the tensors alone decide it."""
    return (
        x.is_cuda
        and x.dtype in DTYPES
        and x.is_contiguous(memory_format=CHANNELS_LAST)
        and x.data_ptr() % ALIGNMENT == 0
        and x.numel() > 0
        and all(t is None or (t.dtype is x.dtype and t.device == x.device) for t in others)
    )
