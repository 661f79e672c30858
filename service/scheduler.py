"""Whose work is done next: requests share one thread in slices of a few milliseconds.

The rules, from the outside in:

- A request that cannot be answered in the time that it has is refused when it comes, or when it has
  been read: at the pace that is known, with the work that goes before it.
- Among clients, the next slice is for the one that has had the least since it has work here. Where
  more waits than is done in `_CROWDED_S`, it is for the one whose next answer is the nearest: by
  turns, all batches would be late. In both, a client with many batches gets no more of the machine
  than one with a few.
- Among the requests of one client, it is for the one with the fewest problems left, so that small
  requests overtake large ones; but each fourth slice is for the one that has waited longest, so
  that every request ends, however many small ones follow it.
- A request that nobody waits for any more, or that has become too late, gets no further slice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Generator
from concurrent.futures import Executor
from typing import Any, Generic, Literal, TypeVar

from .metrics import Metrics

T = TypeVar("T")

#: Seconds of one slice. A new problem takes about one millisecond, so that a slice is long beside
#: the 0.1 ms that going to the thread and back takes, and short for the request behind it.
SLICE_S = 0.004
_FOR_THE_OLDEST = 4  # of how many slices of a client one is for its oldest request
_PACE_S = 0.0015  # a problem, until it is known better
_FIRST = asyncio.FIRST_COMPLETED
_NEWEST = 0.05  # the weight of the newest slice in what is known
_CROWDED_S = 1.0
#: A request waits no longer than this and so many times its own work, whatever it allows: a longer
#: queue answers no more of them.
_PATIENCE_S, _STRETCH = 1.0, 30.0
#: The share of a request's time that may be taken when it comes: smaller ones will overtake it, and
#: others are read before they are refused.
_PROMISED = 0.6

#: Yields how many problems are left, or None while that is not known.
Steps = Generator[int | None, None, T]
Reason = Literal["queue", "deadline", "gone"]


class Refused(Exception):
    """Work that is not done, or not to its end: too much waits already (``queue``), it would take
    or took too long (``deadline``), or the client has left (``gone``). In `retry_s` whole seconds
    there will be room for it."""

    def __init__(self, reason: Reason, retry_s: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_s = reason, max(1, math.ceil(retry_s))


class _Job(Generic[T]):
    """One request's work."""

    def __init__(self, client: _Client, steps: Steps[T], left: int, deadline_s: float) -> None:
        self.client, self.steps = client, steps
        self.left, self.read = left, False  # problems: an estimate until the steps are known
        self.deadline = time.monotonic() + deadline_s
        #: Cancelled when nobody waits for it any more.
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    @property
    def ahead(self) -> int:
        """Return the problems until its end. Reading is little work beside answering, and may find
        that everything is in memory."""
        return self.left if self.read else 0


class _Client:
    """A client that has work here."""

    def __init__(self, name: str, had: float) -> None:
        self.name = name
        self.had = had  # problems that were done for it, from where the others were when it came
        self.jobs: dict[_Job[Any], None] = {}  # in order of arrival
        self._slices = 0

    @property
    def nearest(self) -> _Job[Any]:
        return min(self.jobs, key=lambda job: job.ahead)

    def next(self) -> _Job[Any]:
        """Return the job that gets its next slice."""
        self._slices += 1
        return self.nearest if self._slices % _FOR_THE_OLDEST else next(iter(self.jobs))


