"""The operators that rewritten graphs call: ``torch.ops.confpred``.

Arguments that are no tensors are one text (`Call`): the dispatcher takes a microsecond
for each argument. They have no formula for gradients; graphs of training call both directions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from confpred.pytorch.run import convolve, norms, pointwise
from confpred.pytorch.run import fold as folding
from confpred.pytorch.run.convolve import Call
from confpred.pytorch.run.loading import CHANNELS_LAST, dense, layout_of
from confpred.pytorch.run.memory import copied

_library = torch.library.Library("confpred", "FRAGMENT")
# Kernels read one layout: Inductor keeps the strides that the graph was captured with.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_TAGS = (torch.Tag.pt2_compliant_tag, _STRIDES)


def _define(schema: str, run: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, torch.no_grad()(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"confpred::{name}", fake, lib=_library)


def _conv2d(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, call: str,
) -> Tensor:  # fmt: skip
    parsed = Call.read(call)
    if scale is None or bias is None:
        return _lay_as_promised(x, convolve.forward(x, weight, bias, residual, parsed))
    out = _lay_as_promised(x, convolve.by_pytorch(x, weight, None, parsed))
    return pointwise.scale_shift(out, scale, bias, residual, parsed.activation, in_place=True)


def _fake_conv2d(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    call = Call.read(others[-1])
    out = torch.convolution(x, weight, None, *call.arguments)
    return _lay_as_promised(x, out[..., : out.shape[-1] - call.cut] if call.cut else out)


def _lay_as_promised(x: Tensor, out: Tensor) -> Tensor:
    """Return the result for input `x` in the layout of the fake result: images as PyTorch's
    operator returns them, lines and volumes in the layout of `x`."""
    return out if x.dim() == 4 else dense(out, layout_of(x))


def _conv2d_backward(out_grad: Tensor, x: Tensor, weight: Tensor, call: str) -> tuple[Tensor, ...]:
    grads = convolve.backward(out_grad, x, weight, Call.read(call))
    # A schema has no optional result, and the strides are those that were promised.
    return tuple(x.new_empty(0) if grad is None else dense(grad, layout_of(x)) for grad in grads)


def _fake_conv2d_backward(_: Tensor, x: Tensor, weight: Tensor, call: str) -> tuple[Tensor, ...]:
    like = (
        torch.empty_like(t, memory_format=CHANNELS_LAST) if t.dim() == 4
        else dense(torch.empty_like(t), layout_of(x)) for t in (x, weight)
    )  # fmt: skip
    parsed = Call.read(call)
    pairs = zip((*like, x.new_empty(parsed.biases(weight))), parsed.mask, strict=True)
    return tuple(made if wanted else x.new_empty(0) for made, wanted in pairs)


def _like(xs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype) for x in xs]


def _fake_fold(*lists: Any) -> list[Tensor]:
    return [t for x in zip(lists[2], lists[5], lists[7], strict=True) for t in folding.empty(*x)]


_define(
    "conv2d(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, str call)"
    " -> Tensor", _conv2d, _fake_conv2d,
)  # fmt: skip
_define(
    "conv2d_backward(Tensor out_grad, Tensor x, Tensor weight, str call)"
    " -> (Tensor, Tensor, Tensor)", _conv2d_backward, _fake_conv2d_backward,
)  # fmt: skip
_define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor mean,"
    " Tensor variance, Tensor[] numbers, float momentum, float eps, str call)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    partial(norms.forward, in_place=False), norms.fake_forward,
)  # fmt: skip
_define(
    "batch_norm_(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!) mean,"
    " Tensor(b!) variance, Tensor[] numbers, float momentum, float eps, str call)"
    " -> (Tensor, Tensor, Tensor)",
    lambda *arguments: norms.forward(*arguments, in_place=True)[:3],
    lambda *arguments: norms.fake_forward(*arguments)[:3],
)
_define(
    "batch_norm_backward(Tensor out_grad, Tensor x, Tensor? weight, Tensor? bias, Tensor? residual,"
    " Tensor mean, Tensor invstd, Tensor[] numbers, float eps, str call)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    norms.backward, norms.fake_backward,
)  # fmt: skip
_define(
    "norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor[] numbers, float eps,"
    " str call) -> (Tensor, Tensor, Tensor)",
    norms.group_forward, norms.fake_group_forward,
)  # fmt: skip
_define(
    "norm_backward(Tensor out_grad, Tensor x, Tensor? weight, Tensor? bias, Tensor? residual,"
    " Tensor mean, Tensor invstd, str call) -> (Tensor, Tensor, Tensor, Tensor)",
    norms.group_backward, norms.fake_backward,
)  # fmt: skip
_define("clone(Tensor x, *, MemoryFormat memory_format) -> Tensor", torch.clone, torch.clone)
_define("convert(Tensor[] xs, ScalarType dtype) -> Tensor[]", copied, _like)
_define(
    "scale_shift(Tensor x, Tensor scale, Tensor shift, Tensor? residual, str activation) -> Tensor",
    pointwise.scale_shift, lambda x, *others: torch.empty_like(x),
)  # fmt: skip
_define(
    "fold(Tensor?[] gammas, Tensor?[] betas, Tensor[] means, Tensor[] variances, Tensor?[] biases,"
    " Tensor?[] filters, float[] eps, str[] dtypes) -> Tensor[]", folding.fold, _fake_fold,
)  # fmt: skip
