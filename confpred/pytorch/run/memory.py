"""Memory of recorded passes: tensors in it, who holds them, and results in other dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Any]], Any]  # runs a graph, and empties the list of inputs
Dtypes = Mapping[int, torch.dtype]  # of results that a graph has in another one, by index
#: Bytes of a copy that shares an allocation with others, at most, and the alignment of each.
_SMALL, _ALIGNED = 2**16, 512


class SavedTensors:
    """Tensors in the memory of `results` that each replay of a forward pass hands out again.

    They are held by whoever has one of them, its data in C++, or another tensor in its storage.
    """

    def __init__(self, results: Sequence[Tensor]) -> None:
        self._tensors = aliases_of(results)
        self._storages = [x.untyped_storage() for x in self._tensors]
        self._counts_if_unheld = self._counts()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def _counts(self) -> list[list[int]]:
        """Return how many references there are: from Python, to tensors in C++, to storages."""
        objects = map(sys.getrefcount, (*self._tensors, *self._storages))
        tensors = [x._use_count() for x in self._tensors]  # type: ignore[attr-defined]
        storages = [torch._C._storage_Use_Count(x._cdata) for x in self._storages]
        return [list(objects), tensors, storages]

    def are_held(self) -> bool:
        """Return whether anybody but this object holds one of them."""
        return self._counts() != self._counts_if_unheld


def converted(results: list[Any], dtypes: Dtypes) -> list[Any]:
    """Return `results` in `dtypes`; one launch converts all that are of the same dtypes."""
    alike: dict[Any, list[int]] = {}
    for i, dtype in dtypes.items():
        alike.setdefault((results[i].dtype, dtype), []).append(i)
    with torch.no_grad():
        for (_, dtype), places in alike.items():
            copies = copied([results[i] for i in places], dtype)
            for place, copy in zip(places, copies, strict=True):
                results[place] = copy
    return results


def copied(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of `tensors`, which are of one dtype, in `dtype`, made by one launch."""
    copies = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class Copier:
    """Copies tensors, which are of one dtype and each fill their storage, into new ones in `dtype`,
    by one launch.

    Small copies are parts of one allocation: hundreds of their own take the host a millisecond. No
    larger one is a part, as it would be kept for as long as anybody has another part.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.places = dtype, list[int]()
        self._tensors, self._parts = list[Tensor](), list[Any]()
        self._length = 0

    def add(self, place: int, x: Tensor) -> None:
        """Let `x` be copied for the result of this index."""
        part, size = None, x.numel() * self.dtype.itemsize
        if size <= _SMALL:
            part = x.shape, x.stride(), self._length
            self._length += -(-size // _ALIGNED) * _ALIGNED // self.dtype.itemsize
        self.places.append(place)
        self._tensors.append(x)
        self._parts.append(part)

    def copies(self) -> list[Tensor]:
        """Return new copies, in the order of the `places`. None is a view for autograd, so that a
        change of one is none of the others."""
        memory = torch.empty(self._length, dtype=self.dtype, device=self._tensors[0].device)
        copies = [
            torch.empty_like(x, dtype=self.dtype) if part is None else memory.as_strided(*part).data
            for x, part in zip(self._tensors, self._parts, strict=True)
        ]
        torch._foreach_copy_(copies, self._tensors)
        return copies


def converting(run: Run, dtypes: Dtypes) -> Run:
    """Return a function that runs `run`, and returns its results in `dtypes`."""
    if not dtypes:
        return run

    def call(inputs: list[Any]) -> list[Any]:
        return converted(list(run(inputs)), dtypes)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def view_in(storage: Any, like: Tensor) -> Tensor:
    """Return a tensor like `like` in `storage`, no inference tensor: any mode may write to it."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=like.dtype, device=storage.device)
        return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def buffer_for(x: Tensor) -> Tensor:
    """Return memory for a copy of `x`, without a launch: `torch.empty` fills it where PyTorch is
    set to be deterministic, and a recorded fill would overwrite the copy at each replay."""
    like = torch.empty_like(x, device="meta")
    storage = torch.UntypedStorage(like.numel() * like.element_size(), device=x.device)
    return view_in(storage, like)


def aliases_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the memory of `tensors` that do not own it, and share it as those do."""
    storages: dict[int, Any] = {}
    aliases = []
    for x in tensors:
        storage = x.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = alias_of(storage)
        aliases.append(view_in(storages[storage.data_ptr()], x))
    return aliases


def alias_of(storage: Any) -> Any:
    """Return a storage in the memory of `storage`, which does not own it."""
    if not storage.nbytes():
        return torch.UntypedStorage(0, device=storage.device)
    make = torch._C._construct_storage_from_data_pointer
    return make(storage.data_ptr(), storage.device, storage.nbytes())
