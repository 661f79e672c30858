"""`confpred::conv2d_norm`: convolution, batch norm, residual and activation as one operator.

For `torch.compile` alone, which would otherwise trace into the folding and repeat it at each step.
The operator takes the parameters as they are, and remembers what it has folded. It is defined as
those of `confpred.pytorch.operators`, and for the same reason: in a compiled program the host is
often what is waited for. Training moves a norm's statistics in a way that does not raise their
versions, so that its count of steps is what tells of it. That count is looked up in the norm: as an
input of the program, one for each norm of the network, it made steps half as long again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confpred.network.modules import STEPS
from confpred.pytorch.directions import forward
from confpred.pytorch.fallback import activate, pytorch_apart
from confpred.pytorch.inductor import call_in_programs
from confpred.pytorch.operators import read
from confpred.pytorch.streams import is_capturing
from confpred.pytorch.tracing import pays
from confpred.pytorch.workspace import lasting

_LIBRARY = torch.library.Library("confpred", "FRAGMENT")
for _name, _more in (("conv2d_norm", ", str made_by=''"), ("conv2d_norm_run", "")):
    _LIBRARY.define(
        f"{_name}(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
        f"Tensor? mean, Tensor? var, Tensor? residual, str call{_more}) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
#: What is called: while a program is traced, the operator that runs, or PyTorch's own ones.
conv2d_norm: Any = torch.ops.confpred.conv2d_norm
conv2d_norm_run: Any = torch.ops.confpred.conv2d_norm_run


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


def _choose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    residual: Tensor | None,
    call: str,
    made_by: str = "",
) -> Tensor:
    _, geometry, activation, eps, *more = read(call)
    folded = bias if mean is None else mean  # as for a bias, only that there is one counts
    layer_ms = more[1] if len(more) > 1 else None
    if pays(x, weight, folded, residual, geometry, activation, (False, False, False), layer_ms):
        others = (bias, norm_weight, norm_bias, mean, var)
        return conv2d_norm_run(x, weight, *others, residual, call)  # type: ignore[no-any-return]
    if weight.dtype is not x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if mean is None:
        return pytorch_apart(x, weight, bias, residual, geometry, activation)
    out = pytorch_apart(x, weight, bias, None, geometry, "none")
    out = F.batch_norm(out, mean, var, norm_weight, norm_bias, False, 0.0, eps)
    return activate(activation, out if residual is None else out + residual)


def _compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    residual: Tensor | None,
    call: str,
) -> Tensor:
    if torch.is_grad_enabled():  # it has no formula for gradients
        with torch.no_grad():
            return _compute(x, weight, bias, norm_weight, norm_bias, mean, var, residual, call)
    _, geometry, activation, eps, *_ = read(call)
    if mean is not None or weight.dtype is not x.dtype:
        others = (bias, norm_weight, norm_bias, mean, var)
        weight, bias = _folds.get(weight, others, eps, x.dtype)
    return forward(x, weight, bias, residual, geometry, activation, call)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    residual: Tensor | None,
    call: str,
) -> Tensor:
    _, (stride, padding, dilation, groups), *_ = read(call)
    if mean is not None or weight.dtype != x.dtype:
        weight = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
    out: Tensor = torch.ops.aten.convolution.default(
        x, weight, None, stride, padding, dilation, False, [0, 0], groups
    )
    return out if residual is None else out + residual


Others = tuple["Tensor | None", ...]  # bias, and the norm's weight, bias, mean and variance
Made = tuple[Tensor, "Tensor | None"]
Counts = tuple[tuple[Mapping[str, "Tensor | None"], Tensor], ...]
_version = attrgetter("_version")
_address: Callable[[Any], int] = Tensor.data_ptr
#: The norms whose statistics programs are given.
_norms: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


def may_be_folded(norm: nn.Module) -> None:
    """Have the operator know `norm` by its mean. A mean of no norm that it knows, as where Inductor
    has frozen a program's inputs to constants, is taken not to move in training."""
    _norms[norm] = None


