"""Jobs of the worker processes: compilations, and measurements on a GPU."""

from __future__ import annotations

import bisect
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from confpred.cuda.compiler import compile_kernel
from confpred.data.measurements import Run
from confpred.errors import CompileError, ConfpredError, LaunchError
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import all_families, operation_of
from confpred.measure.kernels import measure
from confpred.measure.timing import Outcome, Status
from confpred.problem.operation import KernelSpec
from confpred.sampler.tasks import HEURISTICS, Task, Unit
from confpred.sampler.worker import Done, Failed, JobProcess
from confpred.triton.triton_family import TritonFamily

#: Import paths of the two job functions.
COMPILE = f"{__name__}:compile_job"
MEASURE = f"{__name__}:measure_job"

_NICE = 10


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A kernel to be compiled for `arch` into the kernel cache."""

    kernel: KernelSpec
    arch: str


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """A task to be measured on CUDA device `ordinal`; `seed` orders its timed rounds."""

    task: Task
    ordinal: int
    seed: int


def compile_job(job: CompileJob, report: Callable[[int], None]) -> str | None:
    """Compile one kernel; return the compiler's log if it refuses, else None."""
    if os.getpriority(os.PRIO_PROCESS, 0) < _NICE:  # a GPU worker that waits leaves its GPU idle
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        compile_kernel(job.kernel, job.arch)
    except CompileError as error:
        return str(error)
    return None


