"""How the kernel of ``grouped_wgrad.cu`` walks a layer's window."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from confpred.problem.conv2d import Problem


@dataclass(frozen=True, slots=True)
class Steps:
    """A window's steps along one axis, once what stride and dilation have in common is divided out.

    Attributes:
        stride, dilation: what is left of them; one of the two is 1.
        step: what was divided out, in input elements.
    """

    stride: int
    dilation: int
    step: int


def _steps(window: int, stride: int, dilation: int) -> Steps:
    if window == 1:
        dilation = stride  # with one tap any will do: take the one that leaves no stride
    step = gcd(stride, dilation)
    return Steps(stride // step, dilation // step, step)


@dataclass(frozen=True, slots=True)
class Window:
    """What decides a kernel apart from its config: window, group width, steps, bias gradient."""

    group_width: int
    r: int
    s: int
    vertical: Steps
    horizontal: Steps
    bias: bool


def window_of(problem: Problem) -> Window:
    """The part of `problem` that decides its kernels."""
    return Window(
        problem.group_width,
        problem.r,
        problem.s,
        _steps(problem.r, problem.stride[0], problem.dilation[0]),
        _steps(problem.s, problem.stride[1], problem.dilation[1]),
        problem.bias,
    )


def flush_steps(problem: Problem) -> int:
    """How many steps without a gradient row follow an image's last one.

    They must be enough for the input rows that the last gradient row still meets, and enough to
    clear it from the buffer for the next image. Steps in which the
    next image brings only padding help to clear it, so fewer are needed where there is padding.
    """
    axis = window_of(problem).vertical
    live = -(-problem.r // axis.stride)
    rows = -(-problem.p // axis.dilation)
    flush = 0
    for phase in range(axis.dilation):
        # Input rows begin at `top`; a step brings in `stride` of them, `pitch` apart.
        top = phase * problem.stride[0] - problem.padding[0]
        pitch = axis.step * axis.dilation
        step = axis.stride * pitch
        hidden = -((top + step - pitch) // step)  # steps whose last row is above the image
        met = -((top + rows * step - problem.h) // step)  # those whose first one is not below it
        hidden, met = (min(max(0, steps), live - 1) for steps in (hidden, met))
        flush = max(flush, live - 1 - hidden, met)
    return flush
