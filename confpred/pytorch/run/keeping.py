"""Answers that tuning has kept, which every choice inside PyTorch looks up.

    a guess (`confpred.pytorch.run.choosing.is_open`)
      -> the answer that is kept for this device, driver and cuDNN     here, whatever `tune` says
      -> measured now (`confpred.pytorch.run.tuning`)                  in a capture with `tune`

Ranks of ``torch.distributed`` never differ: the answer of the first rank that asks for a layer is
the answer of all, and nobody waits for another one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from confpred.cuda import driver
from confpred.errors import first_line
from confpred.families.protocol import Candidate
from confpred.families.registry import operation_named
from confpred.measure.pytorch import cudnn_version
from confpred.predict.choice import Choice
from confpred.problem.device import Device
from confpred.problem.limits import Limits
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.sampler import kept

log = logging.getLogger("confpred")


def folder(device: Device, operation: Operation) -> Path:
    """Return the folder of what is measured under this machine's driver and cuDNN."""
    return kept.folder_of(device.key, operation, driver.describe(0)[1], cudnn_version())


def look_up(
    problems: Sequence[Record], device: Device, operation: Operation, limits: Limits
) -> dict[Record, Choice]:
    """Return the answers that are kept for `problems`, within `limits`."""
    if not problems or not shards(device, operation):
        return {}
    times = _times(_own_shards(device, operation))
    choices = {p: kept.answer(p, device, times.get(p, ()), limits) for p in problems}
    agreed = (_agreed(choice, p, device, limits) for p, choice in choices.items())
    return {choice.problem: choice for choice in agreed if choice is not None}


def shards(device: Device, operation: Operation) -> Sequence[str]:
    """Return the names of the files that answers are looked up in; of ranks, the files of the first
    one that asked. All ranks look answers up or none does, so none keeps a graph with others."""
    names = [shard.name for shard in _own_shards(device, operation)]
    return _settled(f"{device.key} {operation.name}", names) or ()


def _own_shards(device: Device, operation: Operation) -> tuple[Path, ...]:
    every = kept.shards_of(device.key, operation)
    if not every:
        return ()
    try:
        here = folder(device, operation)
    except Exception as error:  # such as a machine without a GPU, where nothing was measured
        log.debug("kept answers are not used: %s", error)
        return ()
    return tuple(shard for shard in every if shard.parent == here)


@lru_cache(16)
def _times(shards: tuple[Path, ...]) -> kept.Times:
    """Return what was measured into the folder of `shards`, which is read once until it has others."""
    if not shards:
        return {}
    where = shards[0].parent
    try:
        return kept.times_in(where, operation_named(where.name))
    except Exception as error:  # such as a missing pyarrow: no reason to hold up a network
        log.warning("answers in %s are not used: %s", where, first_line(error))
        return {}


# Ranks of one job.


def ranks() -> int:
    """Return how many processes the job has; that of torchrun is known before they have met."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    with suppress(ValueError):
        return int(os.environ.get("WORLD_SIZE", 1))
    return 1


def _settled(question: str, mine: Any) -> Any:
    """Return what the first rank that asked said, which is `mine` where this one is; None where
    ranks cannot agree yet."""
    if ranks() == 1:
        return mine
    if not dist.is_initialized():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return json.loads(store.compare_set(f"confpred {question}", "", json.dumps(mine)))
    except RuntimeError as error:  # the store is gone, or has no such operation
        log.debug("ranks cannot agree: %s", error)
        return None


def _agreed(mine: Choice | None, problem: Record, device: Device, limits: Limits) -> Choice | None:
    facts = mine and (mine.provider, mine.candidate.config_id, mine.predicted_ms, mine.pytorch_ms)
    settled = _settled(f"{device.key} {limits} {problem}", facts)
    if settled is None:
        return None
    provider, row, ms, pytorch_ms = settled
    one = Choice(problem, device.key, "measured", Candidate(provider, row), ms)
    return replace(one, pytorch_ms=pytorch_ms)
