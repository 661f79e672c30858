"""Weights in autocast's dtype, cast together and kept until they change or autocast's block ends.

Autocast casts each weight at each call, which takes the host longer than the launch of a kernel.
Here the first layer that finds its weight changed, as after an optimizer's step, has all changed
weights of the models that run cast in one go.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confpred.pytorch.ready import CHANNELS_LAST
from confpred.pytorch.streams import current_stream, is_capturing


@dataclass(slots=True)
class _Cast:
    """A weight's copy, and what tells that it is still one.

    Attributes:
        weight: a weak reference to what was cast.
        low: its copy.
        version, address: of the weight when it was cast; -1 for a weight that was not yet.
        stream: on which the copy was made.
        region: the block of autocast that it was made in.
        used: the last block of autocast that asked for it.
    """

    weight: Any
    low: Tensor
    version: int = -1
    address: int = -1
    stream: int = -1
    region: int = -1
    used: int = -1


_FEW = 3  # weights that are cast one by one: one operator for all costs the host as much as four
_casts: dict[tuple[int, torch.dtype], _Cast] = {}  # by the identity of the weight
_region = 0  # how many outermost blocks of autocast have ended
_clear: Any = None  # PyTorch's own function, once `_note_ends` has put another in its place


def _note_ends() -> None:
    """Have the end of each outermost block of autocast counted.

    PyTorch keeps its own casts no longer than that, and what an optimizer writes past PyTorch's
    count of changes, through ``.data`` or by a kernel of its own, is seen then.
    """
    global _clear
    if _clear is None:
        _clear = torch.clear_autocast_cache
        torch.clear_autocast_cache = _end_region


def _end_region() -> None:
    global _region
    _region += 1
    _clear()


def low_precision(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in `dtype`, dense and channels last if it has four dimensions, without gradients."""
    if weight.is_inference() or is_capturing() or not torch.is_autocast_cache_enabled():
        # An inference tensor does not count its changes, and a graph has to cast at each replay.
        return _cast_now(weight, dtype)
    known = _casts.get((id(weight), dtype))
    stream = current_stream(weight.get_device())
    if (
        known is not None
        and known.weight() is weight
        and known.version == weight._version
        and known.address == weight.data_ptr()
        and known.stream == stream
        and known.region == _region
    ):
        known.used = _region
        return known.low
    if known is None or known.weight() is not weight:
        key = (id(weight), dtype)
        reference = weakref.ref(weight, lambda _: _casts.pop(key, None))
        known = _casts[key] = _Cast(reference, weight, used=_region - 1)
    _note_ends()
    since, known.used = known.used, _region
    _refresh(dtype, weight.get_device(), stream, since)
    return known.low


def _refresh(dtype: torch.dtype, ordinal: int, stream: int, since: int) -> None:
    """Cast all weights on a device that have changed since they were cast, but for those that no
    block of autocast `since` then has used, as of a model that does not run now. The copies are
    new tensors: the former may be waiting for a backward pass."""
    stale: list[tuple[_Cast, Tensor]] = []
    for (_, kind), cast in list(_casts.items()):
        weight = cast.weight()
        if weight is None or cast.used < since:
            continue
        if kind is not dtype or weight.get_device() != ordinal:
            continue
        changed = cast.version != weight._version or cast.address != weight.data_ptr()
        if changed or cast.stream != stream or cast.region != _region:
            stale.append((cast, weight))
    weights = [weight for _, weight in stale]
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            copies = _copies(weights, dtype)
    else:
        copies = _copies(weights, dtype)
    for (cast, weight), low in zip(stale, copies, strict=True):
        cast.low, cast.stream, cast.region = low, stream, _region
        cast.version, cast.address = weight._version, weight.data_ptr()


def _copies(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if len(weights) <= _FEW:
        return [_cast_now(weight, dtype) for weight in weights]
    plain = [weight.detach() for weight in weights]
    copies = [_like(weight, dtype) for weight in plain]
    torch._foreach_copy_(copies, plain)
    return copies


def _like(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dim() == 4:
        return torch.empty_like(weight, dtype=dtype, memory_format=CHANNELS_LAST)
    return torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)


def _cast_now(weight: Tensor, dtype: torch.dtype) -> Tensor:
    layout = CHANNELS_LAST if weight.dim() == 4 else torch.contiguous_format
    return weight.detach().to(dtype, memory_format=layout)
