"""`linear_chain`: successive linear layers, by the family that is predicted to be fastest within
the error that the caller allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.errors import InvalidInput, InvalidProblem
from confpred.problem.activation import activated
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.linear_chain import MOST_LAYERS, LinearChain
from confpred.problem.precision import allows_tf32
from confpred.pytorch.eager import is_plain
from confpred.pytorch.run.choosing import Constraints, cached
from confpred.pytorch.run.loading import DTYPES, ReadyLaunch, alike, choose_and_load
from confpred.pytorch.run.pointwise import activation_named


def linear_chain(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    activation: str | None = "relu",
    last: bool = True,
    max_error: float | None = None,
    limits: Limits | None = None,
) -> Tensor:
    """Compute ``x = activation(torch.nn.functional.linear(x, weight, bias))`` for each weight and
    bias, in one call.

    Without gradients, on plain contiguous CUDA tensors of one dtype, with one width between, the
    fastest predicted way computes all layers: PyTorch's operators, products with bias and ReLU in
    their epilogue, or Strassen's algorithm where `max_error` allows it. PyTorch's operators compute
    other chains. Float32 products use TF32 where PyTorch's do.

    Args:
        x: shape (..., features of the first weight).
        weights: each of shape (features after, features before).
        biases: one a weight, or None.
        activation: after each layer; as of `confpred.conv2d`.
        last: whether it follows the last layer too.
        max_error: largest relative error of the result in the 2-norm, against float64; None for
            that of PyTorch's own operators, which excludes Strassen's algorithm.
        limits: further limits; `max_error` overrides their ``max_error``.

    Returns:
        Shape (..., features of the last weight), of `x`'s dtype.

    Raises:
        InvalidInput: `activation`, `max_error` or `limits` is not allowed, there is no weight, or
            the biases are not as many as the weights.
        RuntimeError: PyTorch refuses the arguments.
    """
    name = activation_named(activation)
    if not weights:
        raise InvalidInput("weights", weights, "at least one weight")
    if biases is not None and len(biases) != len(weights):
        allowed = f"one for each of {len(weights)} weights, or None"
        raise InvalidInput("biases", f"{len(biases)} biases", allowed)
    bound = UNLIMITED if limits is None else Constraints(limits).limits
    bound = bound if max_error is None else replace(bound, max_error=max_error)
    for start in range(0, len(weights), MOST_LAYERS):
        part = slice(start, start + MOST_LAYERS)
        some = None if biases is None else biases[part]
        ready = _launch(x, weights[part], some, name, last or part.stop < len(weights), bound)
        if ready is not None:
            (out,) = ready.run(x.reshape(-1, x.shape[-1]), *operands(weights[part], some))
            x = out.view(*x.shape[:-1], -1)
            continue
        for index, weight in enumerate(weights[part], start):
            x = F.linear(x, weight, None if biases is None else biases[index])
            if last or index < len(weights) - 1:
                x = activated(name, x)
    return x


def operands(weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the inputs of a chain after the first, in the order of the operation's operands."""
    if biases is None:
        return list(weights)
    return [t for pair in zip(weights, biases, strict=True) for t in pair]


def _launch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, activation: str,
    last: bool, limits: Limits,
) -> ReadyLaunch | None:  # fmt: skip
    """Return the launch of at most ``MOST_LAYERS`` layers; None for PyTorch's operators."""
    tensors = (x, *weights, *(biases or ()))
    if torch.compiler.is_compiling() or not is_plain(*tensors) or not alike(x, *tensors):
        return None
    if torch.is_autocast_enabled("cuda") or any(t.is_neg() for t in tensors):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    problem = problem_of(x, weights, biases, activation, last)
    ordinal = x.get_device()
    if problem is None or not all(t.is_contiguous() for t in tensors):
        return None

    def find() -> ReadyLaunch | None:
        return choose_and_load(problem, ordinal, Constraints(limits))

    return cached(("chain", problem, ordinal, limits), find)


def problem_of(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, activation: str,
    last: bool,
) -> LinearChain | None:  # fmt: skip
    """Return the problem of a chain; None if these are no chain, or the output is empty."""
    if x.dim() < 1 or x.numel() == 0 or x.dtype not in DTYPES or any(w.dim() != 2 for w in weights):
        return None
    widths = [x.shape[-1], *(w.shape[0] for w in weights)]
    fits = all(w.shape[1] == before for w, before in zip(weights, widths, strict=False))
    if biases is not None:
        fits &= all(b.shape == (after,) for b, after in zip(biases, widths[1:], strict=True))
    between = set(widths[1:-1]) or {widths[-1]}
    if not fits or len(between) > 1:
        return None
    try:
        return LinearChain(
            x.numel() // widths[0], widths[0], between.pop(), widths[-1], len(weights),
            dtype=DTYPES[x.dtype], tf32=x.dtype is torch.float32 and allows_tf32(),
            activation=activation, bias=biases is not None, last=last,
        )  # fmt: skip
    except InvalidProblem:  # larger than any that is measured
        return None
