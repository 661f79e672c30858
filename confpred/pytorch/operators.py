"""Convolution as `torch.compile` sees it: operators of PyTorch's dispatcher that choose when they
run.

    confpred::conv2d ---- while a program is traced --+-- it does not pay --> PyTorch's own
     (what users call)                                |-- no gradients -----> conv2d_run
                                                      `-- gradients --------> conv2d_run,
                                                                              conv2d_backward

What a program keeps is only what runs. The dispatcher takes a microsecond for each argument but
tensors, twice for each list, and longer for an operator that has a formula for its gradient; so
`conv2d_run` and `conv2d_backward` have none, and all that is no tensor comes to them as one text.
They are registered without the wrapping of `torch.library.custom_op`, which costs more than a
launch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from confpred import __version__
from confpred.errors import InvalidInput
from confpred.pytorch.directions import forward
from confpred.pytorch.fallback import pytorch_apart
from confpred.pytorch.gradients import backward
from confpred.pytorch.inductor import call_in_programs
from confpred.pytorch.layers import Geometry
from confpred.pytorch.ready import CHANNELS_LAST
from confpred.pytorch.tracing import decision_key, pays

_library = torch.library.Library("confpred", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, SymInt groups, str activation, str made_by='') -> Tensor",
    tags=_TAGS,
)
_library.define(
    "conv2d_run(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str call) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "conv2d_backward(Tensor out_grad, Tensor x, Tensor weight, str call)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
Ints = Sequence[int]
_MOST_TEXTS = 65_536


def geometry_of(stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Geometry:
    return (
        (int(stride[0]), int(stride[1])),
        (int(padding[0]), int(padding[1])),
        (int(dilation[0]), int(dilation[1])),
        int(groups),
    )


@lru_cache(_MOST_TEXTS)
def written(*what: Any) -> str:
    """`what`, of numbers, strings, truth values and tuples of them, as one text; see `read`."""
    return json.dumps(what, separators=(",", ":"))


@lru_cache(_MOST_TEXTS)
def read(text: str) -> tuple[Any, ...]:
    """What was `written`."""
    return _tuples(json.loads(text))  # type: ignore[no-any-return]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _sizes(t: Tensor) -> tuple[int, ...]:
    """So that layers of one geometry have texts of their own; they are places of `forward`."""
    return tuple(int(size) for size in t.shape)


class _Traced(torch.autograd.Function):
    """A convolution without an epilogue, and its gradients, as the operators that run."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        geometry: Geometry,
        activation: str,
    ) -> Tensor:
        return _run(x, weight, bias, residual, geometry, activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, residual, ctx.geometry, activation = inputs
        ctx.fused = activation != "none" or residual is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *out_grads: Tensor) -> Any:
        if ctx.fused:
            raise InvalidInput(
                "activation", "fused", "none and no residual, where gradients are asked for"
            )
        (out_grad,) = out_grads
        x, weight = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        call = written(_sizes(weight), ctx.geometry, mask)
        grads = torch.ops.confpred.conv2d_backward(out_grad, x, weight, call)
        return (*(g if asked else None for g, asked in zip(grads, mask, strict=True)), *(None,) * 3)


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
) -> Tensor:
    call = written(_sizes(weight), geometry, activation)
    return torch.ops.confpred.conv2d_run(x, weight, bias, residual, call)  # type: ignore[no-any-return]


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    activation: str,
    made_by: str = "",
) -> Tensor:
    geometry = geometry_of(stride, padding, dilation, groups)
    given = (x, weight, bias, residual)
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in given]
    if not pays(x, weight, bias, residual, geometry, activation, (wants[0], wants[1], wants[2])):
        return pytorch_apart(x, weight, bias, residual, geometry, activation)
    if any(wants):
        out: Tensor = _Traced.apply(*given, geometry, activation)  # type: ignore[no-untyped-call]
        return out
    return _run(x, weight, bias, residual, geometry, activation)


def _conv2d_run(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: str
) -> Tensor:
    if torch.is_grad_enabled():  # it has no formula for gradients
        with torch.no_grad():
            return _conv2d_run(x, weight, bias, residual, call)
    _, geometry, activation = read(call)
    return forward(x, weight, bias, residual, geometry, activation, call)


def _conv2d_backward(out_grad: Tensor, x: Tensor, weight: Tensor, call: str) -> tuple[Tensor, ...]:
    _, geometry, mask = read(call)
    grads = backward(out_grad, x, weight, geometry, mask, call)
    # A schema has no optional output, and Inductor counts on the strides that were promised.
    return tuple(
        x.new_empty(0)
        if grad is None
        else grad.contiguous(
            memory_format=CHANNELS_LAST if grad.dim() == 4 else torch.contiguous_format
        )
        for grad in grads
    )


_library.impl("conv2d", _conv2d, "CompositeImplicitAutograd")
_library.impl("conv2d_run", _conv2d_run, "CompositeExplicitAutograd")
_library.impl("conv2d_backward", _conv2d_backward, "CompositeExplicitAutograd")


def _fake_conv2d_run(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: str
) -> Tensor:
    _, (stride, padding, dilation, groups), _ = read(call)
    out: Tensor = torch.ops.aten.convolution.default(
        x, weight, bias, stride, padding, dilation, False, [0, 0], groups
    )
    return out if residual is None else out + residual


def _fake_conv2d_backward(
    out_grad: Tensor, x: Tensor, weight: Tensor, call: str
) -> tuple[Tensor, ...]:
    mask = read(call)[2]
    return (
        torch.empty_like(x, memory_format=CHANNELS_LAST) if mask[0] else x.new_empty(0),
        torch.empty_like(weight, memory_format=CHANNELS_LAST) if mask[1] else x.new_empty(0),
        x.new_empty(weight.shape[0]) if mask[2] else x.new_empty(0),
    )


torch.library.register_fake("confpred::conv2d_run", _fake_conv2d_run, lib=_library)
torch.library.register_fake("confpred::conv2d_backward", _fake_conv2d_backward, lib=_library)
call_in_programs(torch.ops.confpred.conv2d_run.default, _conv2d_run)
call_in_programs(torch.ops.confpred.conv2d_backward.default, _conv2d_backward)


def traced(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
) -> Tensor:
    """The same in a program that is being traced: an operator that chooses when it runs."""
    made_by = decision_key(x.device.index) if x.is_cuda else __version__
    geometry_and_more = *geometry, activation, made_by
    out: Tensor = torch.ops.confpred.conv2d(x, weight, bias, residual, *geometry_and_more)
    return out
