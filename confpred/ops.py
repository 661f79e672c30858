"""The PyTorch front: `conv2d` picks its kernel by itself, compiles it once and launches it.

    conv2d --+-- gradients, torch.compile, autocast --> torch.ops.confpred.conv2d --+
             |                                                                      |
             +-- eager inference ---------------------------------------------------+--> _run
                                                                                         |
         a kernel is legal and predicted to win: launched on PyTorch's current stream <--+
         else: PyTorch's own operator                                                 <--+

Eager inference does without the dispatcher, which costs a custom operator in Python more than the
launch itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from confpred.cuda import driver
from confpred.cuda.compiler import compile_kernel
from confpred.errors import (
    ConfpredError,
    InvalidInput,
    InvalidProblem,
    MissingExtra,
    UnknownDevice,
)
from confpred.families import Family, all_families
from confpred.predictor import Predictor
from confpred.problem import ACTIVATIONS, Problem

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from confpred.cuda.peer import ACTIVATE
except ImportError as error:
    raise MissingExtra("torch", "gpu") from error

log = logging.getLogger(__name__)

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ALIGNMENT = 16  # bytes; the kernels load this much at a time
_MAX_PLANS = 65_536
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A ready launch for one shape: nothing is left to decide."""

    bound: driver.BoundLaunch
    out_shape: tuple[int, int, int, int]  # N K P Q
    out_strides: tuple[int, int, int, int]  # channels last


_plans: dict[Any, _Plan | None] = {}
_predictor: Predictor | None = None  # loaded when it is first needed


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | _Pair = 1,
    padding: int | _Pair = 0,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """``activation(torch.nn.functional.conv2d(x, weight, bias, ...))``, by the fastest kernel.

    Our kernels serve channels-last float16 and bfloat16 CUDA tensors; everything else, and every
    layer where PyTorch's operator is predicted to be faster, goes to PyTorch (logged at level
    debug). Differentiable; works under ``torch.compile`` and autocast.

    Args:
        x: input, shape (N, C, H, W), ``memory_format=torch.channels_last``.
        weight: filters, shape (K, C / groups, R, S), of `x`'s dtype.
        bias: shape (K,), or None.
        stride, padding: an integer, or a pair (vertical, horizontal).
        groups: C and K are multiples of it.
        activation: None, ``"relu"``, ``"silu"`` or ``"gelu"`` (the exact one, with erf).

    Returns:
        Shape (N, K, P, Q), of `x`'s dtype.

    Raises:
        InvalidInput: `activation` is unknown, or a tensor argument has the wrong rank.
        RuntimeError: PyTorch refuses the arguments.
    """
    name = "none" if activation is None else activation
    if name not in ACTIVATE:
        raise InvalidInput("activation", activation, f"None or one of {', '.join(ACTIVATIONS)}")
    for field, tensor, rank in (("x", x, 4), ("weight", weight, 4), ("bias", bias, 1)):
        if tensor is not None and tensor.dim() != rank:
            raise InvalidInput(field, tuple(tensor.shape), f"a tensor of {rank} dimensions")
    strides, paddings = _pair("stride", stride), _pair("padding", padding)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        # The activation's gradient needs its input, so it is not fused.
        out: Tensor = _conv2d_op(x, weight, bias, strides, paddings, groups, "none")
        return ACTIVATE[name](out)
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        out = _conv2d_op(x, weight, bias, strides, paddings, groups, name)
        return out
    return _run(x, weight, bias, strides, paddings, groups, name)


def use_predictor(predictor: Predictor) -> None:
    """Let `predictor` choose from now on, in place of the newest model of the package."""
    global _predictor
    _predictor = predictor
    _plans.clear()


def _current_predictor() -> Predictor:
    global _predictor
    if _predictor is None:
        _predictor = Predictor.load()
    return _predictor


