"""`confpred::conv2d_norm`: convolution, batch norm, residual and activation as one operator.

For `torch.compile` alone, which would otherwise trace into the folding and repeat it at each step.
The operator takes the parameters as they are, with the norm's count of training steps, and
remembers what it has folded. It is defined with the low-level library, since a call of a
``custom_op`` costs several times as much.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confpred.pytorch.directions import forward
from confpred.pytorch.fallback import activate
from confpred.pytorch.operators import geometry_of

_LIBRARY = torch.library.Library("confpred", "FRAGMENT")
_LIBRARY.define(
    "conv2d_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor? mean, Tensor? var, Tensor? steps, float eps, Tensor? residual, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, SymInt groups, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
conv2d_norm: Any = torch.ops.confpred.conv2d_norm


def fold(
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Filter and bias of a convolution that does what `weight`, `bias` and the norm after it do.

    In float32, or in `weight`'s dtype where that is wider: the products of two half-precision
    roundings would be off by more than the output's.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(variance.to(wide) + eps)
    if norm_weight is not None:
        scale = scale * norm_weight.to(wide)
    shift = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    shift = shift * scale
    if norm_bias is not None:
        shift = shift + norm_bias.to(wide)
    return weight.to(wide) * scale.reshape(-1, 1, 1, 1), shift


def _compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    steps: Tensor | None,
    eps: float,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> Tensor:
    geometry = geometry_of(stride, padding, dilation, groups)
    with torch.no_grad():
        sources = (weight, bias, norm_weight, norm_bias, mean, var, steps)
        weight, bias = _folds.get(sources, eps, x.dtype)
        if residual is not None and _shape(x, weight, geometry) != residual.shape:
            out = forward(x, weight, bias, None, geometry, "none")
            return activate(activation, out + residual)
        return forward(x, weight, bias, residual, geometry, activation)


def _shape(x: Tensor, weight: Tensor, geometry: Any) -> tuple[int, ...]:
    stride, padding, dilation, _ = geometry
    return (
        x.shape[0],
        weight.shape[0],
        *(
            (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1)
            // stride[i]
            + 1
            for i in range(2)
        ),
    )


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    steps: Tensor | None,
    eps: float,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> Tensor:
    if mean is not None or weight.dtype != x.dtype:
        weight = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
    out: Tensor = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    return out if residual is None else out + residual


Sources = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class _Fold:
    """What was folded, and what tells that it is still right.

    Attributes:
        sources: weak references to what it was made from; None for what was not there.
        state: the sources' versions and addresses.
        made: filter and bias.
    """

    sources: tuple[Any, ...]
    state: list[int]
    made: tuple[Tensor, Tensor | None]


class _Folds:
    """Filters and biases that have been folded, each kept as long as the filter it came from.

    A call looks at no more than it has to: in a compiled program the host is often what is waited
    for.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype, float], _Fold] = {}

    def get(self, sources: Sources, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Filter and bias of `sources` in `dtype`, in channels-last order."""
        weight = sources[0]
        if weight is None or (sources[4] is None and weight.dtype is dtype):
            return weight, sources[1]  # type: ignore[return-value]
        try:
            state = _state(sources)
        except RuntimeError:  # a tensor that was made in inference mode does not count its changes
            return _folded(sources, eps, dtype)
        key = (id(weight), dtype, eps)
        found = self._kept.get(key)
        if found is not None and found.state == state and _are(found.sources, sources):
            return found.made
        made = _folded(sources, eps, dtype)
        if weight.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return made  # its memory belongs to the graph
            torch.cuda.synchronize(weight.device)  # other streams are going to read it
        kept = self._kept

        def forget(reference: Any) -> None:
            held = kept.get(key)
            if held is not None and held.sources[0] is reference:
                del kept[key]

        others = (None if t is None else weakref.ref(t) for t in sources[1:])
        kept[key] = _Fold((weakref.ref(weight, forget), *others), state, made)
        return made


def _state(sources: Sources) -> list[int]:
    present = [t for t in sources if t is not None]
    return [t._version for t in present] + [t.data_ptr() for t in present]


def _are(references: tuple[Any, ...], tensors: Sources) -> bool:
    """Whether each reference is to the tensor in its place."""
    for reference, t in zip(references, tensors, strict=True):
        if (reference if reference is None else reference()) is not t:
            return False
    return True


def _folded(sources: Sources, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    weight, bias, norm_weight, norm_bias, mean, variance, _ = sources
    if weight is None:
        raise TypeError("a convolution needs a filter")
    if mean is not None and variance is not None:
        weight, bias = fold(weight, bias, norm_weight, norm_bias, mean, variance, eps)
    weight = weight.to(dtype).contiguous(memory_format=torch.channels_last)
    return weight.detach(), None if bias is None else bias.to(dtype).detach()


_folds = _Folds()
_LIBRARY.impl("conv2d_norm", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("confpred::conv2d_norm", _fake, lib=_LIBRARY)
