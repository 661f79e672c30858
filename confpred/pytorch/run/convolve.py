"""Convolution of plain tensors, without a record of gradients: forward, and both gradients.

The launch for tensors of some sizes is of a candidate that was chosen when a graph was captured
(`Hint`), else of one that is chosen now and kept, else PyTorch's operator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from confpred.errors import InvalidProblem
from confpred.launch.assignment import MOST_READ, Assignment, text_of
from confpred.problem.activation import activated
from confpred.problem.conv2d import Problem
from confpred.problem.limits import Limits
from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch.run import library, loading
from confpred.pytorch.run.choosing import ANY, Wishes, kept
from confpred.pytorch.run.library import FusedOperator
from confpred.pytorch.run.loading import (
    DTYPES,
    ReadyLaunch,
    aligned,
    alike,
    dense,
    is_channels_last,
)
from confpred.pytorch.run.pointwise import apply_epilogue

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups
Mask = tuple[bool, bool, bool]  # which gradients of x, weight and bias are asked for
Grads = tuple["Tensor | None", ...]  # of x, weight and bias


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a convolution that are no tensors.

    Attributes:
        geometry: stride, padding, dilation, groups.
        mask: of the backward pass.
        hints: what was assigned when a graph was captured, to the forward pass, or to the gradients
            of x and of weight; launched where the problem is the same.
        wishes: for choices made now.
    """

    geometry: Geometry
    activation: str = "none"
    mask: Mask = (False, False, False)
    hints: tuple[Assignment | None, ...] = (None, None)
    wishes: Wishes = ANY

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of ``aten::convolution`` behind its tensors."""
        stride, padding, dilation, groups = self.geometry
        return stride, padding, dilation, False, (0, 0), groups

    def text(self) -> str:
        """Return this call as one text; `read` is the way back."""
        hints = [hint and hint.to_json() for hint in self.hints]
        limits, max_regret = list(self.wishes.limits.to_json().values()), self.wishes.max_regret
        return text_of([self.geometry, self.activation, self.mask, hints, limits, max_regret])

    @staticmethod
    @lru_cache(MOST_READ)
    def read(text: str) -> Call:
        """Return the call whose `text` this is."""
        (*pairs, groups), activation, mask, hints, limits, max_regret = json.loads(text)
        return Call(
            (*map(tuple, pairs), groups), activation, tuple(mask),
            tuple(hint and Assignment.from_json(hint) for hint in hints),
            Wishes(Limits(*limits), max_regret),
        )  # fmt: skip


def problem_of(
    direction: str, image: Sequence[int], filters: Sequence[int], dtype: torch.dtype,
    geometry: Geometry, **epilogue: Any,
) -> Problem | None:  # fmt: skip
    """Return the problem of a layer; None for what no confpred kernel is made for. `image` and
    `filters` are N, C, H, W and K, C / groups, R, S in every direction."""
    stride, padding, dilation, groups = geometry
    if dtype not in DTYPES or len(image) != 4 or len(filters) != 4:
        return None
    if groups < 1 or image[1] != filters[1] * groups:
        return None  # PyTorch's own error message is the one that its users know
    n, c, h, w = image
    k, _, r, s = filters
    try:
        return Problem(
            n, c, h, w, k, r, s, stride=stride, padding=padding, dilation=dilation, groups=groups,
            dtype=DTYPES[dtype], direction=direction, **epilogue,
        )  # fmt: skip
    except InvalidProblem:  # a size is out of range, or the output would be empty
        return None


def sums_bias(groups: int) -> bool:
    """Return whether the problem of a filter's gradient has the gradient of the bias in it: kernels
    of grouped layers sum it on their way. No plan of cuDNN's does, so PyTorch's sum follows."""
    return groups > 1


def is_deterministic() -> bool:
    """Return whether PyTorch is set to compute what is the same to the bit each time."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor:
    """Compute ``activation(conv2d(x, weight, bias) + residual)`` of plain tensors; `residual` can
    be added to shape (N, K, P, Q)."""
    ready = forward_launch(x, weight, bias, residual, call)
    if ready is not None:
        given = (x, weight, bias, residual)
        return ready.run(*(None if t is None else dense(t) for t in given))[0]
    _, padding, _, groups = call.geometry
    if residual is None and library.takes_pixels(x, weight, padding, groups):
        return library.of_pixels(x, weight, bias, call.activation)
    x, weight = aligned(x), aligned(weight)  # cuDNN's heuristics may end in a misaligned load
    if not x.is_cuda or (residual is None and call.activation == "none"):
        out = torch.convolution(x, weight, bias, *call.arguments)
        return activated(call.activation, out if residual is None else out + residual)
    out = torch.convolution(x, weight, None, *call.arguments)
    if residual is None or (residual.shape == out.shape and residual.dtype is out.dtype):
        return apply_epilogue(out, bias, residual, call.activation)
    return activated(call.activation, apply_epilogue(out, bias, None, "none") + residual)


