"""Norms, each with its activation and residual as one operator for each direction.

    forward    norm -> [+ residual] -> [activation]
    backward   the gradients of both; the activation's argument is recomputed from the input

So the normalised tensor is neither stored nor read again. For sizes that no kernel takes, PyTorch's
operators compute the same.

`forward` and `backward` are batch norm. `group_forward` and `group_backward` are the norms that
`confpred.problem.norm_of_groups` describes: of images with their channels in dimension 1, channels
last; of rows, where a problem has one pixel a sample, with their channels in the last dimension.
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
from confpred.problem.norm_of_groups import AFFINE, Norm
from confpred.pytorch.run import loading
from confpred.pytorch.run.choosing import cached
from confpred.pytorch.run.loading import ALIGNMENT, DTYPES, ReadyLaunch, dense

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit_functional.default
_FROZEN = aten._native_batch_norm_legit_no_training.default
_NORM_BACKWARD = aten.native_batch_norm_backward.default
_GROUPS = aten.native_group_norm.default
_GROUPS_BACKWARD = aten.native_group_norm_backward.default


def problem_of(
    shape: Sequence[int], dtype: torch.dtype, direction: str, activation: str, *, residual: bool,
    affine: bool, frozen: bool,
) -> BatchNorm | None:  # fmt: skip
    """Return the problem of a batch norm of images N, C, H, W; None if no record describes it.

    `residual`: a tensor is added behind the norm. `affine`: there are weight and bias. `frozen`:
    mean and variance are the running ones.
    """
    n, c, h, w = shape
    try:
        return BatchNorm(
            n, h, w, c, dtype=DTYPES[dtype], activation=activation, direction=direction,
            residual=_reads_residual(residual, direction, activation), affine=affine, frozen=frozen,
        )  # fmt: skip
    except (InvalidProblem, KeyError):  # a dtype that kernels do not have
        return None


def group_problem_of(
    sizes: Sequence[int], dtype: torch.dtype, direction: str, activation: str, *, residual: bool,
    weights: Sequence[Tensor], centred: bool,
) -> Norm | None:  # fmt: skip
    """Return the problem of a call; None if `Norm` does not describe it: PyTorch computes it.

    `sizes` are the numbers of samples, pixels, channels and groups. `weights` are weight and bias,
    if any, of one dtype; one of two dimensions has a row for each sample. RMS norm is not
    `centred`.
    """
    n, p, c, groups = sizes
    try:
        return Norm(
            n, p, c, groups, dtype=DTYPES[dtype], activation=activation, direction=direction,
            residual=_reads_residual(residual, direction, activation), affine=AFFINE[len(weights)],
            weights=DTYPES[weights[0].dtype] if weights else "float32",
            adaptive=any(t.dim() > 1 for t in weights), centred=centred,
        )  # fmt: skip
    except (InvalidProblem, KeyError):
        return None


def _reads_residual(residual: bool, direction: str, activation: str) -> bool:
    """Return whether a residual is read: without an activation its gradient is the output's."""
    return residual and not (direction == "backward" and activation == "none")


# The operators


def _launch(
    images: Sequence[Tensor | None], weights: Sequence[Tensor | None],
    statistics: Sequence[Tensor], text: str,
) -> tuple[Any, ReadyLaunch | None, list[Any]]:  # fmt: skip
    """Return the assigned problem, its launch, and `images` laid out for it; the launch is None
    where PyTorch's operators compute these tensors.

    Args:
        images: tensors of the activations' shape, None for an absent one, the first one given.
        weights: weight and bias.
        statistics: float32 vectors that the kernel reads.
        text: the assignment, as `Assignment.text` returns it.
    """
    assigned = Assignment.read(text)
    p: Any = assigned.problem
    tensors, affine = ([t for t in group if t is not None] for group in (images, weights))
    # The number and dtype of weight and bias are `count` and `kind`.
    x, dtype, count, kind = tensors[0], getattr(torch, p.dtype), 2 * p.affine, torch.float32
    if isinstance(p, Norm):
        count, kind = AFFINE.index(p.affine), getattr(torch, p.weights)
    vectors = [*((t, torch.float32) for t in statistics), *((t, kind) for t in affine)]
    if not x.is_cuda or not _fits(p, x.shape):
        return p, None, []
    if len(tensors) != 1 + p.residual + p.is_backward or len(affine) != count:
        return p, None, []
    if any(t.shape != x.shape or t.dtype is not dtype or t.device != x.device for t in tensors):
        return p, None, []
    if any(t.dtype is not d or not t.is_contiguous() or t.device != x.device for t, d in vectors):
        return p, None, []
    ordinal = x.get_device()
    ready = cached(("norm", assigned, ordinal), lambda: loading.load(assigned, ordinal))
    return p, ready, [None if t is None else _dense(p, t) for t in images]


