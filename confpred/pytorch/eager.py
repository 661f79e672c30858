"""Eager calls: `conv2d`, PyTorch's function with a fused epilogue, and `enable`, for grouped and
depthwise layers of programs that cannot be captured.

`confpred.optimize` is the way for networks. While enabled, ``torch.nn.Conv2d`` asks once a shape
whether a kernel is predicted to save more than ``LEAST_MS``; dense layers are not looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # TorchScript looks this and the next but one up here
from torch import Tensor, nn
from torch.nn.modules.utils import _pair  # noqa: F401

from confpred.concurrency import uninterrupted
from confpred.errors import InvalidInput
from confpred.problem.activation import activated
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch.run import choosing, convolve
from confpred.pytorch.run.choosing import ANY, Wishes
from confpred.pytorch.run.convolve import Call, Geometry, Pair
from confpred.pytorch.run.loading import CHANNELS_LAST
from confpred.pytorch.run.pointwise import activation_named

_PLAIN = frozenset((Tensor, nn.Parameter))
#: Milliseconds of the GPU's time that a layer has to save, forward and backward together: a call
#: from Python takes the host that much longer than PyTorch's own.
LEAST_MS = 0.02
_PYTORCH: Callable[..., Tensor] = nn.Conv2d._conv_forward
_lock = threading.Lock()
#: Settings of each `enable` without a `disable` yet, and a function that undoes its plan.
_former: list[tuple[Wishes, Callable[[], None] | None]] = []
_wishes = ANY


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

    confpred's kernels serve channels-last CUDA tensors of grouped and depthwise layers, and cuDNN's
    plans those of dense layers, forward and backward. All else goes to PyTorch, in the mode that
    the caller has set (logged at level debug); so do layers where PyTorch's operator (measured with
    cuDNN's benchmark mode on) is predicted to be faster. Works under ``torch.compile`` and
    autocast. The filter's gradient repeats to the bit where PyTorch is asked for deterministic
    algorithms.

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
        InvalidInput: an argument is not allowed, or a tensor has the wrong rank.
        RuntimeError: PyTorch refuses the arguments.
    """
    name = activation_named(activation)
    wishes = ANY if limits is None else Wishes(limits)
    tensors = (("x", x, 4), ("weight", weight, 4), ("bias", bias, 1), ("residual", residual, 4))
    for argument, tensor, rank in tensors:
        if tensor is not None and tensor.dim() != rank:
            raise InvalidInput(argument, tuple(tensor.shape), f"a tensor of {rank} dimensions")
    sizes = {"stride": stride, "padding": padding, "dilation": dilation}
    pairs = [_both(argument, size) for argument, size in sizes.items()]
    geometry: Geometry = (pairs[0], pairs[1], pairs[2], groups)
    given = [tensor for _, tensor, _ in tensors if tensor is not None]
    if torch.compiler.is_compiling() or not is_plain(*given):
        out = F.conv2d(x, weight, bias, *geometry)
        return activated(name, out if residual is None else out + residual)
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    x, weight, bias, residual = cast(x, weight, bias, residual)
    if any(t is not None and t.dtype is not x.dtype for t in (weight, bias)):
        return F.conv2d(x, weight, bias, *geometry)  # PyTorch says what is wrong
    call = Call(geometry, wishes=wishes)
    if differentiable:
        # The activation's gradient needs its input, so neither activation nor residual is fused.
        out = Convolution.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        return activated(name, out if residual is None else out + residual)
    return convolve.forward(x, weight, bias, residual, replace(call, activation=name))


def _both(name: str, value: int | Pair) -> Pair:
    if isinstance(value, int):
        return (value, value)
    if len(value) != 2:
        raise InvalidInput(name, value, "an integer or a pair of integers")
    return (value[0], value[1])


def cast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives to the operands of a convolution of `x`, or None."""
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
    """A convolution of plain tensors of one dtype, whose three directions are chosen apart;
    gradients of gradients are PyTorch's."""

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
        # Gradients of gradients, or many gradients in one batch: PyTorch has formulas.
        if torch.is_grad_enabled() or not is_plain(out_grad) or not torch._C._has_storage(out_grad):
            return (*convolve.backward_by_pytorch(out_grad, x, weight, call, call.mask), None)
        return (*convolve.backward(out_grad, x, weight, call), None)


