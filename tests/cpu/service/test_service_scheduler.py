"""Whose work is done next, and whose is not done at all: the scheduler alone, slice by slice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from confpred.service.metrics import Metrics
from confpred.service.scheduler import SLICE_S, Refused, Scheduler, Steps

LIMIT = 1000


class Bench:
    """A scheduler, and the names of whose steps it took, in order. A step takes a slice."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.taken = scheduler, list[str]()

    def steps(self, name: str, count: int, unread: int = 0) -> Steps[str]:
        for _ in range(unread):
            yield None
        for done in range(count):
            yield count - done
            time.sleep(SLICE_S)
            self.taken.append(name)
        return f"{name} done"

    def run(self, name: str, count: int, **options: Any) -> asyncio.Task[str]:
        given = {"client": "a", "estimate": count, "gone": asyncio.Future(), "deadline_s": 60}
        steps = self.steps(name, count, options.pop("unread", 0))
        return asyncio.create_task(self.scheduler.run(steps, **given | options))

    async def until(self, name: str, count: int) -> None:
        """Wait until `name` has taken so many steps."""
        while self.taken.count(name) < count:
            await asyncio.sleep(0.001)


def on_a_bench(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            bench = Bench(Scheduler(executor, Metrics(), LIMIT))
            await asyncio.wait_for(test(bench), timeout=60)

    def run() -> None:
        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@on_a_bench
async def test_a_small_request_overtakes_a_large_one(bench: Bench) -> None:
    large = bench.run("large", 40)
    await bench.until("large", 2)
    assert await bench.run("small", 1) == "small done"
    assert bench.taken.count("large") < 10
    assert await large == "large done"


@on_a_bench
async def test_a_large_request_ends_however_many_small_ones_follow(bench: Bench) -> None:
    large = bench.run("large", 10)
    small = [bench.run("small", 1) for _ in range(100)]
    await large
    assert 10 <= bench.taken.count("small") < 50
    await asyncio.gather(*small)


@on_a_bench
async def test_what_may_be_in_memory_is_read_before_others_are_worked_on(bench: Bench) -> None:
    large = [bench.run("large", 20) for _ in range(3)]
    await bench.until("large", 1)
    assert await bench.run("known", 0, unread=3) == "known done"
    assert bench.taken.count("large") < 20
    await asyncio.gather(*large)


@on_a_bench
async def test_a_client_that_was_idle_has_no_credit(bench: Bench) -> None:
    busy = bench.run("busy", 60, client="busy")
    await bench.until("busy", 20)
    late = bench.run("late", 20, client="late")
    await late
    assert bench.taken.count("busy") > 30
    await busy


@on_a_bench
async def test_more_than_the_limit_is_refused_with_a_time_to_come_back(bench: Bench) -> None:
    alone = bench.run("alone", 2 * LIMIT)  # nobody else's work waits
    await bench.until("alone", 5)
    with pytest.raises(Refused) as refused:
        await bench.run("more", 1)
    assert refused.value.reason == "queue"
    expected = 2 * LIMIT * SLICE_S
    assert expected / 4 < refused.value.retry_s < expected * 10
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    assert await bench.run("next", 1) == "next done"


@on_a_bench
async def test_what_cannot_be_in_time_is_not_begun(bench: Bench) -> None:
    long = bench.run("long", 200)
    await bench.until("long", 5)
    with pytest.raises(Refused) as refused:
        await bench.run("late", 100, client="b", deadline_s=0.3)
    assert (refused.value.reason, "late" in bench.taken) == ("deadline", False)
    long.cancel()
    await asyncio.wait([long])


@on_a_bench
async def test_a_pace_of_a_busy_moment_is_got_over(bench: Bench) -> None:
    bench.scheduler._pace_s = 10.0
    assert await bench.run("large", 40, unread=1, deadline_s=5) == "large done"
    assert bench.scheduler._pace_s < 5


@on_a_bench
async def test_what_turns_out_to_be_more_than_the_limit_is_refused(bench: Bench) -> None:
    other = bench.run("other", 20)
    with pytest.raises(Refused) as refused:
        await bench.run("larger", LIMIT, estimate=1, unread=1)
    assert refused.value.reason == "queue"
    assert bench.taken.count("larger") <= 1  # what the slice that read it had time for
    assert await other == "other done"


@on_a_bench
async def test_what_the_work_raises_is_raised(bench: Bench) -> None:
    def faulty() -> Steps[str]:
        yield 1
        raise KeyError("inner")

    gone: asyncio.Future[None] = asyncio.Future()
    with pytest.raises(KeyError, match="inner"):
        await bench.scheduler.run(faulty(), client="a", estimate=1, gone=gone, deadline_s=60)
    assert await bench.run("next", 1) == "next done"
