"""The device memory that launches need beside their operands, and memory that outlives a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from confpred.pytorch.streams import is_capturing


@dataclass(slots=True)
class Workspace:
    """What launches on one stream share; `lock` keeps the steps of a launch together."""

    zeroed: Tensor
    scratch: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)


def lasting(allocate: Callable[[], Tensor]) -> Tensor:
    """What `allocate` returns, which is to be kept after the call that is under way, for use on the
    current stream.

    PyTorch lets a thread, or a stream, allocate from a pool of its own, whose memory is somebody
    else's to give back: so it warms up a compiled program that becomes a CUDA graph, where it
    refuses what is left in the graph's pool. So `allocate`, which is to do nothing more, runs in
    another thread, whose stream is the default one.
    """
    with ThreadPoolExecutor(1, "confpred-memory") as other:
        found = other.submit(allocate).result()
    if found.is_cuda:
        found.record_stream(torch.cuda.current_stream(found.device))
    return found


_workspaces: dict[tuple[int | None, int], Workspace] = {}  # by device and stream


def workspace(
    zeroed_bytes: int, scratch_bytes: int, device: torch.device, stream: int
) -> Workspace:
    """A workspace of at least so many bytes of either kind (`confpred.problem.operation.Launch`).
    Launches on `stream`, the current one, follow one another and share one; a CUDA graph, which may
    be replayed on any stream, gets its own."""

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    if is_capturing():
        return Workspace(empty(zeroed_bytes).zero_(), empty(scratch_bytes))
    key = (device.index, stream)
    space = _workspaces.get(key)
    if space is None or len(space.zeroed) < zeroed_bytes or len(space.scratch) < scratch_bytes:
        have = (0, 0) if space is None else (len(space.zeroed), len(space.scratch))
        zeroed = lasting(partial(empty, max(zeroed_bytes, have[0])))
        scratch = lasting(partial(empty, max(scratch_bytes, have[1])))
        space = _workspaces[key] = Workspace(zeroed.zero_(), scratch)
    return space
