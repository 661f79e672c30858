"""Eager calls: `convolution` and `conv2d`, PyTorch's functions with a fused epilogue, and `enable`,
for grouped and depthwise layers of programs that cannot be captured.

`confpred.optimize` is the way for networks. While enabled, ``torch.nn.Conv2d``, ``Conv1d`` and
``Conv3d`` ask once a shape whether a kernel is predicted to save more than ``LEAST_MS``; dense
layers are not looked at.
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
from torch.nn.modules.utils import _pair, _single, _triple  # noqa: F401

from confpred.concurrency import uninterrupted
from confpred.errors import InvalidInput
from confpred.problem.activation import activated
from confpred.problem.conv import MAX_RANK
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch.run import choosing, convolve
from confpred.pytorch.run.choosing import ANY, Constraints
from confpred.pytorch.run.convolve import Axes, Call, Geometry
from confpred.pytorch.run.loading import dense, is_channels_last
from confpred.pytorch.run.pointwise import activation_named

_PLAIN = frozenset((Tensor, nn.Parameter))
#: Milliseconds of the GPU's time that a layer has to save, forward and backward together: a call
#: of confpred takes the CPU that much longer than one of PyTorch.
LEAST_MS = 0.02
_KINDS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PYTORCH: tuple[Callable[..., Tensor], ...] = tuple(kind._conv_forward for kind in _KINDS)
_lock = threading.Lock()
#: Settings of each `enable` without a `disable` yet, and a function that undoes its plan.
_former: list[tuple[Constraints, Callable[[], None] | None]] = []
_constraints = ANY


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Axes = 1,
    padding: int | Axes = 0,
    dilation: int | Axes = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Tensor | None = None,
    limits: Limits | None = None,
) -> Tensor:
    """Compute ``activation(torch.nn.functional.conv2d(x, weight, bias, ...) + residual)`` by the
    fastest kernel.

    confpred's kernels compute grouped and depthwise layers of channels-last CUDA tensors, and
    cuDNN's plans dense layers, forward and backward. PyTorch computes all others, in the mode that
    the caller has set (logged at level debug), and layers where its operator (measured with cuDNN's
    benchmark mode on) is predicted to be faster. Works under ``torch.compile`` and
    autocast. The filter's gradient repeats to the bit where PyTorch is asked for deterministic
    algorithms.

    Args:
        x: input, shape (N, C, H, W), ``memory_format=torch.channels_last``.
        weight: filters, shape (K, C / groups, R, S), of `x`'s dtype.
        bias: shape (K,), or None.
        stride, padding, dilation: an integer, or a pair (vertical, horizontal).
        groups: C and K are multiples of it.
        activation: None, ``"relu"``, ``"silu"``, ``"gelu"`` (the exact one, with erf), ``"relu6"``,
            ``"leaky_relu"`` (of slope 0.01), ``"leaky_relu_10"`` (0.1), ``"leaky_relu_20"`` (0.2)
            or ``"hardswish"``.
        residual: shape (N, K, P, Q), added before the activation, or None.
        limits: the choice keeps within them; None for none.

    Returns:
        Shape (N, K, P, Q), of `x`'s dtype.

    Raises:
        InvalidInput: an argument is not allowed, or a tensor has the wrong rank.
        RuntimeError: PyTorch refuses the arguments.
    """
    arguments: Any = (x, weight, bias, residual, activation, limits)
    return _convolution(4, stride, padding, dilation, groups, *arguments)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: int | Axes = 1,
    padding: int | Axes = 0,
    dilation: int | Axes = 1,
    groups: int = 1,
    activation: str | None = None,
    limits: Limits | None = None,
) -> Tensor:
    """Compute `conv2d` in the spatial dimensions of `weight`, shape (K, C / groups, ...): one, two
    or three. Lines and volumes may be channels first, too.

    Args:
        x: input, shape (N, C, ...).
        weight, bias, groups, activation, limits: as of `conv2d`.
        residual: of the result's shape, added before the activation, or None.
        stride, padding, dilation: an integer, or one for each spatial dimension.

    Returns:
        Shape (N, K, ...), of `x`'s dtype, with the strides that PyTorch's function gives.

    Raises:
        InvalidInput, RuntimeError: as of `conv2d`.
    """
    if not 3 <= weight.dim() <= 2 + MAX_RANK:
        allowed = f"a tensor of 3 to {2 + MAX_RANK} dimensions"
        raise InvalidInput("weight", tuple(weight.shape), allowed)
    arguments: Any = (x, weight, bias, residual, activation, limits)
    return _convolution(weight.dim(), stride, padding, dilation, groups, *arguments)


def _convolution(
    dims: int, stride: int | Axes, padding: int | Axes, dilation: int | Axes, groups: int,
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    activation: str | None, limits: Limits | None,
) -> Tensor:  # fmt: skip
    """Compute `convolution` of tensors of `dims` dimensions."""
    name = activation_named(activation)
    constraints = ANY if limits is None else Constraints(limits)
    tensors = (("x", x, dims), ("weight", weight, dims), ("bias", bias, 1))
    for argument, tensor, rank in (*tensors, ("residual", residual, dims)):
        if tensor is not None and tensor.dim() != rank:
            raise InvalidInput(argument, tuple(tensor.shape), f"a tensor of {rank} dimensions")
    sizes = {"stride": stride, "padding": padding, "dilation": dilation}
    axes = [_axes(argument, size, dims - 2) for argument, size in sizes.items()]
    geometry: Geometry = (axes[0], axes[1], axes[2], groups)
    pytorch: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 3]
    operands = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    if torch.compiler.is_compiling() or not is_plain(*operands):
        out = pytorch(x, weight, bias, *geometry)
        return activated(name, out if residual is None else out + residual)
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    x, weight, bias, residual = cast(x, weight, bias, residual)
    if any(t is not None and t.dtype is not x.dtype for t in (weight, bias)):
        return pytorch(x, weight, bias, *geometry)  # type: ignore[no-any-return]  # its error
    call = Call(geometry, constraints=constraints)
    if differentiable:
        # The activation's gradient needs its input, so neither activation nor residual is fused.
        out = ConvolutionFunction.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        return activated(name, out if residual is None else out + residual)
    out = convolve.forward(x, weight, bias, residual, replace(call, activation=name))
    return _lay_as_pytorch(out, x, weight)


def _axes(name: str, value: int | Axes, rank: int) -> Axes:
    if isinstance(value, int):
        return (value,) * rank
    if len(value) != rank:
        raise InvalidInput(name, value, f"an integer, or {rank} of them")
    return tuple(value)


def _lay_as_pytorch(t: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return a result for `x` with the strides of PyTorch's result; lines are channels first."""
    if t.dim() in (1, 4):
        return t
    is_last = t.dim() == 5 and (is_channels_last(x) or is_channels_last(weight))
    return dense(t, "channels_last" if is_last else "channels_first")


