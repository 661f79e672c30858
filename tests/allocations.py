"""Memory that a thread allocates, as a pool of PyTorch's allocator sees it: a CUDA graph's, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OfThisThread(TorchDispatchMode):
    """Notes what this thread allocates inside the block; like a pool it has no part in what other
    threads do."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = operator(*args, **(kwargs or {}))
        had = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and _address(t) not in had:
                self._storages[_address(t)] = StorageWeakRef(t.untyped_storage())
        return made

    def alive(self) -> set[int]:
        """Return the addresses of what is still held by anybody."""
        return {at for at, storage in self._storages.items() if not storage.expired()}


def _address(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()
