"""Batch norms of training, each with its activation and residual as one operator a direction.

    forward    batch norm -> [+ residual] -> [activation]
    backward   the gradient of that, whose argument of the activation is computed again

So the normalised tensor is neither stored nor read again. Both directions of a layer are replaced
together, where that is predicted to save GPU time. A call of other sizes, or one that no kernel
takes, computes the same by PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from confpred.errors import InvalidProblem
from confpred.launch.assignment import Assignment
from confpred.problem.activation import activated, argument_grad
from confpred.problem.norm import BatchNorm
from confpred.pytorch.run import loading
from confpred.pytorch.run.choosing import kept
from confpred.pytorch.run.loading import ALIGNMENT, DTYPES, ReadyLaunch, dense

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit_functional.default
_FROZEN = aten._native_batch_norm_legit_no_training.default
_NORM_BACKWARD = aten.native_batch_norm_backward.default


def problem_of(
    shape: Sequence[int], dtype: torch.dtype, direction: str, activation: str, *, residual: bool,
    affine: bool, frozen: bool,
) -> BatchNorm | None:  # fmt: skip
    """Return the problem of a batch norm of images N, C, H, W; None where there is none."""
    n, c, h, w = shape
    if direction == "backward" and activation == "none":
        residual = False  # its gradient is that of the output
    try:
        return BatchNorm(
            n, h, w, c, dtype=DTYPES[dtype], activation=activation, residual=residual,
            direction=direction, affine=affine, frozen=frozen,
        )  # fmt: skip
    except (InvalidProblem, KeyError):
        return None


# The operators


def _launch(
    images: Sequence[Tensor | None], vectors: Sequence[Tensor | None], text: str
) -> tuple[Any, ReadyLaunch | None]:
    """Return the problem that was assigned, and the launch for these tensors; None for PyTorch's
    operators."""
    assigned = Assignment.read(text)
    p: Any = assigned.problem
    given = [t for t in images if t is not None]
    x, dtype, shape = given[0], getattr(torch, p.dtype), (p.n, p.c, p.h, p.w)
    if len(given) != 1 + p.residual + p.is_backward or (vectors[0] is not None) is not p.affine:
        return p, None
    if not x.is_cuda or any(
        t.shape != shape or t.dtype is not dtype or t.device != x.device for t in given
    ):
        return p, None
    if not all(
        t is None or (t.dtype is torch.float32 and t.is_contiguous() and t.device == x.device)
        for t in vectors
    ):
        return p, None
    ordinal = x.get_device()
    return p, kept(("norm", assigned, ordinal), lambda: loading.load(assigned, ordinal))


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    running_mean: Tensor, running_var: Tensor, numbers: Sequence[Tensor], momentum: float,
    eps: float, text: str, *, in_place: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute ``activation(batch_norm(x) + residual)`` by the batch's statistics; return it, their
    mean, 1 over the root of variance and `eps`, and the new running statistics, which are written
    to `running_mean` and `running_var` where it is `in_place`. All but the first are empty for a
    frozen one. `numbers` are `eps` and `momentum` where kernels read them: the graph makes them, as
    memory that outlives it would be in the pool of its CUDA graph."""
    vectors = (weight, bias, running_mean, running_var)
    p, ready = _launch([x, residual], vectors, text)
    if ready is not None:
        images = [None if t is None else dense(t) for t in (x, residual)]
        homes = {} if p.frozen else {3: running_mean, 4: running_var}
        direct = in_place and all(t.data_ptr() % ALIGNMENT == 0 for t in homes.values())
        found = ready.run(*images, *vectors, *numbers, into=homes if direct else {})
        if direct:
            return tuple(found)
        out, *others = found
    else:
        given = (x, weight, bias, running_mean, running_var)
        out, *others = (
            _FROZEN(*given, momentum, eps) if p.frozen else _NORM(*given, True, momentum, eps)
        )
        out = activated(p.activation, out if residual is None else out + residual)
    if p.frozen:
        return out, *(running_mean.new_empty(0) for _ in range(4))
    mean, invstd, new_mean, new_var = others
    if in_place:
        new_mean, new_var = running_mean.copy_(new_mean), running_var.copy_(new_var)
    return out, mean, invstd, new_mean, new_var


def backward(
    out_grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, mean: Tensor, invstd: Tensor, numbers: Sequence[Tensor], eps: float,
    text: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of `x`, weight, bias and residual from that of the output; empty for
    one that is not there. A frozen one takes the running statistics for `mean` and `invstd`, and
    `eps` in `numbers` too."""
    vectors = (weight, bias, mean, invstd)
    p, ready = _launch([out_grad, x, residual], vectors, text)
    empty = x.new_empty(0)
    if ready is not None:
        images = [None if t is None else dense(t) for t in (out_grad, x, residual)]
        found = iter(ready.run(*images, *vectors, *numbers))
        in_grad = next(found)
        residual_grad = empty if residual is None else next(found)
        grads = (empty, empty) if weight is None else (next(found), next(found))
        return in_grad, *grads, residual_grad
    grad = out_grad
    if p.activation != "none":
        sides = (1, -1, 1, 1)
        one = torch.ones_like(mean) if weight is None else weight
        zero = torch.zeros_like(mean) if bias is None else bias
        scale = (torch.rsqrt(invstd + eps) if p.frozen else invstd) * one
        argument = x.float() * scale.view(sides) + (zero - mean * scale).view(sides)
        argument = (argument if residual is None else argument + residual).to(x.dtype)
        grad = argument_grad(p.activation, out_grad, argument)
    mask = [True, weight is not None, bias is not None]
    running = (mean, invstd) if p.frozen else (None, None)
    each = _NORM_BACKWARD(grad, x, weight, *running, mean, invstd, not p.frozen, eps, mask)
    in_grad, *others = (empty if t is None else t for t in each)
    return dense(in_grad), *others, empty if residual is None else dense(grad)


def fake_forward(x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    p: Any = Assignment.read(others[-1]).problem
    size = 0 if p.frozen else x.shape[1]
    vector = x.new_empty(size, dtype=torch.float32)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out, *(torch.empty_like(vector) for _ in range(4))


def fake_backward(
    _: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    like = torch.empty_like(x, memory_format=torch.channels_last)
    empty = x.new_empty(0)
    grads = (empty if t is None else torch.empty_like(t) for t in (weight, bias))
    return like, *grads, empty if residual is None else torch.empty_like(like)