def cast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives to the operands of a convolution of `x`, or None."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype is not torch.float64:
        return torch.get_autocast_dtype("cuda")
    return None


def cast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the operands of a convolution of `x` as autocast casts them."""
    dtype = cast_dtype(x)
    tensors = (x, *others)
    return tensors if dtype is None else tuple(None if t is None else t.to(dtype) for t in tensors)


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


class ConvolutionFunction(torch.autograd.Function):
    """A convolution of plain tensors of one dtype, each direction with its own choice; PyTorch
    computes gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return _lay_as_pytorch(convolve.forward(x, weight, bias, None, call), x, weight)

    @staticmethod
    def backward(ctx: Any, *out_grads: Tensor) -> Any:
        (out_grad,) = out_grads
        x, weight = ctx.saved_tensors
        call = replace(ctx.call, mask=ctx.needs_input_grad[:3])
        # Gradients of gradients, or many gradients in one batch: PyTorch has formulas.
        if torch.is_grad_enabled() or not is_plain(out_grad) or not torch._C._has_storage(out_grad):
            return (*convolve.backward_by_pytorch(out_grad, x, weight, call, call.mask), None)
        grads = convolve.backward(out_grad, x, weight, call)
        laid = (None if t is None else _lay_as_pytorch(t, x, weight) for t in grads)
        return (*laid, None)