def enable(
    *,
    plan: str | Path | None = None,
    max_regret: float | None = None,
    limits: Limits = UNLIMITED,
) -> None:
    """Let grouped and depthwise ``torch.nn.Conv2d`` of this process run by confpred's kernels.

    No model is touched. A layer whose kernel is not predicted to save more than 20 us of the GPU's
    time is computed by PyTorch. The first call of a shape waits for its kernel to be compiled.
    `disable` undoes it. Calls nest: each `enable` needs its own `disable`, and the settings of the
    last one hold. Networks that can be captured gain much more from `confpred.optimize`.

    Args:
        plan: a file of choices (``confpred.record_plan``) that are taken as they are.
        max_regret: take a prediction only where the bound on its regret is at most this.
        limits: every choice keeps within them, such as ``confpred.Limits(workspace_bytes=2**26)``.

    Raises:
        InvalidInput: an argument is not allowed, or `plan` was made for another device.
        DataError: `plan` is not valid, or was made for other kernels.
    """
    global _wishes
    wishes = Wishes(limits, max_regret)
    undo = None if plan is None else choosing.use_plan(Path(plan))
    with uninterrupted, _lock:
        _former.append((_wishes, undo))
        _wishes = wishes
        nn.Conv2d._conv_forward = _conv_forward  # type: ignore[method-assign]


def disable() -> None:
    """Undo the latest `enable`, its settings and its plan included; without one, do nothing."""
    global _wishes
    with uninterrupted, _lock:
        if not _former:
            return
        _wishes, undo = _former.pop()
        if undo is not None:
            undo()
        if not _former:
            nn.Conv2d._conv_forward = _PYTORCH  # type: ignore[method-assign]


def is_enabled() -> bool:
    """Return whether an `enable` is in force."""
    return bool(_former)


@contextmanager
def enabled(**settings: Any) -> Iterator[None]:
    """`enable` for the block; takes the same arguments."""
    enable(**settings)
    try:
        yield
    finally:
        disable()


def _conv_forward(self: nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.Conv2d._conv_forward`` while enabled."""
    if (
        self.groups == 1
        or torch.compiler.is_compiling()
        or self.padding_mode != "zeros"
        or isinstance(self.padding, str)
        or not input.is_cuda
        or not is_plain(input, weight, *(() if bias is None else (bias,)))
    ):
        return _PYTORCH(self, input, weight, bias)
    needs = (input.requires_grad, weight.requires_grad, bias is not None)
    call = Call(
        (self.stride, self.padding, self.dilation, self.groups),  # type: ignore[arg-type]
        mask=needs if torch.is_grad_enabled() else (False, False, False),
        wishes=_wishes,
    )
    key = (
        call, input.shape, weight.shape, input.dtype, weight.dtype, cast_dtype(input),
        bias is None, input.get_device(), weight.get_device(),
        input.is_contiguous(memory_format=CHANNELS_LAST),
    )  # fmt: skip
    if not choosing.kept(key, lambda: _saves(call, *cast(input, weight, bias))):
        return _PYTORCH(self, input, weight, bias)
    x, weight, bias = cast(input, weight, bias)
    out: Tensor = Convolution.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
    return out


# `torch.jit.script` reads the text of this, and looks its names up in this module.
_conv_forward.__wrapped__ = _PYTORCH  # type: ignore[attr-defined]


def _saves(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a layer of these sizes is predicted to save at least ``LEAST_MS``."""
    forward = convolve.forward_launch(x, weight, bias, None, call)
    launches = (forward, *convolve.backward_launches(x, weight, call))
    assigned = [launch.assignment for launch in launches if launch is not None]
    choices = choosing.choose_on([a.problem for a in assigned], x.get_device(), call.wishes)
    saved = 0.0
    for assignment, choice in zip(assigned, choices, strict=True):
        if choice is None:
            continue
        if choice.source == "pinned":
            return True
        own_ms = choice.predicted_ms
        if assignment.candidate != choice.candidate:  # cuDNN did not build the plan
            known = choosing.current_predictor()
            own_ms = known.expected_ms(assignment.problem, choice.device, assignment.candidate)
        if choice.pytorch_ms is not None and own_ms is not None:
            saved += choice.pytorch_ms - own_ms
    return saved >= LEAST_MS
