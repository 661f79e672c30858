"""Convolution of plain tensors, without a record of gradients: forward, and both gradients.

forward, backward --> find: which launch serves tensors of these sizes?
                        |-- a candidate that was chosen when a graph was captured (`Hint`)
                        |-- else chosen now, and kept by sizes
                        `-- none: PyTorch's operator
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch import choosing
from confpred.pytorch.choosing import ANY, Wishes
from confpred.pytorch.layers import Geometry, alike, is_channels_last, problem_of, sums_bias
from confpred.pytorch.loading import load
from confpred.pytorch.pointwise import activate, apply_epilogue
from confpred.pytorch.ready import ReadyLaunch, dense

Mask = tuple[bool, bool, bool]  # which gradients of x, weight and bias are asked for
Grads = tuple["Tensor | None", "Tensor | None", "Tensor | None"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A candidate that was chosen when a graph was captured.

    Attributes:
        image: N, C, H, W of the convolution's input that it was chosen for.
        candidate: a kernel's config, a library's plan, or PyTorch's operator.
    """

    image: tuple[int, ...]
    candidate: Candidate = PYTORCH_OPERATOR


def is_deterministic() -> bool:
    """Return whether PyTorch is told to compute what is the same to the bit each time."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
    hint: Hint | None = None,
    wishes: Wishes = ANY,
) -> Tensor:
    """Compute ``activation(conv2d(x, weight, bias) + residual)`` of plain tensors.

    Args:
        x: shape (N, C, H, W).
        weight: shape (K, C / groups, R, S).
        bias: shape (K,), or None.
        residual: a tensor that can be added to shape (N, K, P, Q), or None.
        geometry: stride, padding, dilation, groups.
        activation: one of `confpred.problem.conv2d.ACTIVATIONS`.
        hint: the candidate to launch where the sizes are those that it was chosen for.
        wishes: for choices made now.
    """
    ready = forward_launch(x, weight, bias, residual, geometry, activation, hint, wishes)
    if ready is not None:
        given = (x, weight, bias, residual)
        return ready.run(*(None if t is None else dense(t) for t in given))[0]
    stride, padding, dilation, groups = geometry
    more = (stride, padding, dilation, False, (0, 0), groups)
    if residual is None and activation == "none":
        return torch.convolution(x, weight, bias, *more)
    if not x.is_cuda:
        out = torch.convolution(x, weight, bias, *more)
        return activate(activation, out if residual is None else out + residual)
    out = torch.convolution(x, weight, None, *more)
    if residual is None or (residual.shape == out.shape and residual.dtype is out.dtype):
        return apply_epilogue(out, bias, residual, activation)
    return activate(activation, apply_epilogue(out, bias, None, "none") + residual)


def forward_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
    hint: Hint | None = None,
    wishes: Wishes = ANY,
) -> ReadyLaunch | None:
    """Return the launch that serves such tensors; None for PyTorch's operator."""
    if not alike(x, weight, bias, residual) or not is_channels_last(x):
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None  # PyTorch says what is wrong
    fields = {"bias": bias is not None, "activation": activation, "residual": residual is not None}
    ready = _find("fprop", x, x.shape, weight.shape, geometry, fields, hint, wishes)
    if ready is not None and residual is not None:
        problem: Any = ready.choice.problem
        if residual.shape != (problem.n, problem.k, problem.p, problem.q):
            return None  # one that is broadcast
    return ready


def backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    mask: Mask,
    hints: tuple[Hint | None, Hint | None] = (None, None),
    wishes: Wishes = ANY,
) -> Grads:
    """Compute the gradients of a convolution of plain tensors of one dtype.

    Args:
        out_grad: shape (N, K, P, Q).
        x, weight: as of `forward`.
        geometry: stride, padding, dilation, groups.
        mask: which of the gradients of x, weight and bias are asked for.
        hints: the candidates for the gradients of x and of weight.
        wishes: for choices made now.

    Returns:
        Three gradients, None where `mask` says so.
    """
    grad_x = grad_weight = grad_bias = None
    if alike(out_grad, x, weight):
        run_x, run_weight = backward_launches(x, weight, geometry, mask, hints, wishes)
        if run_x is not None or run_weight is not None:
            out_grad = dense(out_grad)
        if run_x is not None:
            (grad_x,) = run_x.run(out_grad, dense(weight))
        if run_weight is not None:
            grad_weight, *grads_bias = run_weight.run(out_grad, x)
            grad_bias = grads_bias[0] if grads_bias else None
    left = (
        mask[0] and grad_x is None,
        mask[1] and grad_weight is None,
        mask[2] and grad_bias is None,
    )
    if left == (False, False, True):
        grad_bias = out_grad.sum((0, 2, 3))
    elif any(left):
        stride, padding, dilation, groups = geometry
        sizes = [weight.shape[0]] if mask[2] else None
        rest = torch.ops.aten.convolution_backward.default(
            out_grad, x, weight, sizes, stride, padding, dilation, False, (0, 0), groups, list(left)
        )
        grad_x = rest[0] if left[0] else grad_x
        grad_weight = rest[1] if left[1] else grad_weight
        grad_bias = rest[2] if left[2] else grad_bias
    return grad_x, grad_weight, grad_bias if mask[2] else None


def backward_launches(
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    mask: Mask,
    hints: tuple[Hint | None, Hint | None] = (None, None),
    wishes: Wishes = ANY,
) -> tuple[ReadyLaunch | None, ReadyLaunch | None]:
    """Return the launches of the gradients of `x` and `weight`; None for PyTorch's operator."""
    if not alike(x, weight) or not is_channels_last(x):
        return None, None
    image, filters = x.shape, weight.shape
    run_x = run_weight = None
    if mask[0]:
        run_x = _find("dgrad", x, image, filters, geometry, {}, hints[0], wishes)
    if mask[1]:
        bias = mask[2] and sums_bias(geometry[3])
        fields = {"bias": bias, "deterministic": is_deterministic()}
        run_weight = _find("wgrad", x, image, filters, geometry, fields, hints[1], wishes)
    return run_x, run_weight


def _find(
    direction: str,
    x: Tensor,
    image: Sequence[int],
    filters: Sequence[int],
    geometry: Geometry,
    fields: dict[str, Any],
    hint: Hint | None,
    wishes: Wishes,
) -> ReadyLaunch | None:
    """Return the launch for these sizes on `x`'s device; None for PyTorch's operator."""
    dtype, ordinal = x.dtype, x.get_device()
    exact = dtype is torch.float32 and not convolutions_allow_tf32()
    key = (
        direction, image, filters, dtype, ordinal, geometry, tuple(fields.values()), exact, hint,
        wishes,
    )  # fmt: skip

    def find() -> ReadyLaunch | None:
        problem = problem_of(direction, image, filters, dtype, geometry, **fields)
        return None if problem is None else _chosen(problem, ordinal, hint, wishes)

    return choosing.kept(key, find)


def _chosen(
    problem: Problem, ordinal: int, hint: Hint | None, wishes: Wishes
) -> ReadyLaunch | None:
    if hint is not None and hint.image == (problem.n, problem.c, problem.h, problem.w):
        if hint.candidate == PYTORCH_OPERATOR:
            return None
        # A plan or kernel that was chosen under other switches may not be legal under these.
        choice: Choice | None = Choice(problem, "", "pinned", hint.candidate)
        if problem.direction == "wgrad" and problem.deterministic:
            choice = choosing.choose(problem, ordinal, wishes)
    else:
        choice = choosing.choose(problem, ordinal, wishes)
    if choice is None or not choosing.is_ours(choice):
        return None
    return load(choice, ordinal, wishes.limits)
