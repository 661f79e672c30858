"""The PyTorch front: `conv2d` picks its kernels by itself, compiles them once and launches them.

    conv2d --+-- gradients, torch.compile --> torch.ops.confpred.conv2d ---------> _forward
             |                                    .conv2d_input_grad ------------> _input_grad
             |                                    .conv2d_filter_grad -----------> _filter_grad
             +-- eager inference ------------------------------------------------> _forward

         a kernel is legal and predicted to win: launched on PyTorch's current stream
         else: PyTorch's own operator

Eager calls do without the dispatcher where they can: a custom operator in Python costs more than
the launch itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from confpred.convolution import CONVOLUTION
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
from confpred.operation import SCRATCH, ZEROED
from confpred.predictor import Predictor
from confpred.problem import ACTIVATIONS, Problem

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
except ImportError as error:
    raise MissingExtra("torch", "gpu") from error

log = logging.getLogger(__name__)

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ALIGNMENT = 16  # bytes; the kernels load this much at a time
_MAX_PLANS = 65_536
_LAST = torch.channels_last
#: Operands in the order in which `_launch` is given them, outputs first.
_NAMES = {
    "fprop": ("out", "in", "filter", "bias", "residual"),
    "dgrad": ("in_grad", "out_grad", "filter"),
    "wgrad": ("filter_grad", "bias_grad", "out_grad", "in"),
}
_Pair = tuple[int, int]
_Geometry = tuple[_Pair, _Pair, _Pair, int]  # stride, padding, dilation, groups


@dataclass(frozen=True, slots=True)
class _Plan:
    """A ready launch for one shape: nothing is left to decide.

    Attributes:
        outputs: shape and strides of each output; None for one that was not asked for.
        zeroed_bytes, scratch_bytes: see `confpred.operation.Launch`.
    """

    bound: driver.BoundLaunch
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...]
    zeroed_bytes: int
    scratch_bytes: int


@dataclass(slots=True)
class _Workspace:
    """What launches on one stream share; `lock` keeps the steps of a launch together."""

    zeroed: Tensor
    scratch: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)


_plans: dict[Any, _Plan | None] = {}
_workspaces: dict[tuple[int, int], _Workspace] = {}  # by device and stream
_predictor: Predictor | None = None  # loaded when it is first needed


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | _Pair = 1,
    padding: int | _Pair = 0,
    dilation: int | _Pair = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(torch.nn.functional.conv2d(x, weight, bias, ...) + residual)``, by the fastest
    kernel.

    Our kernels serve channels-last CUDA tensors of grouped and depthwise layers, in the forward
    and in the backward pass; everything else, and every layer where PyTorch's operator is predicted
    to be faster, goes to PyTorch (logged at level debug). Works under ``torch.compile`` and
    autocast. The filter's gradient is repeatable to the bit where PyTorch is asked for
    deterministic algorithms.

    Args:
        x: input, shape (N, C, H, W), ``memory_format=torch.channels_last``.
        weight: filters, shape (K, C / groups, R, S), of `x`'s dtype.
        bias: shape (K,), or None.
        stride, padding, dilation: an integer, or a pair (vertical, horizontal).
        groups: C and K are multiples of it.
        activation: None, ``"relu"``, ``"silu"``, ``"gelu"`` (the exact one, with erf), ``"relu6"``
            or ``"hardswish"``.
        residual: shape (N, K, P, Q), added before the activation, or None.

    Returns:
        Shape (N, K, P, Q), of `x`'s dtype.

    Raises:
        InvalidInput: `activation` is unknown, or a tensor argument has the wrong rank.
        RuntimeError: PyTorch refuses the arguments.
    """
    name = "none" if activation is None else activation
    if name not in ACTIVATIONS:
        raise InvalidInput("activation", activation, f"None or one of {', '.join(ACTIVATIONS)}")
    tensors = (("x", x, 4), ("weight", weight, 4), ("bias", bias, 1), ("residual", residual, 4))
    for argument, tensor, rank in tensors:
        if tensor is not None and tensor.dim() != rank:
            raise InvalidInput(argument, tuple(tensor.shape), f"a tensor of {rank} dimensions")
    geometry = (
        _pair("stride", stride),
        _pair("padding", padding),
        _pair("dilation", dilation),
        groups,
    )
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        residual = None if residual is None else residual.to(dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for _, t, _ in tensors):
        # The activation's gradient needs its input, so neither it nor what precedes it is fused.
        out: Tensor = _conv2d_op(x, weight, bias, None, *geometry, "none")
        return _activate(name, out if residual is None else out + residual)
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        out = _conv2d_op(x, weight, bias, residual, *geometry, name)
        return out
    return _forward(x, weight, bias, residual, geometry, name)


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


