"""`conv2d`: PyTorch's function with a fused epilogue, and what eager calls share.

conv2d --+-- gradients ------> Convolution, then PyTorch's activation and sum
         +-- torch.compile --> PyTorch's functions, which a backend may fuse
         `-- inference ------> convolve.forward: a kernel, or PyTorch's operator
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confpred.errors import InvalidInput
from confpred.problem.conv2d import ACTIVATIONS
from confpred.problem.limits import Limits
from confpred.pytorch import convolve
from confpred.pytorch.choosing import ANY, Wishes
from confpred.pytorch.layers import Call, Geometry, Pair
from confpred.pytorch.pointwise import activate

_PLAIN = frozenset((Tensor, nn.Parameter))


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
        limits: the choice keeps within them; None for none.

    Returns:
        Shape (N, K, P, Q), of `x`'s dtype.

    Raises:
        InvalidInput: `activation` is unknown, `limits` is not a `confpred.Limits`, or a tensor
            argument has the wrong rank.
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
    given = [tensor for _, tensor, _ in tensors if tensor is not None]
    if torch.compiler.is_compiling() or not is_plain(*given):
        out = F.conv2d(x, weight, bias, *geometry)
        return activate(name, out if residual is None else out + residual)
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    x, weight, bias, residual = cast(x, weight, bias, residual)
    if any(t is not None and t.dtype is not x.dtype for t in (weight, bias)):
        return F.conv2d(x, weight, bias, *geometry)  # PyTorch says what is wrong
    call = Call(geometry, wishes=ANY if limits is None else Wishes(limits))
    if differentiable:
        # The activation's gradient needs its input, so neither activation nor residual is fused.
        out = Convolution.of(x, weight, bias, call)
        return activate(name, out if residual is None else out + residual)
    return convolve.forward(x, weight, bias, residual, replace(call, activation=name))


def _pair(name: str, value: int | Pair) -> Pair:
    if isinstance(value, int):
        return (value, value)
    if len(value) != 2:
        raise InvalidInput(name, value, "an integer or a pair of integers")
    return (value[0], value[1])


def cast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives to the operands of a convolution of `x`; None for their
    own."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype is not torch.float64:
        return torch.get_autocast_dtype("cuda")
    return None


def cast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the operands of a convolution of `x` as autocast casts them."""
    dtype = cast_dtype(x)
    given = (x, *others)
    return given if dtype is None else tuple(None if t is None else t.to(dtype) for t in given)


def is_plain(*tensors: Tensor) -> bool:
    """Return whether nothing but eager mode sees these tensors: no subclass, transform or mode."""
    return (
        all(type(t) in _PLAIN for t in tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._get_tracing_state()
        and not torch.autograd.forward_ad._current_level >= 0
    )


class Convolution(torch.autograd.Function):
    """A convolution whose three directions are chosen apart; gradients of gradients are
    PyTorch's."""

    @staticmethod
    def of(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Compute the convolution of plain tensors of one dtype, with a record of gradients."""
        out: Tensor = Convolution.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return convolve.forward(x, weight, bias, None, call)

    @staticmethod
    def backward(ctx: Any, *out_grads: Tensor) -> Any:
        (out_grad,) = out_grads
        x, weight = ctx.saved_tensors
        call = replace(ctx.call, mask=ctx.needs_input_grad[:3])
        if torch.is_grad_enabled() or not is_plain(out_grad) or not torch._C._has_storage(out_grad):
            # Gradients of gradients, or many gradients in one batch: PyTorch has formulas.
            sizes = [out_grad.shape[1]] if call.mask[2] else None
            grads = torch.ops.aten.convolution_backward(
                out_grad, x, weight, sizes, *call.arguments, list(call.mask)
            )
        else:
            grads = convolve.backward(out_grad, x, weight, call)
        return (*grads, None)
