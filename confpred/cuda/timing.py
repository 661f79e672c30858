"""The timing protocol, in one function."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from cuda.core import Stream

#: A replay lasts at least this long, so that the events' resolution of half a microsecond and the
#: start of the graph are below a percent of it.
REPLAY_SECONDS = 200e-6
REPLAYS = 7
MAX_LAUNCHES = 40


class Replayable(Protocol):
    """A CUDA graph of repeated launches; `cuda.core` graphs are, others are adapted."""

    def launch(self, stream: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one launch.

    Attributes:
        median_ms: median over the replays, milliseconds.
        spread_ms: interquartile range over the replays, milliseconds.
        samples: number of replays.
    """

    median_ms: float
    spread_ms: float
    samples: int


def launches_a_replay(seconds: float) -> int:
    """How many launches of about `seconds` each make a replay long enough to time."""
    return max(2, min(MAX_LAUNCHES, math.ceil(REPLAY_SECONDS / max(seconds, 1e-7))))


def time_interleaved(
    device: Any,
    stream: Stream,
    graphs: Sequence[Replayable],
    launches: Sequence[int],
    seed: int,
    replays: int = REPLAYS,
) -> list[Timing]:
    """Time candidates against each other.

    The protocol:

    1. Each candidate is a CUDA graph of ``launches[i]`` launches back to back. Successive launches
       use successive slices of an arena of operands that is larger than the L2 cache (the caller
       lays this out), so that operands come from device memory as they do in a large network.
    2. Every graph is replayed once unmeasured: module load, instruction caches, clocks.
    3. `replays` rounds follow. In each, every candidate is replayed once, in a fresh random order,
       so that drift of clocks or temperature falls on all candidates alike.
    4. Device events around each replay give its time; no host clock is involved.
    5. The result is the median over rounds, with the interquartile range as its spread.

    A launch's time includes the gap of about a microsecond to the next launch of the stream, which
    a network pays as well.

    Args:
        device: `cuda.core` device, current in this thread.
        stream: an idle stream of it.
        graphs, launches: the candidates.
        seed: of the random orders.
        replays: number of rounds.
    """
    order = list(range(len(graphs)))
    for graph in graphs:
        graph.launch(stream)
    generator = random.Random(seed)
    pairs: list[list[tuple[Any, Any]]] = [[] for _ in graphs]
    for _ in range(replays):
        generator.shuffle(order)
        for index in order:
            start, end = (device.create_event({"timing_enabled": True}) for _ in range(2))
            stream.record(start)
            graphs[index].launch(stream)
            stream.record(end)
            pairs[index].append((start, end))
    stream.sync()
    timings = []
    for events, count in zip(pairs, launches, strict=True):
        times = np.array([end - start for start, end in events]) / count
        low, median, high = np.percentile(times, (25, 50, 75))
        timings.append(Timing(float(median), float(high - low), len(times)))
    return timings
