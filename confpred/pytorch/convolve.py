"""Convolution of plain tensors, without a record of gradients: forward, and both gradients.

forward, backward --> find: which launch serves tensors of these sizes?
                        |-- a candidate that was chosen when a graph was captured (`Hint`)
                        |-- else chosen now, and kept by sizes
                        `-- none: PyTorch's operator, with what follows it where one does both
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch import choosing
from confpred.pytorch.choosing import Wishes
from confpred.pytorch.layers import (
    Call,
    Hint,
    alike,
    is_channels_last,
    is_deterministic,
    problem_of,
    sums_bias,
)
from confpred.pytorch.library import FusedOperator
from confpred.pytorch.loading import load
from confpred.pytorch.pointwise import activate, apply_epilogue
from confpred.pytorch.ready import ReadyLaunch, dense

Grads = tuple["Tensor | None", "Tensor | None", "Tensor | None"]


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor:
    """Compute ``activation(conv2d(x, weight, bias) + residual)`` of plain tensors.

    Args:
        x: shape (N, C, H, W).
        weight: shape (K, C / groups, R, S).
        bias: shape (K,), or None.
        residual: a tensor that can be added to shape (N, K, P, Q), or None.
        call: all else.
    """
    ready = forward_launch(x, weight, bias, residual, call)
    if ready is not None:
        given = (x, weight, bias, residual)
        return ready.run(*(None if t is None else dense(t) for t in given))[0]
    if not x.is_cuda or (residual is None and call.activation == "none"):
        out = torch.convolution(x, weight, bias, *call.arguments)
        return activate(call.activation, out if residual is None else out + residual)
    out = torch.convolution(x, weight, None, *call.arguments)
    if residual is None or (residual.shape == out.shape and residual.dtype is out.dtype):
        return apply_epilogue(out, bias, residual, call.activation)
    return activate(call.activation, apply_epilogue(out, bias, None, "none") + residual)


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
    ready = _find("fprop", x, weight, call, fields, call.hints[0])
    if ready is not None and residual is not None:
        problem: Any = ready.choice.problem
        if residual.shape != (problem.n, problem.k, problem.p, problem.q):
            return None  # one that is broadcast
    return ready


def backward(out_grad: Tensor, x: Tensor, weight: Tensor, call: Call) -> Grads:
    """Compute the gradients of a convolution of plain tensors of one dtype.

    Args:
        out_grad: shape (N, K, P, Q).
        x, weight, call: as of `forward`.

    Returns:
        The gradients of `x`, `weight` and bias, None where the mask of `call` says so.
    """
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
    found, mask = (grad_x, grad_weight, grad_bias), call.mask
    left = [wanted and grad is None for wanted, grad in zip(mask, found, strict=True)]
    if left == [False, False, True]:
        return grad_x, grad_weight, out_grad.sum((0, 2, 3))
    if any(left):
        sizes = [weight.shape[0]] if mask[2] else None
        rest = torch.ops.aten.convolution_backward.default(
            out_grad, x, weight, sizes, *call.arguments, left
        )
        grad_x, grad_weight, grad_bias = (
            other if missing else grad
            for other, missing, grad in zip(rest, left, found, strict=True)
        )
    return grad_x, grad_weight, grad_bias


def backward_launches(
    x: Tensor, weight: Tensor, call: Call
) -> tuple[ReadyLaunch | None, ReadyLaunch | None]:
    """Return the launches of the gradients of `x` and `weight`; None for PyTorch's operator."""
    run_x = run_weight = None
    if alike(x, weight) and is_channels_last(x):
        if call.mask[0]:
            run_x = _find("dgrad", x, weight, call, {}, call.hints[0])
        if call.mask[1]:
            bias = call.mask[2] and sums_bias(call.geometry[3])
            fields = {"bias": bias, "deterministic": is_deterministic()}
            run_weight = _find("wgrad", x, weight, call, fields, call.hints[1])
    return run_x, run_weight


def _find(
    direction: str, x: Tensor, weight: Tensor, call: Call, fields: dict[str, Any], hint: Hint | None
) -> Any:
    """Return the launch for these sizes on `x`'s device; None for PyTorch's operator."""
    dtype, ordinal, geometry, wishes = x.dtype, x.get_device(), call.geometry, call.wishes
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
        return None if problem is None else _chosen(problem, ordinal, hint, wishes)

    return choosing.kept(key, find)


def _chosen(
    problem: Problem, ordinal: int, hint: Hint | None, wishes: Wishes
) -> ReadyLaunch | FusedOperator | None:
    choice: Choice | None
    # A plan or kernel that was chosen under other switches may not be legal under these.
    is_bound = problem.direction == "wgrad" and problem.deterministic
    if hint is None or hint.image != (problem.n, problem.c, problem.h, problem.w):
        choice = choosing.choose(problem, ordinal, wishes)
    elif hint.candidate == PYTORCH_OPERATOR or not is_bound:
        choice = Choice(problem, "", "pinned", hint.candidate)
    else:
        choice = choosing.choose(problem, ordinal, wishes)
    if choice is None or not choosing.is_ours(choice):
        return FusedOperator.of(problem)
    return load(choice, ordinal, wishes.limits)
