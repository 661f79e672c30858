"""The timing protocol on a clock of its own, which only moves when something is replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from confpred.measure.timing import (
    FINAL_FACTOR,
    FINAL_REPLAYS,
    MAX_LAUNCHES,
    REPLAY_SECONDS,
    REPLAYS,
    launches_a_replay,
    time_interleaved,
)


class Clock:
    """A device and its only stream. Work takes the time that it says, one thing after another.

    Attributes:
        played: which graph was launched, in order.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.played: list[int] = []
        self.synced_ms = -1.0

    def create_event(self, options: dict[str, bool]) -> Event:
        assert options["timing_enabled"]
        return Event(self)

    def record(self, event: Event) -> None:
        event.at_ms = self.now_ms

    def sync(self) -> None:
        self.synced_ms = self.now_ms


@dataclass
class Event:
    clock: Clock
    at_ms: float = float("nan")

    def __sub__(self, earlier: Event) -> float:
        assert self.at_ms <= self.clock.synced_ms, "read before the stream has got there"
        return self.at_ms - earlier.at_ms


@dataclass
class Graph:
    """One that takes the next of `times_ms` at each replay."""

    clock: Clock
    number: int
    times_ms: Iterator[float]
    taken: list[float] = field(default_factory=list)

    def launch(self, stream: Any) -> None:
        self.taken.append(next(self.times_ms))
        self.clock.now_ms += self.taken[-1]
        self.clock.played.append(self.number)


def graphs_of(clock: Clock, *times_ms: Iterable[float]) -> list[Graph]:
    return [Graph(clock, number, iter(times)) for number, times in enumerate(times_ms)]


def forever(ms: float) -> Iterator[float]:
    while True:
        yield ms


def test_a_time_is_the_median_of_the_replays_and_not_their_least():
    clock = Clock()
    measured = [7.0, 9.0, 8.0, 50.0, 6.0, *np.linspace(10, 24, FINAL_REPLAYS)]
    (graph,) = graphs_of(clock, [1000.0, *measured])
    (timing,) = time_interleaved(clock, clock, [graph], [4], seed=0)
    assert graph.taken == [1000.0, *measured]  # the first replay warms up, and counts for nothing
    low, median, high = np.percentile(measured, (25, 50, 75)) / 4
    assert timing.median_ms == pytest.approx(median)
    assert timing.spread_ms == pytest.approx(high - low)
    assert timing.samples == len(measured)
    assert min(measured) / 4 < timing.median_ms < float(np.mean(measured)) / 4


def test_a_replays_time_is_shared_by_its_launches():
    clock = Clock()
    graphs = graphs_of(clock, forever(12.0), forever(12.0))
    timings = time_interleaved(clock, clock, graphs, [3, 12], seed=0)
    assert [t.median_ms for t in timings] == pytest.approx([4.0, 1.0])


def test_only_the_fastest_are_timed_further():
    clock = Clock()
    times = (1.0, FINAL_FACTOR - 0.01, FINAL_FACTOR + 0.01, 3.0)
    timings = time_interleaved(clock, clock, graphs_of(clock, *map(forever, times)), [1] * 4, 0)
    assert [t.samples for t in timings] == [REPLAYS + FINAL_REPLAYS] * 2 + [REPLAYS] * 2


def test_who_is_timed_further_is_decided_by_medians():
    """One lucky replay does not keep the others out, nor let a slow one in."""
    clock = Clock()
    lucky = [2.0, 0.1, *[2.0] * (REPLAYS - 1)]
    graphs = graphs_of(clock, forever(1.0), lucky)
    timings = time_interleaved(clock, clock, graphs, [1, 1], seed=0)
    assert [t.samples for t in timings] == [REPLAYS + FINAL_REPLAYS, REPLAYS]


def test_every_round_plays_all_in_another_order():
    clock, count = Clock(), 6
    time_interleaved(clock, clock, graphs_of(clock, *[forever(1.0)] * count), [1] * count, seed=3)
    assert clock.played[:count] == list(range(count))  # the warming up
    rounds = np.array(clock.played[count:]).reshape(REPLAYS + FINAL_REPLAYS, count)
    assert all(sorted(order) == list(range(count)) for order in rounds.tolist())
    assert len({tuple(order) for order in rounds.tolist()}) > REPLAYS
    again = Clock()
    time_interleaved(again, again, graphs_of(again, *[forever(1.0)] * count), [1] * count, seed=3)
    assert again.played == clock.played


def test_emptying_the_cache_is_not_timed():
    clock, emptied = Clock(), []

    def evict(stream: Clock) -> None:
        emptied.append(len(clock.played))
        stream.now_ms += 500.0

    (timing,) = time_interleaved(clock, clock, graphs_of(clock, forever(2.0)), [1], 0, evict)
    assert timing.median_ms == pytest.approx(2.0)
    assert emptied == list(range(1, 1 + REPLAYS + FINAL_REPLAYS))  # before each but the first


def test_nothing_to_time():
    clock = Clock()
    assert time_interleaved(clock, clock, [], [], seed=0) == []


@pytest.mark.parametrize(
    ("seconds", "launches"),
    [(REPLAY_SECONDS / 10, 10), (REPLAY_SECONDS / 9.5, 10), (1.0, 2), (0.0, MAX_LAUNCHES)],
)
def test_a_replay_is_long_enough_to_time(seconds, launches):
    assert launches_a_replay(seconds) == launches
