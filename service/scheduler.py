"""Scheduler of requests, which share one thread in slices of a few milliseconds.

The rules, in order:

- A request that cannot be finished before its deadline, at the measured pace and after the work
  before it, is refused when it arrives or when it is parsed.
- Among clients, the next slice is for the one with the fewest problems done since it has work here.
  If more work waits than is done in `_CROWDED_S`, it is for the client whose next reply is the
  nearest, because in turns all batches would be late. In both cases, a client with many batches
  gets no more of the machine than one with a few.
- Among the requests of one client, it is for the one with the fewest problems left, so that small
  requests overtake large ones; but each fourth slice is for the one that has waited longest, so
  that every request ends, however many small ones follow it.
- A request whose client has left, or whose deadline has passed, gets no further slice.
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

#: Seconds of one slice. A new problem takes about one millisecond, so a slice is long compared with
#: the 0.1 ms to the thread and back, and short for the next request.
SLICE_S = 0.004
_FOR_THE_OLDEST = 4  # one in so many slices of a client is for its oldest request
_PACE_S = 0.0015  # seconds of a problem, until they are measured
_FIRST = asyncio.FIRST_COMPLETED
_NEWEST = 0.05  # weight of the newest slice in the measured pace
_CROWDED_S = 1.0
#: Most seconds that a request waits, and most times its own work, whatever its deadline: a longer
#: queue would finish no more requests.
_PATIENCE_S, _STRETCH = 1.0, 30.0
#: Share of a request's time that may be taken when it arrives: smaller ones will overtake it, and
#: others are parsed before they are refused.
_PROMISED = 0.6

#: Yields how many problems are left, or None until the request is parsed.
Steps = Generator[int | None, None, T]
Reason = Literal["queue", "deadline", "gone"]


class Refused(Exception):
    """Error for work that is not done, or not finished: too much waits already (``queue``), it
    would take or took too long (``deadline``), or the client has left (``gone``). After `retry_s`
    whole seconds there will be room for it."""

    def __init__(self, reason: Reason, retry_s: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_s = reason, max(1, math.ceil(retry_s))


class _Work(Generic[T]):
    """One request's work."""

    def __init__(self, client: _ClientJobs, steps: Steps[T], left: int, deadline_s: float) -> None:
        self.client, self.steps = client, steps
        self.left, self.read = left, False  # problems: an estimate until the request is parsed
        self.deadline = time.monotonic() + deadline_s
        #: Cancelled when the client has left.
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    @property
    def ahead(self) -> int:
        """Return the problems until its end. Parsing is little work, and may find that every answer
        is cached."""
        return self.left if self.read else 0


class _ClientJobs:
    """The requests of one client."""

    def __init__(self, name: str, had: float) -> None:
        self.name = name
        self.had = had  # problems done for it; it begins with the count of the other clients
        self.jobs: dict[_Work[Any], None] = {}  # in order of arrival
        self._slices = 0

    @property
    def nearest(self) -> _Work[Any]:
        return min(self.jobs, key=lambda job: job.ahead)

    def next(self) -> _Work[Any]:
        """Return the job that gets its next slice."""
        self._slices += 1
        return self.nearest if self._slices % _FOR_THE_OLDEST else next(iter(self.jobs))


class Scheduler:
    """Scheduler of the work of many requests in one thread. For one event loop."""

    def __init__(self, executor: Executor, metrics: Metrics, limit: int) -> None:
        """Work in the one thread of `executor`; let `limit` problems wait, or more if a single
        request has more."""
        self._executor, self._metrics, self._limit = executor, metrics, limit
        self._clients: dict[str, _ClientJobs] = {}
        self._waiting = 0  # problems
        self._had = 0.0  # problems done for a client that always has work
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
        """Return the value of `steps`, or raise their error.

        Args:
            client: name of the client.
            estimate: how many problems there may be, until `steps` yields the number.
            gone: done when the client has left.
            deadline_s: most seconds from now.

        Raises:
            Refused: the work was not done, with the reason.
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

    def _check(self, job: _Work[Any]) -> None:
        """Refuse a job that cannot end in time after the work before it. Without such work it is
        tried: the pace may have been measured on a busy machine."""
        own = job.left + sum(
            other.left for other in job.client.jobs if other is not job and other.left <= job.left
        )
        others = (client for client in self._clients.values() if client is not job.client)
        ahead = own + sum(min(own, sum(job.left for job in other.jobs)) for other in others)
        patience_s = _PATIENCE_S + _STRETCH * job.left * self._pace_s
        allowed_s = min(_PROMISED * (job.deadline - time.monotonic()), patience_s)
        if ahead > job.left and ahead * self._pace_s > allowed_s:
            raise Refused("deadline", ahead * self._pace_s - allowed_s)

    def _enter(self, steps: Steps[T], name: str, estimate: int, deadline_s: float) -> _Work[T]:
        client = self._clients.setdefault(name, _ClientJobs(name, self._had))
        job = _Work(client, steps, estimate, deadline_s)
        client.jobs[job] = None
        self._count(1, job.left)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return job

    def _leave(self, job: _Work[Any]) -> None:
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

            def turn(client: _ClientJobs, crowded: bool = crowded) -> tuple[float, int]:
                ahead = client.nearest.ahead
                return max(client.had, self._had) + (ahead if crowded else 0), ahead

            await self._slice(min(self._clients.values(), key=turn).next())

    async def _slice(self, job: _Work[Any]) -> None:
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
            return None  # its client has left meanwhile
        if value is not None:
            job.result.set_result(value)
            self._leave(job)
        elif left is not None:
            self._progress(job, left, took)
        return None

    def _progress(self, job: _Work[Any], left: int, took: float) -> None:
        """Record that `job` has `left` problems left after a slice of `took` seconds."""
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
    """Do one slice of `steps`; return how many problems are left, if known, and the value if they
    are done."""
    end = time.perf_counter() + SLICE_S
    try:
        while True:
            left = next(steps)
            if time.perf_counter() >= end:
                return left, None
    except StopIteration as done:
        return 0, done.value