def _counts_of(mean: Tensor | None) -> Counts:
    """Of the norms with this mean, the buffers and the count of steps."""
    if mean is None:
        return ()
    norms = [reference() for reference in _norms.keyrefs()]  # other threads add to them
    homes = [norm._buffers for norm in norms if norm is not None]
    counts = [(home, home.get(STEPS)) for home in homes if home.get("running_mean") is mean]
    return tuple((home, count) for home, count in counts if count is not None)


@dataclass(frozen=True, slots=True)
class _Fold:
    """What was folded, and what tells that it is still right.

    Attributes:
        weight: a weak reference to the filter; the fold lives no longer.
        others: what else it was made from.
        counts: buffers of the norms that have this mean, and the count of steps that each had.
        present: those of `others` that are there, and the counts.
        versions: the sum of the versions of all, which only rise.
        address, addresses: of the filter and of `present`.
        made: filter and bias.
        captured: what was made of the filter, now or before, and is read by CUDA graphs, which know
            nothing but its address.
    """

    weight: Any
    others: Others
    counts: Counts
    present: tuple[Tensor, ...]
    versions: int
    address: int
    addresses: list[int]
    made: Made
    captured: list[Made]


class _Folds:
    """Filters and biases that have been folded, each kept as long as the filter it came from."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype, float], _Fold] = {}

    def get(self, weight: Tensor, others: Others, eps: float, dtype: torch.dtype) -> Made:
        """Filter and bias in `dtype`, dense and in channels-last order."""
        found = self._kept.get((id(weight), dtype, eps))
        if (
            found is not None
            and found.weight() is weight
            and all(map(is_, found.others, others))
            and all(buffers.get(STEPS) is count for buffers, count in found.counts)
            and sum(map(_version, found.present), weight._version) == found.versions
            and weight.data_ptr() == found.address
            and [*map(_address, found.present)] == found.addresses
        ):
            if _is_for_a_graph(weight):
                found.captured.append(found.made)
            return found.made
        return self._fold(weight, others, eps, dtype)

    def _fold(self, weight: Tensor, others: Others, eps: float, dtype: torch.dtype) -> Made:
        counts = _counts_of(others[3])
        present = *(t for t in others if t is not None), *(count for _, count in counts)
        try:
            versions = sum(map(_version, present), weight._version)
        except RuntimeError:  # a tensor that was made in inference mode does not count its changes
            return _folded(weight, others, eps, dtype)
        address, addresses = weight.data_ptr(), [*map(_address, present)]
        made = _folded(weight, others, eps, dtype)
        if _is_for_a_graph(weight):
            return made  # its memory belongs to the graph
        made = _lasting(made[0]), None if made[1] is None else _lasting(made[1])
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)  # other streams are going to read it
        key, kept = (id(weight), dtype, eps), self._kept
        former = kept.get(key)
        captured = former.captured if former is not None and former.weight() is weight else []

        def forget(reference: Any) -> None:
            held = kept.get(key)
            if held is not None and held.weight is reference:
                del kept[key]

        reference = weakref.ref(weight, forget)
        now = versions, address, addresses
        kept[key] = _Fold(reference, others, counts, present, *now, made, captured)
        return made


def _is_for_a_graph(weight: Tensor) -> bool:
    """Whether what is made of `weight` now is read by a CUDA graph that is being captured."""
    return weight.is_cuda and bool(is_capturing())


def _lasting(made: Tensor) -> Tensor:
    """A copy of `made` that may be kept."""
    return lasting(partial(torch.empty_like, made)).copy_(made)


@torch.no_grad()
def _folded(weight: Tensor, others: Others, eps: float, dtype: torch.dtype) -> Made:
    bias, norm_weight, norm_bias, mean, variance = others
    if mean is not None and variance is not None:
        weight, bias = fold(weight, bias, norm_weight, norm_bias, mean, variance, eps)
    weight = weight.to(dtype).contiguous(memory_format=torch.channels_last)
    return weight.detach(), None if bias is None else bias.to(dtype).detach()


_folds = _Folds()
_LIBRARY.impl("conv2d_norm", _choose, "CompositeImplicitAutograd")
_LIBRARY.impl("conv2d_norm_run", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("confpred::conv2d_norm_run", _fake, lib=_LIBRARY)
call_in_programs(conv2d_norm_run.default, _compute)
