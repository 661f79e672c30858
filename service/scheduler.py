"""Whose work is done next: requests share one thread in slices of a few milliseconds.

The rules, from the outside in:

- Among clients, the next slice is for the one that has had the least time since it has work here,
  so that a client with many batches takes no more of the machine than one with a few.
- Among the requests of one client, it is for the one with the fewest problems left, so that small
  requests overtake large ones; but each fourth slice is for the one that has waited longest, so
  that every request ends, however many small ones follow it.
- A request that nobody waits for any more gets no further slice.
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
_NEWEST = 0.1  # the weight of the newest slice in what is known

#: Yields how many problems are left, or None while that is not known.
Steps = Generator[int | None, None, T]
Reason = Literal["queue", "deadline", "gone"]


class Refused(Exception):
    """Work that is not done, or not to its end: too much waits already (``queue``), it took too
    long (``deadline``), or the client has left (``gone``). All that waits now will be done in
    `retry_s` whole seconds."""

    def __init__(self, reason: Reason, retry_s: int) -> None:
        super().__init__(reason)
        self.reason, self.retry_s = reason, retry_s


class _Job(Generic[T]):
    """One request's work."""

    def __init__(self, client: _Client, steps: Steps[T], left: int) -> None:
        self.client, self.steps = client, steps
        self.left, self.read = left, False  # problems: an estimate until the steps are known
        #: Cancelled when nobody waits for it any more.
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class _Client:
    """A client that has work here."""

    def __init__(self, name: str, used_s: float) -> None:
        self.name = name
        self.used_s = used_s  # of the thread's time, from where the others were when it came
        self.jobs: dict[_Job[Any], None] = {}  # in order of arrival
        self._slices = 0

    def next(self) -> _Job[Any]:
        """Return the job that gets its next slice."""
        self._slices += 1
        if self._slices % _FOR_THE_OLDEST == 0:
            return next(iter(self.jobs))
        # Reading is little work beside answering, and may find that everything is in memory.
        return min(self.jobs, key=lambda job: job.left if job.read else 0)


class Scheduler:
    """Scheduler of the work of many requests in one thread. For one event loop."""

    def __init__(self, executor: Executor, metrics: Metrics, limit: int) -> None:
        """Work in the one thread of `executor`; let `limit` problems wait, or
        more if a single request has them."""
        self._executor, self._metrics, self._limit = executor, metrics, limit
        self._clients: dict[str, _Client] = {}
        self._waiting = 0  # problems
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
            raise self._refused("queue")
        job = self._enter(steps, client, estimate)
        try:
            await asyncio.wait(
                (job.result, gone), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if job.result.done():
                return job.result.result()
            raise self._refused("gone" if gone.done() else "deadline")
        finally:
            job.result.cancel()  # if it is not done
            self._leave(job)

    def _enter(self, steps: Steps[T], name: str, estimate: int) -> _Job[T]:
        if name not in self._clients:
            used = min((client.used_s for client in self._clients.values()), default=0.0)
            self._clients[name] = _Client(name, used)
        client = self._clients[name]
        job = _Job(client, steps, estimate)
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

    def _refused(self, reason: Reason) -> Refused:
        return Refused(reason, max(1, math.ceil(self._waiting * self._pace_s)))

    async def _work(self) -> None:
        """Do slice after slice, until no work is left."""
        while self._clients:
            client = min(self._clients.values(), key=lambda client: client.used_s)
            await self._slice(client.next())

    async def _slice(self, job: _Job[Any]) -> None:
        loop, start = asyncio.get_running_loop(), time.perf_counter()
        try:
            left, value = await loop.run_in_executor(self._executor, _advance, job.steps)
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(error)
            return self._leave(job)
        took = time.perf_counter() - start
        job.client.used_s += took
        if job.result.done():
            return None  # its client left meanwhile
        if value is not None:
            job.result.set_result(value)
            self._leave(job)
        elif left is not None:
            self._progress(job, left, took)
        return None

    def _progress(self, job: _Job[Any], left: int, took: float) -> None:
        """Note that after a slice of `took` seconds `job` has so many problems left."""
        if job.read and job.left > left:
            self._pace_s += _NEWEST * (took / (job.left - left) - self._pace_s)
        self._count(0, left - job.left)
        job.left = left
        if not job.read and self._waiting > max(self._limit, left):
            job.result.set_exception(self._refused("queue"))
            self._leave(job)
        job.read = True


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
