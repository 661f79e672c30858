"""The operators that rewritten graphs call: ``torch.ops.confpred``.

    conv2d            convolution, scale and shift or bias, residual, activation
    conv2d_backward   both gradients of a convolution
    scale_shift       batch norm by known statistics, with residual and activation
    fold              batch norms of a graph as filters and biases, or scales and shifts

What is no tensor comes to the convolutions as one text (`Call`): the dispatcher takes a microsecond
for each argument. They have no formula for gradients; graphs of training call both directions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confpred.families.candidate import Candidate
from confpred.problem.limits import Limits
from confpred.pytorch import convolve, pointwise
from confpred.pytorch import fold as folding
from confpred.pytorch.choosing import ANY, Wishes, kept
from confpred.pytorch.convolve import Hint, Mask
from confpred.pytorch.layers import Geometry
from confpred.pytorch.ready import CHANNELS_LAST


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a convolution that are no tensors.

    Attributes:
        geometry: stride, padding, dilation, groups.
        activation: one of `confpred.problem.conv2d.ACTIVATIONS`.
        mask: of the backward pass: which gradients of x, weight and bias are asked for.
        hints: the candidates of the forward pass, or of the gradients of x and of weight.
        wishes: for tensors of other sizes than the hints'.
    """

    geometry: Geometry
    activation: str = "none"
    mask: Mask = (False, False, False)
    hints: tuple[Hint | None, ...] = (None, None)
    wishes: Wishes = ANY

    def text(self) -> str:
        """Return this call as JSON; `read` is the way back."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    def read(text: str) -> Call:
        """Return the call whose `text` this is."""
        return kept(("call", text), lambda: Call._read(text))

    @staticmethod
    def _read(text: str) -> Call:
        fields = json.loads(text)
        hints = tuple(
            None if h is None else Hint(tuple(h["image"]), Candidate(**h["candidate"]))
            for h in fields["hints"]
        )
        stride, padding, dilation, groups = fields["geometry"]
        wishes = fields["wishes"]
        return Call(
            (tuple(stride), tuple(padding), tuple(dilation), groups),
            fields["activation"],
            tuple(fields["mask"]),
            hints,
            Wishes(Limits(**wishes["limits"]), wishes["max_regret"]),
        )


_library = torch.library.Library("confpred", "FRAGMENT")
# Kernels read one layout: Inductor keeps the strides that the graph was captured with.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_TAGS = (torch.Tag.pt2_compliant_tag, _STRIDES)


def _define(schema: str, run: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"confpred::{name}", fake, lib=_library)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    call: str,
) -> Tensor:
    told = Call.read(call)
    with torch.no_grad():
        if scale is None or bias is None:
            return convolve.forward(
                x, weight, bias, residual, told.geometry, told.activation, told.hints[0],
                told.wishes,
            )  # fmt: skip
        stride, padding, dilation, groups = told.geometry
        out = torch.convolution(x, weight, None, stride, padding, dilation, False, (0, 0), groups)
        return pointwise.scale_shift(out, scale, bias, residual, told.activation, in_place=True)


def _fake_conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    call: str,
) -> Tensor:
    stride, padding, dilation, groups = Call.read(call).geometry
    out: Tensor = torch.ops.aten.convolution.default(
        x, weight, None, stride, padding, dilation, False, [0, 0], groups
    )
    return out


_define(
    "conv2d(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, str call)"
    " -> Tensor",
    _conv2d,
    _fake_conv2d,
)


def _conv2d_backward(out_grad: Tensor, x: Tensor, weight: Tensor, call: str) -> tuple[Tensor, ...]:
    told = Call.read(call)
    with torch.no_grad():
        grads = convolve.backward(
            out_grad, x, weight, told.geometry, told.mask, (told.hints[0], told.hints[1]),
            told.wishes,
        )  # fmt: skip
    # A schema has no optional result, and the strides are those that were promised.
    return tuple(
        x.new_empty(0)
        if grad is None
        else grad.contiguous(
            memory_format=CHANNELS_LAST if grad.dim() == 4 else torch.contiguous_format
        )
        for grad in grads
    )


def _fake_conv2d_backward(
    out_grad: Tensor, x: Tensor, weight: Tensor, call: str
) -> tuple[Tensor, ...]:
    mask = Call.read(call).mask
    return (
        torch.empty_like(x, memory_format=CHANNELS_LAST) if mask[0] else x.new_empty(0),
        torch.empty_like(weight, memory_format=CHANNELS_LAST) if mask[1] else x.new_empty(0),
        x.new_empty(weight.shape[0]) if mask[2] else x.new_empty(0),
    )


_define(
    "conv2d_backward(Tensor out_grad, Tensor x, Tensor weight, str call)"
    " -> (Tensor, Tensor, Tensor)",
    _conv2d_backward,
    _fake_conv2d_backward,
)


def _scale_shift(
    x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, activation: str
) -> Tensor:
    return pointwise.scale_shift(x, scale, shift, residual, activation)


def _fake_scale_shift(
    x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, activation: str
) -> Tensor:
    return torch.empty_like(x)


_define(
    "scale_shift(Tensor x, Tensor scale, Tensor shift, Tensor? residual, str activation) -> Tensor",
    _scale_shift,
    _fake_scale_shift,
)


def _fold(
    gammas: Any,
    betas: Any,
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    biases: Any,
    filters: Any,
    eps: Sequence[float],
    dtypes: str,
) -> list[Tensor]:
    with torch.no_grad():
        return folding.fold(gammas, betas, means, variances, biases, filters, eps, _dtypes(dtypes))


def _fake_fold(
    gammas: Any,
    betas: Any,
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    biases: Any,
    filters: Any,
    eps: Sequence[float],
    dtypes: str,
) -> list[Tensor]:
    return folding_results(means, filters, _dtypes(dtypes))


def folding_results(
    means: Sequence[Tensor], filters: Any, dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Return the results of ``fold``, not yet written."""
    each = zip(means, filters, dtypes, strict=True)
    return [t for mean, filter_, dtype in each for t in folding.empty(mean, filter_, dtype)]


def _dtypes(text: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in text.split(",")]


_define(
    "fold(Tensor?[] gammas, Tensor?[] betas, Tensor[] means, Tensor[] variances, Tensor?[] biases,"
    " Tensor?[] filters, float[] eps, str dtypes) -> Tensor[]",
    _fold,
    _fake_fold,
)
