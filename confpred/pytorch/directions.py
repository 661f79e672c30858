"""Convolution without gradients: by a kernel of ours, or by PyTorch's own operator.

`forward` looks up what serves tensors of these shapes and layouts, and finds it the first time:

    served[key]   None             PyTorch's own operator
                  a function       PyTorch's own operator and an epilogue of ours
                  a ReadyLaunch    ours, at once
                  while compiling  PyTorch's own operator, until our kernel is there
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from confpred.problem.limits import Limits
from confpred.pytorch import choosing, policy
from confpred.pytorch.choosing import latest, note, remember, served
from confpred.pytorch.fallback import pytorch_fused, pytorch_run
from confpred.pytorch.layers import Geometry, alike, problem_of
from confpred.pytorch.layouts import is_channels_first, is_channels_last
from confpred.pytorch.ready import ReadyLaunch, dense, densely


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
    place: Any,
    limits: Limits | None = None,
) -> Tensor:
    """``activation(conv2d(x, weight, bias) + residual)`` of plain tensors, without gradients.

    Args:
        x: shape (N, C, H, W).
        weight: shape (K, C / groups, R, S).
        bias: shape (K,), or None.
        residual: what can be added to shape (N, K, P, Q), or None.
        geometry: stride, padding, dilation, groups.
        activation: one of `confpred.problem.conv2d.ACTIVATIONS`.
        place: what the caller is told by, hashable; see `confpred.pytorch.choosing.latest`.
        limits: of this call, in place of those of all choices.
    """
    place = place, x.shape, residual is None  # several layers, or shapes, may share what they tell
    known = latest.get(place)
    if known is not None:
        run, agrees, facts = known
        given = (x, weight) if bias is None else (x, weight, bias)
        if residual is not None:
            given = (*given, residual)
        if facts == (geometry, activation, bias is None, residual is None) and agrees(*given):
            out: Tensor = run(x, weight, bias, residual)
            return out
    key = (
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        x.dtype,
        weight.dtype,
        x.get_device(),
        weight.get_device(),
        geometry,
        activation,
        bias if bias is None else (bias.dtype, bias.get_device(), bias.shape, bias.stride()),
        residual if residual is None else _like(residual),
        limits,
    )
    try:
        run = served[key]
    except KeyError:
        run = _find(key, x, weight, bias, residual, geometry, activation, limits)
    if run is None:
        run = partial(pytorch_fused, geometry=geometry, activation=activation)
    facts = (geometry, activation, bias is None, residual is None)
    note(place, run, (x, weight, bias, residual), facts)
    out = run(x, weight, bias, residual)
    return out


def _find(
    key: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
    limits: Limits | None,
) -> Any:
    inputs = (x, weight, bias, residual)
    if not alike(*inputs) or not is_channels_last(x):
        return remember(key, None)
    problem = problem_of(
        "fprop", x.shape, weight.shape, x.dtype, geometry,
        bias=bias is not None, activation=activation, residual=residual is not None,
    )  # fmt: skip
    if problem is None or (bias is not None and bias.shape != (problem.k,)):
        return remember(key, None)
    if residual is not None and residual.shape != (problem.n, problem.k, problem.p, problem.q):
        return remember(key, None)  # one that is broadcast
    found = policy.find(problem, x.get_device(), limits)
    if found is None:
        return remember(key, pytorch_run(geometry, activation, partial(remember, key)))
    if isinstance(found, policy.Pending):
        theirs = partial(pytorch_fused, geometry=geometry, activation=activation)
        again = partial(_find, key, geometry=geometry, activation=activation, limits=limits)
        return remember(key, found.until_then(theirs, again))
    return remember(key, densely(found.run, inputs))


def find_converting(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Any:
    """What serves tensors with their channels first, by a copy into channels last and back, or what
    that waits for; None where PyTorch's own operator is predicted to be faster."""
    if not alike(x, weight, bias) or not is_channels_first(x):
        return None
    problem = problem_of("fprop", x.shape, weight.shape, x.dtype, geometry, bias=bias is not None)
    if problem is None:
        return None
    decided = policy.decide([problem], x.get_device())
    if isinstance(decided, policy.Pending):
        return decided
    (choice,) = decided
    if choice is None or not choosing.converting_pays(choice, x.get_device()):
        return None
    ready = policy.prepare(choice, x.get_device())
    if not isinstance(ready, ReadyLaunch):
        return ready
    run = ready.run

    def convert(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = run(dense(x), dense(weight), None if bias is None else dense(bias))
        return out.contiguous()

    return convert


def _like(t: Tensor) -> tuple[Any, ...]:
    return (t.shape, t.stride(), t.dtype, t.get_device())