def measure_job(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Measure one task; report the number of each config just before its first launch."""
    task = job.task
    where = {"ordinal": job.ordinal, "seed": job.seed}
    if task.provider == PYTORCH_OPERATOR.provider:
        from confpred.measure.pytorch import measure_pytorch  # needs PyTorch, which may be absent

        report(PYTORCH_OPERATOR.config_id)
        operation = operation_of(task.problem)
        return [measure_pytorch(operation, task.problem, mode=task.cudnn_mode, **where)]
    family = all_families()[task.provider]
    if isinstance(family, TritonFamily):
        from confpred.measure.calls import measure_calls  # needs Triton, which may be absent

        return measure_calls(task.problem, family, task.config_ids, report=report, **where)
    return measure(task.problem, family, task.config_ids, report=report, **where)


# NVRTC scales with processes, not with threads. Compilation overlaps measurement, because GPU time
# is scarce; the times are those of device events around CUDA graphs, which a busy CPU does not
# change.

#: Most seconds of a compilation, far above those of the largest kernel.
SILENCE_S = 180.0
_ATTEMPTS = 2
#: Units that wait with compiled kernels; more would only fill the cache.
_MOST_AHEAD = 256


class Compiling(Protocol):
    """A process that compiles one `CompileJob` at a time, as a `JobProcess` does.

    Attributes:
        job: job in flight; None when the process is free.
    """

    job: Any

    def start(self, job: CompileJob) -> None:
        """Give a free process a job."""

    def poll(self) -> Done | Failed | None:
        """Return how the job in flight has ended, None while it goes on; never waits."""

    def waited_for(self) -> list[Any]:
        """Return the connections to wait for while a job is in flight."""

    def stop(self, *, kill: bool = False) -> None:
        """End the process."""


class Compilers:
    """A few compiler processes and the units that wait for them. With none, no unit waits: the
    measuring process compiles the kernels that the cache lacks.

    Args:
        units: units in the order in which they are measured.
        arch: architecture that their kernels are compiled for.
        workers: the processes.

    Attributes:
        total, finished: distinct kernels, and how many of them were compiled or refused.
        errors: kernels that do not compile, with the compiler's log.
    """

    def __init__(self, units: Sequence[Unit], arch: str, workers: Sequence[Compiling]) -> None:
        self.errors: dict[KernelSpec, str] = {}
        self.finished = 0
        self._arch = arch
        self._units = units
        self._workers = workers
        self._waiting: dict[KernelSpec, list[int]] = {}
        self._missing: Counter[int] = Counter()
        for index, unit in enumerate(units if workers else ()):
            for kernel in unit.kernels():
                self._waiting.setdefault(kernel, []).append(index)
                self._missing[index] += 1
        self.total = len(self._waiting)
        self._ready = [index for index in range(len(units)) if not self._missing[index]]
        self._ahead = 0  # units with compiled kernels that are not taken yet
        self._todo = deque(self._waiting)
        self._attempts: Counter[KernelSpec] = Counter()

    def step(self) -> None:
        """Take in the compiled kernels and keep the processes busy; never wait.

        Raises:
            ConfpredError: the compiler itself cannot be used.
        """
        for worker in self._workers:
            if (job := worker.job) is not None:
                ended = worker.poll()
                if ended is None:
                    continue
                if isinstance(ended, Failed):
                    self._retry_or_refuse(job.kernel, ended)
                else:
                    self._finish(job.kernel, ended.result)
            if self._todo and self._ahead < _MOST_AHEAD:
                worker.start(CompileJob(self._todo.popleft(), self._arch))

    def next_ready(self) -> Unit | None:
        """Take the first unit whose kernels are all compiled or refused."""
        if not self._ready:
            return None
        index = self._ready.pop(0)
        self._ahead -= index in self._missing
        return self._units[index]

    def connections(self) -> list[Any]:
        """Return the connections to wait for until the next `step`."""
        return [connection for worker in self._workers for connection in worker.waited_for()]

    def stop(self) -> None:
        """Drop the kernels that are not compiled; a compilation in flight is lost."""
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
                self._ahead += 1
                bisect.insort(self._ready, index)


#: Processes that may die of a task, and those before any config was launched (if it is too large
#: for the GPU's memory, say), before it is given up; its other configs stay unmeasured.
MAX_FAILURES = 5
MAX_UNEXPLAINED = 2
#: Tasks in a row without an outcome after which the GPU counts as unusable.
MAX_GIVEN_UP = 3


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a task.

    Attributes:
        task: the planned task.
        outcomes: outcomes of its configs, failures included.
        given_up: how many configs have no outcome, because too many processes died of the task.
        message: the last failure; empty if there was none.
        seconds: seconds of measuring on the GPU.
    """

    task: Task
    outcomes: tuple[Outcome, ...]
    given_up: int
    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The end of a worker process, with its units, which have to be measured again.

    Attributes:
        begun: the unit that was being measured, if any.
        units: all units of the worker.
        status, message: for the rows of `begun`, if it is given up.
    """

    begun: Unit | None
    units: tuple[Unit, ...]
    status: Status
    message: str


class Gpu(Protocol):
    """A GPU that measures units.

    Attributes:
        name: name of the GPU in messages.
        run: the columns that its rows share.
        units: units that were sent and have not ended, in order.
    """

    units: list[Unit]

    @property
    def name(self) -> str: ...

    @property
    def run(self) -> Run: ...

    def has_room(self) -> bool:
        """Return whether it takes a further unit now."""

    def send(self, unit: Unit, refusals: Refusals) -> None:
        """Measure `unit`, except the configs in `refusals`, whose outcomes are known."""

    def poll(self) -> list[Finished | Lost]:
        """Return the events since the last call; never wait.

        Raises:
            LaunchError: the GPU cannot be used; `units` are those that it had.
        """

    def connections(self) -> list[Any]:
        """Return the connections to wait for until the next `poll`."""

    def stop(self, *, kill: bool) -> None:
        """End its processes; with `kill`, even while one is busy."""


#: The outcomes of a task's configs that are known before it is measured.
Refusals = Mapping[Task, Sequence[Outcome]]


class GpuWorker:
    """One GPU. A process measures whatever comes; the heuristics of PyTorch's operator have another
    of their own (`confpred.measure.pytorch.measure_pytorch` says why), and never both work at once.

    Args:
        run: what the rows measured here share.
        ordinal: CUDA device.
        function: import path of the job function for `MeasureJob`s.
        silence_s: a config that takes longer than this to check, or a task to time, is taken to
            hang.
        seed: of the order of timed rounds.

    Attributes:
        units: the tasks of the one in flight that have not ended, if any.
    """

    def __init__(self, run: Run, ordinal: int, function: str, silence_s: float, seed: int) -> None:
        self.run, self._ordinal, self._seed = run, ordinal, seed
        self._usual, self._heuristic = (JobProcess(function, silence_s) for _ in range(2))
        self._worker = self._usual
        self.units: list[Unit] = []
        self._tasks: deque[Task] = deque()  # of the unit, the one in flight first
        self._refusals: Refusals = {}
        self._left: list[int] = []
        self._outcomes: list[Outcome] = []
        self._failures: list[Failed] = []
        self._given_up = 0

    @property
    def name(self) -> str:
        """The GPU's name in messages."""
        return f"CUDA device {self._ordinal}"

    def has_room(self) -> bool:
        """Return whether it is free."""
        return not self.units

    def connections(self) -> list[Connection]:
        """Return the connections to wait for until the next `poll`."""
        return self._worker.waited_for()

    def send(self, unit: Unit, refusals: Refusals) -> None:
        """Measure `unit` on this free GPU, except the configs whose outcome is known already."""
        self.units, self._tasks, self._refusals = [unit], deque(unit.tasks), refusals
        self._begin()

    def poll(self) -> list[Finished | Lost]:
        """Return the task that has ended, if one has; never waits.

        Raises:
            LaunchError: the GPU fails whatever it is given.
        """
        if not self.units:
            return []
        task, seconds = self._tasks[0], 0.0
        if self._left:
            ended = self._worker.poll()
            if ended is None or (isinstance(ended, Failed) and self._goes_on(task, ended)):
                return []
            if not isinstance(ended, Failed):
                self._outcomes += ended.result
                self._left, seconds = [], ended.seconds
        return [self._finish(task, seconds)]

    def stop(self, *, kill: bool) -> None:
        """End the processes; with `kill`, even while one is busy."""
        for worker in (self._usual, self._heuristic):
            worker.stop(kill=kill)

    def _begin(self) -> None:
        task = self._tasks[0]
        self._worker = self._heuristic if task.cudnn_mode == HEURISTICS else self._usual
        self._outcomes, self._failures = list(self._refusals.get(task, ())), []
        done = {outcome.config_id for outcome in self._outcomes}
        self._left = [config_id for config_id in task.config_ids if config_id not in done]
        self._launch(task)

    def _launch(self, task: Task) -> None:
        if self._left:
            remaining = replace(task, config_ids=tuple(self._left))
            self._worker.start(MeasureJob(remaining, self._ordinal, self._seed))

    def _goes_on(self, task: Task, failed: Failed) -> bool:
        """Blame the config reported last, and measure the others again in a new process, if any is
        left and not too many failed."""
        self._failures.append(failed)
        if failed.reported in self._left:
            self._left.remove(failed.reported)
            status: Status = "timeout" if failed.how == "silent" else "launch_error"
            self._outcomes.append(Outcome(failed.reported, status, message=failed.message))
        unexplained = sum(failure.reported is None for failure in self._failures)
        if len(self._failures) >= MAX_FAILURES or unexplained >= MAX_UNEXPLAINED:
            return False
        self._launch(task)
        return bool(self._left)

    def _finish(self, task: Task, seconds: float) -> Finished:
        message = self._failures[-1].message if self._failures else ""
        self._given_up = 0 if self._outcomes else self._given_up + 1
        if self._given_up == MAX_GIVEN_UP:
            raise LaunchError(
                f"{self.name} failed {MAX_GIVEN_UP} problems in a row; the last one,"
                f" {task.problem}: {message}"
            )
        finished = Finished(task, tuple(self._outcomes), len(self._left), message, seconds)
        self._tasks.popleft()
        self.units = [Unit(tuple(self._tasks))] if self._tasks else []
        if self._tasks:
            self._begin()
        return finished
