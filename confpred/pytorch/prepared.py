"""What launches have made of weights: once, and again when the weights change."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from confpred.pytorch.streams import is_capturing

_MOST_KEPT = 64


@dataclass(frozen=True, slots=True)
class _Kept:
    """Attributes:
    weights: of which it was made; an identity may come again once its tensor is gone.
    stamp: address and version of each of them then.
    made: what was made.
    stream: the handle of the stream that it was made on.
    done: when.
    """

    weights: tuple[weakref.ref[Tensor], ...]
    stamp: tuple[tuple[int, int], ...]
    made: Tensor
    stream: int
    done: torch.cuda.Event


_kept: dict[Hashable, _Kept] = {}


def tracks_changes(weights: Sequence[Tensor]) -> bool:
    """Whether changes in place can be noticed: inference tensors do not count theirs."""
    return not any(weight.is_inference() for weight in weights)


def prepared(form: Hashable, weights: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
    """What `make` makes of `weights` in the layout `form`, ready for the current stream.

    It is made again when a weight was changed in place or lies elsewhere. What is written through
    ``weight.data`` PyTorch does not count, so that nobody notices; `forget_prepared` helps. A CUDA
    graph makes its own at each replay, unless it was made before the capture.

    Args:
        weights: CUDA tensors that count their changes (`tracks_changes`).
    """
    key = (form, tuple(map(id, weights)))
    stamp = tuple((weight.data_ptr(), weight._version) for weight in weights)
    stream = torch.cuda.current_stream(weights[0].device)
    capturing = is_capturing()
    known = _kept.get(key)
    if known is not None and known.stamp == stamp and _same(known.weights, weights):
        if stream.cuda_stream != known.stream and not capturing:
            # Captures begin after everything else is done (`torch.cuda.graph` waits for it).
            known.done.wait(stream)
            known.made.record_stream(stream)
        return known.made
    made = make()
    if not capturing:
        done = torch.cuda.Event()
        done.record(stream)
        if len(_kept) >= _MOST_KEPT and key not in _kept:
            _kept.pop(next(iter(_kept)), None)
        gone = _forgetter(key)
        references = tuple(weakref.ref(weight, gone) for weight in weights)
        _kept[key] = _Kept(references, stamp, made, stream.cuda_stream, done)
    return made


def forget_prepared() -> None:
    """Make everything again when it is next needed."""
    _kept.clear()


def _same(references: Sequence[weakref.ref[Tensor]], weights: Sequence[Tensor]) -> bool:
    return all(known() is weight for known, weight in zip(references, weights, strict=True))


def _forgetter(key: Hashable) -> Callable[[object], None]:
    def gone(_: object) -> None:
        _kept.pop(key, None)

    return gone


os.register_at_fork(after_in_child=_kept.clear)