def forward_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: Call
) -> ReadyLaunch | FusedOperator | None:
    """Return the launch that `forward` takes; None for PyTorch's convolution."""
    if not alike(x, weight, bias, residual) or not is_channels_last(x):
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None  # PyTorch says what is wrong
    has_bias, has_residual = bias is not None, residual is not None
    fields = {"bias": has_bias, "activation": call.activation, "residual": has_residual}
    ready: ReadyLaunch | FusedOperator | None
    ready = _find("fprop", x, weight, call, fields)
    if ready is not None and residual is not None:
        p: Any = ready.assignment.problem
        if residual.shape != (p.n, p.k, p.p, p.q):
            return None  # one that is broadcast
    return ready


def backward(out_grad: Tensor, x: Tensor, weight: Tensor, call: Call) -> Grads:
    """Compute the gradients of a convolution of plain tensors of one dtype; None where the mask of
    `call` says so."""
    grad_x = grad_weight = grad_bias = None
    if alike(out_grad, x, weight):
        run_x, run_weight = backward_launches(x, weight, call)
        if run_x is not None or run_weight is not None:
            out_grad = dense(out_grad)
        if run_x is not None:
            (grad_x,) = run_x.run(out_grad, dense(weight))
        if run_weight is not None:
            grad_weight, *more = run_weight.run(out_grad, dense(x))
            grad_bias = more[0] if more else None
    found = (grad_x, grad_weight, grad_bias)
    left = [wanted and grad is None for wanted, grad in zip(call.mask, found, strict=True)]
    if left == [False, False, True]:
        return grad_x, grad_weight, out_grad.sum((0, 2, 3))
    if any(left):
        out_grad, x, weight = (aligned(t) for t in (out_grad, x, weight))
        rest = backward_by_pytorch(out_grad, x, weight, call, left)
        return tuple(a if missing else b for a, missing, b in zip(rest, left, found, strict=True))
    return found


def backward_by_pytorch(
    out_grad: Tensor, x: Tensor, weight: Tensor, call: Call, mask: Sequence[bool]
) -> Grads:
    """Compute those gradients of a convolution that `mask` asks for by PyTorch's operator."""
    sizes = [weight.shape[0]] if mask[2] else None
    return torch.ops.aten.convolution_backward.default(  # type: ignore[no-any-return]
        out_grad, x, weight, sizes, *call.arguments, list(mask)
    )


def backward_launches(
    x: Tensor, weight: Tensor, call: Call
) -> tuple[ReadyLaunch | None, ReadyLaunch | None]:
    """Return the launches of the gradients of `x` and `weight`; None for PyTorch's operator."""
    run_x = run_weight = None
    if alike(x, weight) and is_channels_last(x):
        if call.mask[0]:
            run_x = _find("dgrad", x, weight, call, {})
        if call.mask[1]:
            bias = call.mask[2] and sums_bias(call.geometry[3])
            fields = {"bias": bias, "deterministic": is_deterministic()}
            run_weight = _find("wgrad", x, weight, call, fields)
    return run_x, run_weight


def _find(
    direction: str, x: Tensor, weight: Tensor, call: Call, fields: dict[str, Any]
) -> Any:  # fmt: skip
    """Return the launch for these sizes on `x`'s device; None for PyTorch's convolution."""
    dtype, ordinal, geometry, wishes = x.dtype, x.get_device(), call.geometry, call.wishes
    hint = call.hints[direction == "wgrad"]
    switches = (
        dtype is torch.float32 and not convolutions_allow_tf32(), torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    key = (
        direction, x.shape, weight.shape, dtype, ordinal, geometry, *fields.values(), *switches,
        hint, wishes,
    )  # fmt: skip

    def find() -> ReadyLaunch | FusedOperator | None:
        problem = problem_of(direction, x.shape, weight.shape, dtype, geometry, **fields)
        if problem is None:
            return None
        if hint is not None and hint.problem == problem:
            ready = loading.load(hint, ordinal, wishes.limits)
        else:  # a kernel that was chosen for other sizes or switches may not be legal
            ready = loading.choose_and_load(problem, ordinal, wishes)
        return ready or FusedOperator.of(problem)

    return kept(key, find)