def enable(
    *,
    plan: str | Path | None = None,
    max_regret: float | None = None,
    limits: Limits = UNLIMITED,
) -> None:
    """Let grouped and depthwise ``torch.nn.Conv2d``, ``Conv1d`` and ``Conv3d`` of this process run
    by confpred's kernels.

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
    global _constraints
    constraints = Constraints(limits, max_regret)
    undo = None if plan is None else choosing.use_plan(Path(plan))
    with uninterrupted, _lock:
        _former.append((_constraints, undo))
        _constraints = constraints
        for kind, method in zip(_KINDS, _CONFPRED, strict=True):
            kind._conv_forward = method


def disable() -> None:
    """Undo the latest `enable`, its settings and its plan included; without one, do nothing."""
    global _constraints
    with uninterrupted, _lock:
        if not _former:
            return
        _constraints, undo = _former.pop()
        if undo is not None:
            undo()
        if not _former:
            for kind, method in zip(_KINDS, _PYTORCH, strict=True):
                kind._conv_forward = method


def is_enabled() -> bool:
    """Return whether an `enable` is in force."""
    return bool(_former)


@contextmanager
def enabled(**settings: Any) -> Iterator[None]:
    """Call `enable` for the block, with the same arguments."""
    enable(**settings)
    try:
        yield
    finally:
        disable()


def _forward_of(pytorch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement of `pytorch`, the ``_conv_forward`` of a class of layers."""

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (
            self.groups == 1
            or torch.compiler.is_compiling()
            or self.padding_mode != "zeros"
            or {type(self.stride), type(self.padding), type(self.dilation)} != {tuple}
            or not input.is_cuda
            or not is_plain(input, weight, *(() if bias is None else (bias,)))
        ):
            return pytorch(self, input, weight, bias)
        needs = (input.requires_grad, weight.requires_grad, bias is not None)
        call = Call(
            (self.stride, self.padding, self.dilation, self.groups),
            mask=needs if torch.is_grad_enabled() else (False, False, False),
            constraints=_constraints,
        )
        key = (
            call, input.shape, weight.shape, input.dtype, weight.dtype, cast_dtype(input),
            bias is None, input.get_device(), weight.get_device(), is_channels_last(input),
        )  # fmt: skip
        if not choosing.cached(key, lambda: _saves(call, *cast(input, weight, bias))):
            return pytorch(self, input, weight, bias)
        x, weight, bias = cast(input, weight, bias)
        out: Tensor = ConvolutionFunction.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        return out

    # `torch.jit.script` reads the text of this, and looks its names up in this module.
    _conv_forward.__wrapped__ = pytorch  # type: ignore[attr-defined]
    return _conv_forward


_CONFPRED = tuple(map(_forward_of, _PYTORCH))


def _saves(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a layer, called with these tensors, is predicted to save more than
    ``LEAST_MS``. The kernels that it would launch are compiled and loaded."""
    forward = convolve.forward_launch(x, weight, bias, None, call)
    launches = (forward, *convolve.backward_launches(x, weight, call))
    assigned = [launch.assignment for launch in launches if launch is not None]
    choices = choosing.choose_on([a.problem for a in assigned], x.get_device(), call.constraints)
    saved = 0.0
    for assignment, choice in zip(assigned, choices, strict=True):
        if choice is None:
            continue
        if choice.source == "pinned":
            return True
        own_ms = choice.predicted_ms
        if assignment.candidate != choice.candidate:  # a plan that cuDNN does not build here
            predictor = choosing.current_predictor()
            own_ms = predictor.expected_ms(assignment.problem, choice.device, assignment.candidate)
        if choice.pytorch_ms is not None and own_ms is not None:
            saved += choice.pytorch_ms - own_ms
    return saved > LEAST_MS
