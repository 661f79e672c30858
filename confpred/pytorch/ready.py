"""Launches that are ready to run: chosen, compiled and loaded once for each shape."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.compiler import compile_kernel
from confpred.cuda.launch import BoundLaunch
from confpred.errors import ConfpredError, InvalidProblem, UnknownDevice
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.families.protocol import Family
from confpred.families.registry import all_families
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.operation import SCRATCH, ZEROED
from confpred.pytorch.workspace import workspace

log = logging.getLogger(__name__)

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
ALIGNMENT = 16  # bytes; the kernels load this much at a time
CHANNELS_LAST = torch.channels_last
_MOST_KEPT = 65_536
#: Operands in the order in which `launch` is given them, outputs first.
_NAMES = {
    "fprop": ("out", "in", "filter", "bias", "residual"),
    "dgrad": ("in_grad", "out_grad", "filter"),
    "wgrad": ("filter_grad", "bias_grad", "out_grad", "in"),
}
Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups


@dataclass(frozen=True, slots=True)
class ReadyLaunch:
    """A launch for one shape.

    Attributes:
        bound: the launch, which lacks only the addresses of its operands.
        outputs: shape and strides of each output; None for one that was not asked for.
        zeroed_bytes, scratch_bytes: see `confpred.problem.operation.Launch`.
    """

    bound: BoundLaunch
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...]
    zeroed_bytes: int
    scratch_bytes: int


_ready: dict[Any, ReadyLaunch | None] = {}  # None: PyTorch's own operator
_predictor: Predictor | None = None  # loaded when it is first needed


def use_predictor(predictor: Predictor) -> None:
    """Let `predictor` choose from now on, in place of the newest model of the package."""
    global _predictor
    _predictor = predictor
    _ready.clear()


def _current_predictor() -> Predictor:
    global _predictor
    if _predictor is None:
        _predictor = Predictor.load()
    return _predictor


def ready_launch(*key: Any) -> ReadyLaunch | None:
    """The launch for a shape, by the arguments of `_make_ready`; None for PyTorch's own
    operator."""
    try:
        return _ready[key]
    except KeyError:
        made = _make_ready(*key)
        if len(_ready) < _MOST_KEPT:
            _ready[key] = made
        return made


def launch(ready: ReadyLaunch, like: Tensor, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The outputs of `ready`, of `like`'s dtype and device; empty where one was not asked for."""
    device = like.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(ready, like, inputs)
    outputs = [
        like.new_empty(0)
        if layout is None
        else torch.empty_strided(*layout, dtype=like.dtype, device=like.device)
        for layout in ready.outputs
    ]
    dense = [None if t is None else _dense(t) for t in inputs]
    addresses = [0 if t is None else t.data_ptr() for t in (*outputs, *dense)]
    # Triton calls this function too; it makes no stream object.
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not ready.zeroed_bytes and not ready.scratch_bytes:
        ready.bound.enqueue(stream, addresses)
        return outputs
    space = workspace(ready.zeroed_bytes, ready.scratch_bytes, like.device, stream)
    with space.lock:
        ends = (space.zeroed.data_ptr(), space.scratch.data_ptr())
        ready.bound.enqueue(stream, [*addresses, *ends])
    return outputs


def _dense(t: Tensor) -> Tensor:
    """`t` as the kernels read it: channels last, or a dense vector; aligned."""
    layout = CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format
    t = t.contiguous(memory_format=layout)
    return t.clone(memory_format=layout) if t.data_ptr() % ALIGNMENT else t


def _make_ready(
    direction: str,
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    dtype: torch.dtype,
    ordinal: int,
    geometry: Geometry,
    epilogue: tuple[bool, str, bool, bool],
) -> ReadyLaunch | None:
    """Choose, compile and load for a shape that is new to this process; None for PyTorch's own
    operator."""
    n, c, h, w = x_shape
    k, width, r, s = weight_shape
    stride, padding, dilation, groups = geometry
    bias, activation, residual, deterministic = epilogue
    if groups < 1 or c != width * groups:
        return None  # PyTorch's own error message is the one that its users know
    try:
        problem = Problem(
            n=n,
            c=c,
            h=h,
            w=w,
            k=k,
            r=r,
            s=s,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            dtype=DTYPES[dtype],
            direction=direction,
            bias=bias,
            activation=activation,
            residual=residual,
            deterministic=deterministic,
        )
        choice = _current_predictor().choose(problem, driver.device_of(ordinal))
        candidate = choice.candidate
        if candidate == PYTORCH_OPERATOR or choice.source == "heuristic":
            log.debug("%s: PyTorch's own operator (%s)", problem, choice.source)
            return None
        log.debug("%s: %s %s (%s)", problem, candidate.provider, choice.config, choice.source)
        family = all_families()[candidate.provider]
        return _load(problem, family, candidate.config_id, ordinal)
    except (InvalidProblem, UnknownDevice) as error:
        log.debug("PyTorch's own operator: %s", error)
    except ConfpredError as error:  # such as a damaged model: worth a look
        log.warning("PyTorch's own operator: %s", error)
    return None


def _load(problem: Problem, family: Family, row: int, ordinal: int) -> ReadyLaunch:
    launch = family.launch(problem, row)
    arch = driver.device_of(ordinal).arch
    compiled = [compile_kernel(step.kernel, arch) for step in launch.steps]
    with torch.cuda.device(ordinal):
        driver.make_current(ordinal)
        kernels = [
            driver.load(kernel, step.smem_bytes).kernel
            for kernel, step in zip(compiled, launch.steps, strict=True)
        ]
    names = _NAMES[problem.direction]
    tensors = {o.name: o for o in CONVOLUTION.operands(problem)}
    outputs = names[: 2 if problem.direction == "wgrad" else 1]
    return ReadyLaunch(
        BoundLaunch(kernels, launch, (*names, ZEROED, SCRATCH)),
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
