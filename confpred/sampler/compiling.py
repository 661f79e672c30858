"""Compiles the kernels of tasks into the kernel cache, in parallel and in the tasks' order.

NVRTC scales with processes, not with threads. Compilation overlaps measurement: the times come from
device events around CUDA graphs, which a busy CPU does not disturb, and GPU time is what is scarce.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain
from multiprocessing.connection import Connection

from confpred.errors import ConfpredError
from confpred.problem.operation import KernelSpec
from confpred.sampler.jobs import CompileJob
from confpred.sampler.tasks import Task
from confpred.sampler.worker import Failed, Worker

#: Far above the seconds that the largest kernel takes.
_SILENCE_S = 180.0
_ATTEMPTS = 2


class Compilers:
    """A few compiler processes and the tasks that wait for them. With none, no task waits: its
    kernels lie in the cache, and what is missing there, the process that measures it compiles.

    Attributes:
        total, finished: distinct kernels, and how many of them were compiled or refused.
        errors: kernels that do not compile, with the compiler's log.
    """

    def __init__(self, tasks: Sequence[Task], arch: str, processes: int, function: str) -> None:
        self.errors: dict[KernelSpec, str] = {}
        self.finished = 0
        self._arch = arch
        self._tasks = tasks
        self._waiting: dict[KernelSpec, list[int]] = {}
        self._missing: Counter[int] = Counter()
        for index, task in enumerate(tasks if processes else ()):
            for kernel in dict.fromkeys(chain.from_iterable(task.kernels())):
                self._waiting.setdefault(kernel, []).append(index)
                self._missing[index] += 1
        self.total = len(self._waiting)
        self._ready = [index for index in range(len(tasks)) if not self._missing[index]]
        self._todo = deque(self._waiting)
        self._attempts: Counter[KernelSpec] = Counter()
        self._workers = [Worker(function, _SILENCE_S) for _ in range(min(processes, self.total))]

    def step(self) -> None:
        """Take in what is compiled and keep the processes busy; never waits.

        Raises:
            ConfpredError: the compiler itself cannot be used.
        """
        for worker in self._workers:
            if worker.job is not None:
                job = worker.job
                ended = worker.poll()
                if ended is None:
                    continue
                if isinstance(ended, Failed):
                    self._retry_or_refuse(job.kernel, ended)
                else:
                    self._finish(job.kernel, ended.result)
            if self._todo:
                worker.start(CompileJob(self._todo.popleft(), self._arch))

    def next_ready(self, wanted: Callable[[Task], bool] = lambda task: True) -> Task | None:
        """The first task that is `wanted` and whose kernels are all compiled or refused; each
        comes once."""
        passed: list[int] = []
        found: Task | None = None
        while self._ready and found is None:
            index = heapq.heappop(self._ready)
            if wanted(self._tasks[index]):
                found = self._tasks[index]
            else:
                passed.append(index)
        for index in passed:
            heapq.heappush(self._ready, index)
        return found

    def connections(self) -> list[Connection]:
        """What to wait for until the next `step`."""
        busy = [worker for worker in self._workers if worker.job is not None]
        return [worker.connection for worker in busy if worker.connection is not None]

    def stop(self) -> None:
        """Drop what is not compiled; a compilation in flight is lost."""
        self._todo.clear()
        for worker in self._workers:
            worker.stop(kill=True)

    def _retry_or_refuse(self, kernel: KernelSpec, failed: Failed) -> None:
        if failed.how == "error":  # not the kernel's fault: no compiler, or a full disk
            raise ConfpredError(f"kernels cannot be compiled: {failed.message}")
        self._attempts[kernel] += 1
        if self._attempts[kernel] < _ATTEMPTS:
            self._todo.appendleft(kernel)
        else:
            self._finish(kernel, f"the compiler failed: {failed.message}")

    def _finish(self, kernel: KernelSpec, error: str | None) -> None:
        self.finished += 1
        if error is not None:
            self.errors[kernel] = error
        for index in self._waiting.pop(kernel):
            self._missing[index] -= 1
            if not self._missing[index]:
                heapq.heappush(self._ready, index)
