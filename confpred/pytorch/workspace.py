"""The device memory that launches need beside their operands."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from confpred.pytorch.streams import is_capturing


@dataclass(slots=True)
class Workspace:
    """What launches on one stream share; `lock` keeps the steps of a launch together."""

    zeroed: Tensor
    scratch: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)


_workspaces: dict[tuple[int, int], Workspace] = {}  # by device and stream


def workspace(
    zeroed_bytes: int, scratch_bytes: int, device: torch.device, stream: int
) -> Workspace:
    """A workspace of at least so many bytes of either kind (`confpred.problem.operation.Launch`).
    Launches on a stream follow one another and share one; a CUDA graph, which may be replayed on
    any stream, gets its own."""

    def make(zeroed: int, scratch: int) -> Workspace:
        return Workspace(
            torch.zeros(zeroed, dtype=torch.uint8, device=device),
            torch.empty(scratch, dtype=torch.uint8, device=device),
        )

    if is_capturing():
        return make(zeroed_bytes, scratch_bytes)
    key = (device.index, stream)
    space = _workspaces.get(key)
    if space is None or len(space.zeroed) < zeroed_bytes or len(space.scratch) < scratch_bytes:
        have = (0, 0) if space is None else (len(space.zeroed), len(space.scratch))
        space = make(max(zeroed_bytes, have[0]), max(scratch_bytes, have[1]))
        _workspaces[key] = space
    return space
