"""The timing protocol, in one function."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

if TYPE_CHECKING:
    from cuda.core import Stream

#: A replay lasts at least this long, so that the events' resolution of half a microsecond and the
#: start of the graph are below a percent of it.
REPLAY_SECONDS = 200e-6
REPLAYS = 5
FINAL_REPLAYS = 15
#: Candidates within this factor of the fastest are timed again with the others of their kind.
FINAL_FACTOR = 1.06
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
    """Return how many launches of about `seconds` each make a replay long enough to time."""
    return max(2, min(MAX_LAUNCHES, math.ceil(REPLAY_SECONDS / max(seconds, 1e-7))))


def time_interleaved(
    device: Any,
    stream: Stream,
    graphs: Sequence[Replayable],
    launches: Sequence[int],
    seed: int,
    evict: Callable[[Any], None] | None = None,
) -> list[Timing]:
    """Time candidates against each other.

    The protocol:

    1. Each candidate is a CUDA graph of ``launches[i]`` launches back to back. Operands come from
       device memory, as they do in a large network: successive launches, also across graphs, use
       successive slices of an arena larger than the L2 cache (the caller lays this out); or, where
       the caller cannot do so, `evict` empties the cache before each replay.
    2. Every graph is replayed once unmeasured: module load, instruction caches, clocks.
    3. `REPLAYS` rounds follow. In each, every candidate is replayed once, in a fresh random order,
       so that drift of clocks or temperature falls on all candidates alike.
    4. The fastest candidates are replayed in `FINAL_REPLAYS` more rounds: the smallest of many
       noisy medians is biased low, and everything else is judged by which candidate is the best.
    5. Device events around each replay give its time; no host clock is involved.
    6. The result is the median over a candidate's rounds, with the interquartile range as spread.

    A launch's time includes the gap of about a microsecond to the next launch of the stream, which
    a network pays as well.

    Args:
        device: `cuda.core` device, current in this thread.
        stream: an idle stream of it.
        graphs, launches: the candidates.
        seed: of the random orders.
        evict: called with the stream before each replay, outside of the timed region.
    """
    for graph in graphs:
        graph.launch(stream)
    shuffle = random.Random(seed).shuffle
    times: list[list[float]] = [[] for _ in graphs]

    def play(candidates: list[int], rounds: int) -> None:
        pairs = []
        for _ in range(rounds):
            shuffle(candidates)
            for index in candidates:
                start, end = (device.create_event({"timing_enabled": True}) for _ in range(2))
                if evict is not None:
                    evict(stream)
                stream.record(start)
                graphs[index].launch(stream)
                stream.record(end)
                pairs.append((index, start, end))
        stream.sync()
        for index, start, end in pairs:
            times[index].append((end - start) / launches[index])

    play(list(range(len(graphs))), REPLAYS)
    medians = [float(np.median(t)) for t in times]
    bar = FINAL_FACTOR * min(medians, default=0.0)
    play([index for index, median in enumerate(medians) if median <= bar], FINAL_REPLAYS)
    timings = []
    for candidate in times:
        low, median, high = np.percentile(candidate, (25, 50, 75))
        timings.append(Timing(float(median), float(high - low), len(candidate)))
    return timings


Status = Literal["ok", "illegal", "compile_error", "launch_error", "wrong_result", "timeout"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of trying one config on a GPU; fields hold 0 or NaN where they do not apply.

    Attributes:
        config_id: the provider's number of the config.
        status: how it ended.
        time_ms: median time of one launch, milliseconds.
        spread_ms: interquartile range of that time, milliseconds.
        samples: timed graph replays behind the median.
        registers: of one thread, as compiled.
        local_bytes: local memory of one thread (spills and stack), as compiled.
        smem_bytes: dynamic shared memory of one block.
        error: ||out - reference|| / ||reference|| against a float32 reference.
        sm_clock_mhz: multiprocessor clock seen while the problem was measured.
        message: the error text of a failure.
        cudnn, cudnn_mode: for PyTorch's operator, the version of cuDNN and how it chooses its
            algorithms: ``benchmark`` or ``heuristics``. Empty for another provider.
    """

    config_id: int
    status: Status
    time_ms: float = float("nan")
    spread_ms: float = float("nan")
    samples: int = 0
    registers: int = 0
    local_bytes: int = 0
    smem_bytes: int = 0
    error: float = float("nan")
    sm_clock_mhz: int = 0
    message: str = ""
    cudnn: str = ""
    cudnn_mode: str = ""

    def timed(self, timing: Timing, sm_clock_mhz: int = 0) -> Outcome:
        """Return this outcome with the time of one launch."""
        return replace(
            self, time_ms=timing.median_ms, spread_ms=timing.spread_ms, samples=timing.samples,
            sm_clock_mhz=sm_clock_mhz,
        )  # fmt: skip