class Scheduler:
    """Scheduler of the work of many requests in one thread. For one event loop."""

    def __init__(self, executor: Executor, metrics: Metrics, limit: int) -> None:
        """Work in the one thread of `executor`; let `limit` problems wait, or
        more if a single request has them."""
        self._executor, self._metrics, self._limit = executor, metrics, limit
        self._clients: dict[str, _Client] = {}
        self._waiting = 0  # problems
        self._had = 0.0  # problems that a client has had which always has work
        self._pace_s = _PACE_S
        self._worker: asyncio.Task[None] | None = None

    async def run(
        self,
        steps: Steps[T],
        *,
        client: str,
        estimate: int,
        gone: asyncio.Future[None],
        deadline_s: float,
    ) -> T:
        """Return the value of `steps`, or raise as they do.

        Args:
            client: who asks.
            estimate: how many problems there may be, until `steps` are known.
            gone: done when the client has left.
            deadline_s: seconds from now that this may take.

        Raises:
            Refused: the work was not done, for the reason that it states.
        """
        if self._waiting and self._waiting + estimate > self._limit:
            raise Refused("queue", self._waiting * self._pace_s)
        job = self._enter(steps, client, estimate, deadline_s)
        try:
            self._check(job)
            await asyncio.wait((job.result, gone), timeout=deadline_s, return_when=_FIRST)
            if job.result.done():
                return job.result.result()
            raise Refused("gone" if gone.done() else "deadline", self._waiting * self._pace_s)
        finally:
            job.result.cancel()  # if it is not done
            self._leave(job)

    def _check(self, job: _Job[Any]) -> None:
        """Refuse a job that cannot end in time, with the work that goes before it. Where nobody's
        goes before, it is tried: the pace may have been that of a machine that was busy."""
        own = job.left + sum(
            other.left for other in job.client.jobs if other is not job and other.left <= job.left
        )
        others = (client for client in self._clients.values() if client is not job.client)
        ahead = own + sum(min(own, sum(each.left for each in other.jobs)) for other in others)
        patience_s = _PATIENCE_S + _STRETCH * job.left * self._pace_s
        allowed_s = min(_PROMISED * (job.deadline - time.monotonic()), patience_s)
        if ahead > job.left and ahead * self._pace_s > allowed_s:
            raise Refused("deadline", ahead * self._pace_s - allowed_s)

    def _enter(self, steps: Steps[T], name: str, estimate: int, deadline_s: float) -> _Job[T]:
        client = self._clients.setdefault(name, _Client(name, self._had))
        job = _Job(client, steps, estimate, deadline_s)
        client.jobs[job] = None
        self._count(1, job.left)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return job

    def _leave(self, job: _Job[Any]) -> None:
        client = job.client
        if job in client.jobs:
            del client.jobs[job]
            if not client.jobs:
                del self._clients[client.name]
            self._count(-1, -job.left)

    def _count(self, requests: int, problems: int) -> None:
        self._waiting += problems
        self._metrics.add(requests, "confpred_queued_requests")
        self._metrics.add(problems, "confpred_queued_problems")

    async def _work(self) -> None:
        """Do slice after slice, until no work is left."""
        while self._clients:
            crowded = self._waiting * self._pace_s > _CROWDED_S

            def turn(client: _Client, crowded: bool = crowded) -> tuple[float, int]:
                ahead = client.nearest.ahead
                return max(client.had, self._had) + (ahead if crowded else 0), ahead

            await self._slice(min(self._clients.values(), key=turn).next())

    async def _slice(self, job: _Job[Any]) -> None:
        loop, start = asyncio.get_running_loop(), time.perf_counter()
        try:
            left, value = await loop.run_in_executor(self._executor, _advance, job.steps)
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(error)
            return self._leave(job)
        took = time.perf_counter() - start
        done = job.left - left if job.read and left is not None else took / self._pace_s
        job.client.had += done
        self._had += done / max(1, len(self._clients))
        if job.result.done():
            return None  # its client left meanwhile
        if value is not None:
            job.result.set_result(value)
            self._leave(job)
        elif left is not None:
            self._progress(job, left, took)
        return None

    def _progress(self, job: _Job[Any], left: int, took: float) -> None:
        """Record that after a slice of `took` seconds `job` has so many problems left."""
        if job.read and job.left > left:
            self._pace_s += _NEWEST * (took / (job.left - left) - self._pace_s)
        was_read, job.read = job.read, True
        self._count(0, left - job.left)
        job.left = left
        try:
            if not was_read:
                if self._waiting > max(self._limit, left):
                    raise Refused("queue", self._waiting * self._pace_s)
                self._check(job)
            elif self._waiting > left and job.deadline < time.monotonic() + left * self._pace_s / 2:
                raise Refused("deadline", self._waiting * self._pace_s)
        except Refused as refused:
            job.result.set_exception(refused)
            self._leave(job)


def _advance(steps: Steps[T]) -> tuple[int | None, T | None]:
    """Do one slice of `steps`: how many problems are left if known, and their value if done."""
    end = time.perf_counter() + SLICE_S
    try:
        while True:
            left = next(steps)
            if time.perf_counter() >= end:
                return left, None
    except StopIteration as done:
        return 0, done.value