def _pair(name: str, value: int | _Pair) -> _Pair:
    if isinstance(value, int):
        return (value, value)
    if len(value) != 2:
        raise InvalidInput(name, value, "an integer or a pair of integers")
    return (value[0], value[1])


def _activate(name: str, x: Tensor) -> Tensor:
    if name == "none":
        return x
    activated: Tensor = getattr(F, name)(x)  # confpred's names are PyTorch's
    return activated


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: _Geometry,
    activation: str,
) -> Tensor:
    """Launch the chosen kernel, or PyTorch's operator; no gradients."""
    if _ours(x, weight, bias, residual):
        epilogue = (bias is not None, activation, residual is not None, False)
        plan = _plan_of("fprop", x.shape, weight.shape, x.dtype, x.device.index, geometry, epilogue)
        if plan is not None and (residual is None or residual.shape == plan.outputs[0][0]):  # type: ignore[index]
            return _launch(plan, x, (x, weight, bias, residual))[0]
    stride, padding, dilation, groups = geometry
    out = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _activate(activation, out if residual is None else out + residual)


def _input_grad(out_grad: Tensor, x: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
    """Gradient of `x`, of which only shape and layout count."""
    if _ours(x, weight, out_grad):
        epilogue = (False, "none", False, False)
        plan = _plan_of("dgrad", x.shape, weight.shape, x.dtype, x.device.index, geometry, epilogue)
        if plan is not None:
            return _launch(plan, out_grad, (out_grad, weight))[0]
    grad: Tensor = _pytorch_backward(out_grad, x, weight, geometry, [True, False, False])[0]
    return grad


def _filter_grad(
    out_grad: Tensor, x: Tensor, weight: Tensor, with_bias: bool, geometry: _Geometry
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `weight`, of which only the shape counts, and of the bias."""
    if _ours(x, weight, out_grad):
        deterministic = (
            torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
        )
        epilogue = (with_bias, "none", False, deterministic)
        plan = _plan_of("wgrad", x.shape, weight.shape, x.dtype, x.device.index, geometry, epilogue)
        if plan is not None:
            grads = _launch(plan, x, (out_grad, x))
            return grads[0], grads[1] if with_bias else None
    grads = _pytorch_backward(out_grad, x, weight, geometry, [False, True, with_bias])
    return grads[1], grads[2]


def _pytorch_backward(
    out_grad: Tensor, x: Tensor, weight: Tensor, geometry: _Geometry, mask: list[bool]
) -> Any:
    stride, padding, dilation, groups = geometry
    return torch.ops.aten.convolution_backward(
        *(out_grad, x, weight, [weight.shape[0]] if mask[2] else None),
        *(stride, padding, dilation, False, (0, 0), groups, mask),
    )


def _ours(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels of ours can take these tensors, as far as it depends on them alone."""
    return (
        x.is_cuda
        and x.dtype in _DTYPES
        and x.is_contiguous(memory_format=_LAST)
        and x.data_ptr() % _ALIGNMENT == 0
        and x.numel() > 0
        and all(t is None or (t.dtype is x.dtype and t.device == x.device) for t in others)
    )


def _plan_of(*key: Any) -> _Plan | None:
    try:
        return _plans[key]
    except KeyError:
        plan = _make_plan(*key)
        if len(_plans) < _MAX_PLANS:
            _plans[key] = plan
        return plan


def _launch(plan: _Plan, like: Tensor, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The outputs of `plan`, of `like`'s dtype and device; empty where one was not asked for."""
    device = like.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(plan, like, inputs)
    outputs = [
        like.new_empty(0)
        if layout is None
        else torch.empty_strided(*layout, dtype=like.dtype, device=like.device)
        for layout in plan.outputs
    ]
    dense = [None if t is None else _dense(t) for t in inputs]
    addresses = [0 if t is None else t.data_ptr() for t in (*outputs, *dense)]
    # What Triton calls too: no stream object is made.
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not plan.zeroed_bytes and not plan.scratch_bytes:
        plan.bound.enqueue(stream, addresses)
        return outputs
    space = _workspace(plan, like.device, stream)
    with space.lock:
        ends = (space.zeroed.data_ptr(), space.scratch.data_ptr())
        plan.bound.enqueue(stream, [*addresses, *ends])
    return outputs


def _dense(t: Tensor) -> Tensor:
    """`t` as the kernels read it: channels last, or a dense vector; aligned."""
    layout = _LAST if t.dim() == 4 else torch.contiguous_format
    t = t.contiguous(memory_format=layout)
    return t.clone(memory_format=layout) if t.data_ptr() % _ALIGNMENT else t


def _workspace(plan: _Plan, device: torch.device, stream: int) -> _Workspace:
    """At least the workspace that `plan` needs. Launches on a stream follow one another and share
    one; a CUDA graph, which may be replayed on any stream, gets its own."""

    def make(zeroed: int, scratch: int) -> _Workspace:
        return _Workspace(
            torch.zeros(zeroed, dtype=torch.uint8, device=device),
            torch.empty(scratch, dtype=torch.uint8, device=device),
        )

    if torch.cuda.is_current_stream_capturing():
        return make(plan.zeroed_bytes, plan.scratch_bytes)
    key = (device.index, stream)
    space = _workspaces.get(key)
    if space is None or (
        len(space.zeroed) < plan.zeroed_bytes or len(space.scratch) < plan.scratch_bytes
    ):
        have = (0, 0) if space is None else (len(space.zeroed), len(space.scratch))
        space = make(max(plan.zeroed_bytes, have[0]), max(plan.scratch_bytes, have[1]))
        _workspaces[key] = space
    return space


def _make_plan(
    direction: str,
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    dtype: torch.dtype,
    ordinal: int,
    geometry: _Geometry,
    epilogue: tuple[bool, str, bool, bool],
) -> _Plan | None:
    """Choose, compile and load for a shape that is new to this process; None for PyTorch's own."""
    n, c, h, w = x_shape
    k, width, r, s = weight_shape
    stride, padding, dilation, groups = geometry
    bias, activation, residual, deterministic = epilogue
    if groups < 1 or c != width * groups:
        return None  # PyTorch's own error message is the one that its users know
    try:
        problem = Problem(
            *(n, c, h, w, k, r, s, stride, padding, dilation, groups, _DTYPES[dtype]),
            direction=direction,
            bias=bias,
            activation=activation,
            residual=residual,
            deterministic=deterministic,
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
    arch = driver.device_of(ordinal).arch
    compiled = [compile_kernel(step.source, arch) for step in launch.steps]
    with torch.cuda.device(ordinal):
        driver.make_current(ordinal)
        kernels = [
            driver.load(kernel, step.smem_bytes).kernel
            for kernel, step in zip(compiled, launch.steps, strict=True)
        ]
    names = _NAMES[problem.direction]
    tensors = {o.name: o for o in CONVOLUTION.operands(problem)}
    outputs = names[: 2 if problem.direction == "wgrad" else 1]
    return _Plan(
        driver.BoundLaunch(kernels, launch, (*names, ZEROED, SCRATCH)),
        tuple(_layout(tensors[name].shape) if name in tensors else None for name in outputs),
        launch.zeroed_bytes,
        launch.scratch_bytes,
    )


def _layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, as PyTorch counts them, of a tensor whose dense shape is `shape`."""
    if len(shape) == 1:
        return shape, (1,)
    n, h, w, c = shape
    return (n, c, h, w), (h * w * c, 1, w * c, c)


@torch.library.custom_op("confpred::conv2d", mutates_args=())
def _conv2d_op(
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
    return _forward(x.detach(), weight.detach(), bias, residual, geometry, activation)


@_conv2d_op.register_fake
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
    return _input_grad(out_grad, x, weight, _geometry(stride, padding, dilation, groups))


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
    filter_grad, bias_grad = _filter_grad(out_grad, x, weight, with_bias, geometry)
    return (
        filter_grad.contiguous(memory_format=_LAST),
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
    filter_grad = torch.empty_like(weight, memory_format=_LAST)
    return filter_grad, x.new_empty(weight.shape[0] if with_bias else 0)


def _geometry(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> _Geometry:
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
            _input_grad(out_grad, x, weight, geometry)
            if eager
            else _input_grad_op(out_grad, x, weight, *ctx.geometry)
        )
    if needs_weight:
        grad_weight, grad_bias = (
            _filter_grad(out_grad, x, weight, needs_bias, geometry)
            if eager
            else _filter_grad_op(out_grad, x, weight, needs_bias, *ctx.geometry)
        )
    elif needs_bias:
        grad_bias = out_grad.sum((0, 2, 3))
    return (grad_x, grad_weight, grad_bias if needs_bias else None, *(None,) * 6)


_conv2d_op.register_autograd(_backward, setup_context=_setup_context)
