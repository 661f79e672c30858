"""A launch that is ready to run for tensors of one shape: what a call costs the host is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.launch import NoContext
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.operation import SCRATCH, ZEROED, Launch
from confpred.pytorch.streams import Sizes, current_device, current_stream, empty

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CHANNELS_LAST = torch.channels_last
ALIGNMENT = 16  # bytes; the kernels load this much at a time
_UNALIGNED = ALIGNMENT - 1  # an address with any of these bits is not aligned to that
#: What a ready launch computes, and, in the order in which it is given them, of what.
OUTPUTS = {"fprop": ("out",), "dgrad": ("in_grad",), "wgrad": ("filter_grad", "bias_grad")}
INPUTS = {
    "fprop": ("in", "filter", "bias", "residual"),
    "dgrad": ("out_grad", "filter"),
    "wgrad": ("out_grad", "in"),
}
#: Both.
NAMES = {direction: (*OUTPUTS[direction], *INPUTS[direction]) for direction in INPUTS}


Enqueue = Callable[[int, Sequence[int]], None]
#: From the operands' names to what enqueues the launch, given a stream and their addresses.
Bind = Callable[[Sequence[str]], Enqueue]


class ReadyLaunch:
    """A launch for one problem, chosen, compiled and loaded.

    Attributes:
        choice: what it is the launch of; of a convolution.
        tf32: whether it rounds float32 inputs to TF32.
        is_plan: whether it is a plan of a library, not a kernel of ours.
        run: called with the inputs in the order of ``INPUTS``, as tensors of the problem's shapes
            and dtype on the launch's device, None for one that the problem does not have. They have
            to be dense as the kernels read them; what is not aligned is copied. It returns the
            output, or the gradients of filter and bias, the latter None if it is not asked for.
    """

    __slots__ = ("choice", "is_plan", "run", "tf32")

    def __init__(self, choice: Choice, launch: Launch, bind: Bind, ordinal: int) -> None:
        self.choice, self.tf32, self.is_plan = choice, launch.tf32, launch.plan is not None
        problem: Any = choice.problem
        names = NAMES[problem.direction]
        ends = (ZEROED, SCRATCH) if launch.zeroed_bytes or launch.scratch_bytes else ()
        enqueue = bind((*names, *ends))
        enqueue = _with_workspace(enqueue, launch, ordinal) if ends else enqueue
        make = _filter_gradient if problem.direction == "wgrad" else _one_output
        self.run: Callable[..., Any] = make(problem, enqueue, ordinal)


def _with_workspace(plain: Enqueue, launch: Launch, ordinal: int) -> Enqueue:
    """Give each launch memory of its own, from the current stream's pool.

    Memory that is kept between calls would be shared by streams and CUDA graphs.
    """
    device = torch.device("cuda", ordinal)
    zeroed, scratch = launch.zeroed_bytes, launch.scratch_bytes

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        zeros = torch.zeros(zeroed, dtype=torch.uint8, device=device) if zeroed else None
        space = torch.empty(scratch, dtype=torch.uint8, device=device) if scratch else None
        ends = (0 if t is None else t.data_ptr() for t in (zeros, space))
        plain(stream, (*addresses, *ends))

    return enqueue


def _one_output(problem: Problem, enqueue: Enqueue, ordinal: int) -> Callable[..., Tensor]:
    name, *inputs = NAMES[problem.direction]
    size, stride = layout_of(shapes_of(problem)[name])
    dtype: torch.dtype = getattr(torch, problem.dtype)
    epilogue = len(inputs) > 2

    def run(a: Tensor, b: Tensor, c: Tensor | None = None, d: Tensor | None = None) -> Tensor:
        if current_device() != ordinal:
            with torch.cuda.device(ordinal):
                return run(a, b, c, d)
        at_a, at_b = a.data_ptr(), b.data_ptr()
        at_c = 0 if c is None else c.data_ptr()
        at_d = 0 if d is None else d.data_ptr()
        if (at_a | at_b | at_c | at_d) & _UNALIGNED:
            return run(
                aligned(a),
                aligned(b),
                None if c is None else aligned(c),
                None if d is None else aligned(d),
            )
        out: Tensor = empty(size, stride, dtype)
        places = (out.data_ptr(), at_a, at_b, at_c, at_d)
        try:
            enqueue(current_stream(ordinal), places if epilogue else places[:3])
        except NoContext:  # a thread's first use of the GPU, as in the backward pass
            driver.make_current(ordinal)
            return run(a, b, c, d)
        return out

    return run


def _filter_gradient(
    problem: Problem, enqueue: Enqueue, ordinal: int
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    shapes = shapes_of(problem)
    size, stride = layout_of(shapes["filter_grad"])
    channels = shapes.get("bias_grad")
    dtype: torch.dtype = getattr(torch, problem.dtype)

    def run(out_grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if current_device() != ordinal:
            with torch.cuda.device(ordinal):
                return run(out_grad, x)
        at_grad, at_x = out_grad.data_ptr(), x.data_ptr()
        if (at_grad | at_x) & _UNALIGNED:
            return run(aligned(out_grad), aligned(x))
        grad: Tensor = empty(size, stride, dtype)
        bias: Tensor | None = None if channels is None else empty(channels, (1,), dtype)
        at_bias = 0 if bias is None else bias.data_ptr()
        try:
            enqueue(current_stream(ordinal), (grad.data_ptr(), at_bias, at_grad, at_x))
        except NoContext:
            driver.make_current(ordinal)
            return run(out_grad, x)
        return grad, bias

    return run


def dense(t: Tensor) -> Tensor:
    """`t` as the kernels read it: channels last, or a dense vector."""
    return t.contiguous(memory_format=CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format)


def aligned(t: Tensor) -> Tensor:
    layout = CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format
    return t.clone(memory_format=layout) if t.data_ptr() & _UNALIGNED else t


def shapes_of(problem: Problem) -> dict[str, Sizes]:
    return {operand.name: operand.shape for operand in CONVOLUTION.operands(problem)}


def layout_of(shape: Sizes) -> tuple[Sizes, Sizes]:
    """Shape and strides, as PyTorch counts them, of a tensor whose dense shape is `shape`."""
    n, h, w, c = shape
    return (n, c, h, w), (h * w * c, 1, w * c, c)