def _pair(field: str, value: int | _Pair) -> _Pair:
    if isinstance(value, int):
        return (value, value)
    if len(value) != 2:
        raise InvalidInput(field, value, "an integer or a pair of integers")
    return (value[0], value[1])


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: _Pair,
    padding: _Pair,
    groups: int,
    activation: str,
) -> Tensor:
    """Launch the chosen kernel, or PyTorch's operator; no gradients."""
    if (
        x.is_cuda
        and x.dtype in _DTYPES
        and weight.dtype is x.dtype
        and weight.device == x.device
        and (bias is None or (bias.dtype is x.dtype and bias.device == x.device))
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.data_ptr() % _ALIGNMENT == 0
        and x.numel() > 0
    ):
        key = (
            *(x.shape, weight.shape, bias is None, x.dtype, x.device.index),
            *(stride, padding, groups, activation),
        )
        try:
            plan = _plans[key]
        except KeyError:
            plan = _make_plan(x, weight, bias, stride, padding, groups, activation)
            if len(_plans) < _MAX_PLANS:
                _plans[key] = plan
        if plan is not None:
            return _launch(plan, x, weight, bias)
    out = F.conv2d(x, weight, bias, stride, padding, 1, groups)
    return ACTIVATE[activation](out)


def _launch(plan: _Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    device = x.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(plan, x, weight, bias)
    if not weight.is_contiguous(memory_format=torch.channels_last):
        weight = weight.contiguous(memory_format=torch.channels_last)
    if weight.data_ptr() % _ALIGNMENT:
        weight = weight.clone(memory_format=torch.channels_last)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    out = torch.empty_strided(plan.out_shape, plan.out_strides, dtype=x.dtype, device=x.device)
    plan.bound.enqueue(
        torch._C._cuda_getCurrentRawStream(device),  # what Triton calls too: no stream object
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
    return out


def _make_plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: _Pair,
    padding: _Pair,
    groups: int,
    activation: str,
) -> _Plan | None:
    """Choose, compile and load for a shape that is new to this process; None for PyTorch's own."""
    n, c, h, w = x.shape
    k, width, r, s = weight.shape
    ordinal = x.device.index
    if groups < 1 or c != width * groups or (bias is not None and len(bias) != k):
        return None  # PyTorch's own error message is the one that its users know
    try:
        problem = Problem(
            *(n, c, h, w, k, r, s),
            stride=stride,
            padding=padding,
            groups=groups,
            dtype=_DTYPES[x.dtype],
            bias=bias is not None,
            activation=activation,
        )
        choice = _current_predictor().choose(problem, driver.device_of(ordinal))
        if choice.family is None or choice.source == "heuristic":
            log.debug("%s: PyTorch's own operator (%s)", problem, choice.source)
            return None
        log.debug("%s: %s %s (%s)", problem, choice.family, choice.config, choice.source)
        return _load(problem, all_families()[choice.family], choice.config_id or 0, ordinal)
    except (InvalidProblem, UnknownDevice) as error:
        log.debug("PyTorch's own operator: %s", error)
    except ConfpredError as error:  # a damaged model, a driver that refuses: worth a look
        log.warning("PyTorch's own operator: %s", error)
    return None


def _load(problem: Problem, family: Family, row: int, ordinal: int) -> _Plan:
    launch = family.launch(problem, row)
    compiled = compile_kernel(family.source(problem, row), driver.device_of(ordinal).arch)
    with torch.cuda.device(ordinal):
        driver.make_current(ordinal)
        loaded = driver.load(compiled, launch.smem_bytes)
    k, p, q = problem.k, problem.p, problem.q
    return _Plan(
        driver.BoundLaunch(loaded.kernel, launch),
        out_shape=(problem.n, k, p, q),
        out_strides=(p * q * k, 1, q * k, k),
    )


@torch.library.custom_op("confpred::conv2d", mutates_args=())
def _conv2d_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    groups: int,
    activation: str,
) -> Tensor:
    pairs = ((stride[0], stride[1]), (padding[0], padding[1]))
    return _run(x.detach(), weight.detach(), bias, *pairs, groups, activation)


@_conv2d_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    groups: int,
    activation: str,
) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding, 1, groups)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.stride, ctx.padding, ctx.groups, ctx.activation = inputs
    ctx.bias_sizes = None if bias is None else list(bias.shape)
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.activation != "none":
        raise InvalidInput("activation", ctx.activation, "none, where gradients are asked for")
    x, weight = ctx.saved_tensors
    grads = torch.ops.aten.convolution_backward(
        *(gradient, x, weight, ctx.bias_sizes, ctx.stride, ctx.padding, [1, 1]),
        *(False, [0, 0], ctx.groups),
        [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]],
    )
    return (*grads, None, None, None, None)


_conv2d_op.register_autograd(_backward, setup_context=_setup_context)
