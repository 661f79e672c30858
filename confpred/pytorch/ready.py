"""A launch that is ready to run for tensors of one shape: what a call costs the host is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from confpred.cuda.launch import BoundLaunch
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.operation import SCRATCH, ZEROED, Launch
from confpred.pytorch.workspace import workspace

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CHANNELS_LAST = torch.channels_last
ALIGNMENT = 16  # bytes; the kernels load this much at a time
_UNALIGNED = ALIGNMENT - 1  # an address with any of these bits is not aligned to that
#: Operands in the order in which a ready launch is given them, outputs first.
_NAMES = {
    "fprop": ("out", "in", "filter", "bias", "residual"),
    "dgrad": ("in_grad", "out_grad", "filter"),
    "wgrad": ("filter_grad", "bias_grad", "out_grad", "in"),
}
Sizes = tuple[int, ...]
# These three are what `torch.cuda.current_device`, `torch.cuda.current_stream` and
# `torch.empty_strided` come to; PyTorch's own compiler calls them too. They make no objects on the
# way, which is several microseconds a call.
_current_device = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _plain_empty(size: Sizes, stride: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


try:
    from torch._C._dynamo.guards import _empty_strided_cuda as _empty
except ImportError:  # a PyTorch without it
    _empty = _plain_empty


class ReadyLaunch:
    """A launch for one problem, chosen, compiled and loaded; called with its inputs.

    Inputs come in the order of ``_NAMES``, as tensors of the problem's shapes and dtype on the
    launch's device, None where the problem has no such operand. They are copied where they are not
    dense or not aligned as the kernels read them.

    Attributes:
        problem: what it computes.
    """

    __slots__ = (
        "_absent", "_bound", "_dtype", "_ordinal", "_scratch", "_single", "_zeroed", "problem"
    )  # fmt: skip

    def __init__(
        self, problem: Problem, launch: Launch, kernels: Sequence[Any], ordinal: int
    ) -> None:
        self.problem = problem
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._ordinal = ordinal
        self._zeroed, self._scratch = launch.zeroed_bytes, launch.scratch_bytes
        names = _NAMES[problem.direction]
        shapes = {o.name: o.shape for o in CONVOLUTION.operands(problem)}
        ends = (ZEROED, SCRATCH) if self._zeroed or self._scratch else ()
        self._bound = BoundLaunch(kernels, launch, (*names, *ends))
        self._single = _layout(shapes[names[0]])
        #: The filter's gradient has a second output, of the bias.
        self._absent = () if problem.direction != "wgrad" else (shapes.get(names[1]),)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """The only output, or the first one; see `both`."""
        return self._run(inputs)[0]

    def both(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The filter's gradient, and the bias's where the problem asks for it."""
        first, *others = self._run(inputs)
        return first, others[0] if others else None

    def _run(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        if _current_device() != self._ordinal:
            with torch.cuda.device(self._ordinal):
                return self._run(inputs)
        addresses = [0 if t is None else t.data_ptr() for t in inputs]
        for address in addresses:
            if address & _UNALIGNED:
                return self._run([None if t is None else _aligned(t) for t in inputs])
        outputs = [_empty(*self._single, self._dtype)]
        places = [outputs[0].data_ptr()]
        for shape in self._absent:
            if shape is None:
                places.append(0)
            else:
                outputs.append(_empty(shape, (1,), self._dtype))
                places.append(outputs[-1].data_ptr())
        stream = _stream(self._ordinal)
        if not self._zeroed and not self._scratch:
            self._bound.enqueue(stream, places + addresses)
            return outputs
        space = workspace(self._zeroed, self._scratch, outputs[0].device, stream)
        with space.lock:
            ends = [space.zeroed.data_ptr(), space.scratch.data_ptr()]
            self._bound.enqueue(stream, places + addresses + ends)
        return outputs


def _stream(ordinal: int) -> int:
    if _current_stream is None:
        return int(torch.cuda.current_stream(ordinal).cuda_stream)
    return int(_current_stream(ordinal))


def dense(t: Tensor) -> Tensor:
    """`t` as the kernels read it: channels last, or a dense vector."""
    return t.contiguous(memory_format=CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format)


def is_dense(t: Tensor) -> bool:
    """Whether `dense` would return `t` itself."""
    layout = CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format
    return t.is_contiguous(memory_format=layout)


def _aligned(t: Tensor) -> Tensor:
    layout = CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format
    return t.clone(memory_format=layout) if t.data_ptr() & _UNALIGNED else t


def _layout(shape: Sizes) -> tuple[Sizes, Sizes]:
    """Shape and strides, as PyTorch counts them, of a tensor whose dense shape is `shape`."""
    n, h, w, c = shape
    return (n, c, h, w), (h * w * c, 1, w * c, c)


def densely(run: Callable[..., Any], inputs: Sequence[Tensor | None]) -> Callable[..., Any]:
    """`run` itself where all of `inputs` are dense; else `run` after what makes inputs of their
    layout dense."""
    if all(t is None or is_dense(t) for t in inputs):
        return run

    def repacked(*given: Tensor | None) -> Any:
        return run(*(None if t is None else dense(t) for t in given))

    return repacked