def _fits(p: Any, shape: torch.Size) -> bool:
    """Return whether activations of `shape` are those of problem `p`."""
    if not isinstance(p, Norm):
        return shape == (p.n, p.c, p.h, p.w)
    if p.p == 1:
        return shape[-1] == p.c and shape.numel() == p.n * p.c
    return shape[:2] == (p.n, p.c) and shape.numel() == p.n * p.c * p.p


def _gradients(
    ready: ReadyLaunch, images: Sequence[Tensor | None], vectors: Sequence[Tensor | None],
    numbers: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch a backward pass, and return the gradients of input, weight, bias and residual, empty
    for an absent one. `images` are the output's gradient, the input and the residual; `vectors`
    begin with weight and bias; `numbers` are the kernel's last operands."""
    x: Any = images[1]
    empty, results = x.new_empty(0), iter(ready.run(*images, *vectors, *numbers))
    in_grad = next(results).view(x.shape)
    residual_grad = empty if images[2] is None else next(results).view(x.shape)
    grads = [empty if t is None else next(results) for t in vectors[:2]]
    return in_grad, *grads, residual_grad


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    running_mean: Tensor, running_var: Tensor, numbers: Sequence[Tensor], momentum: float,
    eps: float, text: str, *, in_place: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute ``activation(batch_norm(x) + residual)`` by the batch's statistics.

    Return it, the mean, ``1 / sqrt(variance + eps)`` and the new running statistics, which are also
    written to `running_mean` and `running_var` if `in_place`. For a frozen norm all but the first
    are empty. `numbers` are device tensors for kernels: of `eps` and, unless frozen, of `momentum`.
    The graph makes them: tensors that outlive it must not be in the memory pool of its CUDA graph.
    `text` is the assignment."""
    vectors = (weight, bias, running_mean, running_var)
    p, ready, images = _launch([x, residual], vectors[:2], vectors[2:], text)
    if ready is not None:
        homes = {} if p.frozen else {3: running_mean, 4: running_var}  # by output of the kernel
        direct = in_place and all(t.data_ptr() % ALIGNMENT == 0 for t in homes.values())
        results = ready.run(*images, *vectors, *numbers, into=homes if direct else {})
        if direct:
            return tuple(results)
        out, *others = results
    else:
        operands = (x, weight, bias, running_mean, running_var)
        out, *others = (
            _FROZEN(*operands, momentum, eps) if p.frozen else _NORM(*operands, True, momentum, eps)
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
    """Compute the gradients of `x`, weight, bias and residual from that of the output; empty for an
    absent one. A frozen norm gets the running mean and variance as `mean` and `invstd`, and `eps`
    in `numbers`, which are empty for others. `text` is the assignment."""
    vectors = (weight, bias, mean, invstd)
    p, ready, images = _launch([out_grad, x, residual], vectors[:2], vectors[2:], text)
    if ready is not None:
        return _gradients(ready, images, vectors, numbers)
    grad, empty = out_grad, x.new_empty(0)
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
    grads = _NORM_BACKWARD(grad, x, weight, *running, mean, invstd, not p.frozen, eps, mask)
    in_grad, *others = (empty if t is None else t for t in grads)
    return dense(in_grad), *others, empty if residual is None else dense(grad)


def fake_forward(x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """Return fake results of `forward`; `others` end in its text."""
    p: Any = Assignment.read(others[-1]).problem
    vector = x.new_empty(0 if p.frozen else x.shape[1], dtype=torch.float32)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out, *(torch.empty_like(vector) for _ in range(4))


def group_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    numbers: Sequence[Tensor], eps: float, text: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``activation(norm(x) + residual)``; return it with the mean, empty where none is
    subtracted, and ``1 / sqrt(variance + eps)``, both (samples, groups) in float32. Adaptive
    weights are (samples, channels). `numbers` has a device tensor of `eps` for kernels, and `text`
    is the assignment."""
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    p, ready, images = _launch([x, residual], [weight, bias], [], text)
    mean = x.new_empty(0, dtype=torch.float32)
    if ready is not None:
        out, *statistics = ready.run(*images, weight, bias, *numbers)
        out = out.view(x.shape)
    else:
        out, *statistics = _normalise(p, x, weight, bias, eps)
        out = activated(p.activation, out if residual is None else out + residual)
        out, statistics = _dense(p, out.to(x.dtype)), [t.float() for t in statistics]
    return out, *([] if p.centred else [mean]), *statistics  # type: ignore[return-value]


def group_backward(
    out_grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, mean: Tensor, invstd: Tensor, text: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of `x`, weight, bias and residual from that of the output; empty for an
    absent one. Weights are not adaptive. `text` is the assignment."""
    p, ready, images = _launch([out_grad, x, residual], [weight, bias], [mean, invstd], text)
    if ready is not None:
        return _gradients(ready, images, (weight, bias, mean if p.centred else None, invstd), [])
    rows = _rows(p, x, weight)
    n, c, size = rows.shape
    empty, sides = x.new_empty(0), (-1, 1)
    unit = rows.view(n, p.groups, -1) - (mean[..., None] if p.centred else 0.0)
    unit = (unit * invstd[..., None]).view(rows.shape)  # the normalised input, in float32
    grad = out_grad.to(rows.dtype)
    if p.activation != "none":
        argument = unit * (1.0 if weight is None else weight.view(sides))
        argument = argument + (0.0 if bias is None else bias.view(sides))
        argument = argument.view(x.shape) + (0.0 if residual is None else residual)
        grad = argument_grad(p.activation, grad, argument.to(rows.dtype))
    grads: Any
    grad_rows = _rows(p, grad, weight)
    if p.centred:
        mask = [True, weight is not None, bias is not None]
        statistics = (mean.to(rows.dtype), invstd.to(rows.dtype))
        grads = _GROUPS_BACKWARD(grad_rows, rows, *statistics, weight, n, c, size, p.groups, mask)
    else:
        product = grad_rows.float() * (1 if weight is None else weight.view(sides))
        projected = (product * unit).mean(1, keepdim=True)
        of_weight = None if weight is None else (grad_rows * unit).sum((0, 2)).to(weight.dtype)
        grads = ((product - unit * projected) * invstd[..., None], of_weight, None)
    in_grad, *others = (empty if t is None else t for t in grads)
    residual_grad = empty if residual is None else _dense(p, grad.to(x.dtype))
    return _dense(p, in_grad.view(x.shape).to(x.dtype)), *others, residual_grad


def _normalise(
    p: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Return the normalised tensor and its statistics by PyTorch's operators, of any sizes. `p` is
    the problem at the capture."""
    rows, own = _rows(p, x, weight), (None, None) if p.adaptive else (weight, bias)
    n, c, size = rows.shape
    if p.centred:
        out, *statistics = _GROUPS(rows, *own, n, c, size, p.groups, eps)
    else:
        statistics = [torch.rsqrt(rows.float().square().mean(1) + eps)]
        out = rows * statistics[0][..., None] * (1.0 if weight is None else weight[:, None])
    if p.adaptive and weight is not None:
        out = out * weight[..., None] + (0 if bias is None else bias[..., None])
    return out.to(rows.dtype).view(x.shape), *statistics


def _rows(p: Norm, t: Tensor, weight: Tensor | None) -> Tensor:
    """Return `t` as (samples, channels, pixels), as PyTorch's operators take it; in float32 where
    the weights have another dtype, as under autocast."""
    t = t.float() if weight is not None and weight.dtype is not t.dtype else t
    return t.reshape(-1, t.shape[-1], 1) if p.p == 1 else t.flatten(2).contiguous()


def layout_read(p: Any) -> str:
    """Return the layout in which kernels of problem `p` read and write its activations."""
    return "channels_first" if isinstance(p, Norm) and p.p == 1 else "channels_last"


def _dense(p: Any, t: Tensor) -> Tensor:
    """Return `t` in the layout that kernels read."""
    return dense(t, layout_read(p))


def fake_group_forward(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return fake results of `group_forward`; `others` end in its text."""
    p: Any = Assignment.read(others[-1]).problem
    samples = x.numel() // x.shape[-1] if p.p == 1 else x.shape[0]
    invstd = x.new_empty(samples, p.groups, dtype=torch.float32)
    mean = torch.empty_like(invstd) if p.centred else invstd.new_empty(0)
    return _dense(p, torch.empty_like(x)), mean, invstd


def fake_backward(
    _: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return fake results of `backward` or `group_backward`; `others` end in its text."""
    p = Assignment.read(others[-1]).problem
    fakes = [None if t is None else torch.empty_like(t) for t in (x, weight, bias, residual)]
    like, *grads, of_residual = (x.new_empty(0) if t is None else t for t in fakes)
    return _dense(p, like), *grads, _dense(p, of_residual)
