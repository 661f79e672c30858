"""One GPU and its worker processes: measures one task after the other, and survives crashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from confpred.data.measurements import Run
from confpred.errors import LaunchError
from confpred.measure.outcome import Outcome, Status
from confpred.sampler.jobs import MeasureJob
from confpred.sampler.tasks import HEURISTICS, Task
from confpred.sampler.worker import Failed, Worker

#: A task that cost this many processes, or this many before any config was launched (too large for
#: the GPU's memory, say), is given up; its other configs stay unmeasured.
MAX_FAILURES = 5
MAX_UNEXPLAINED = 2
#: So many tasks in a row without a single outcome mean that the GPU cannot be used.
MAX_GIVEN_UP = 3


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a task.

    Attributes:
        task: as it was planned.
        outcomes: of its configs, those that failed included.
        given_up: how many configs have no outcome, because too many processes died of the task.
        message: the last failure; empty if there was none.
        seconds: of measuring on the GPU.
    """

    task: Task
    outcomes: tuple[Outcome, ...]
    given_up: int
    message: str
    seconds: float


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
    """

    def __init__(self, run: Run, ordinal: int, function: str, silence_s: float, seed: int) -> None:
        self.run = run
        self.ordinal = ordinal
        self._seed = seed
        self._usual, self._heuristic = (Worker(function, silence_s) for _ in range(2))
        self._worker = self._usual
        self._task: Task | None = None
        self._left: list[int] = []
        self._outcomes: list[Outcome] = []
        self._failures: list[Failed] = []
        self._given_up = 0

    @property
    def task(self) -> Task | None:
        """The task in flight."""
        return self._task

    def connections(self) -> list[Connection]:
        """What to wait for until the next `poll`."""
        connection = self._worker.connection
        return [connection] if self._worker.job is not None and connection is not None else []

    def start(self, task: Task, known: Sequence[Outcome]) -> None:
        """Measure `task` on this free GPU, except the configs whose outcome is `known` already."""
        self._task = task
        self._worker = self._heuristic if task.cudnn_mode == HEURISTICS else self._usual
        self._outcomes, self._failures = list(known), []
        done = {outcome.config_id for outcome in known}
        self._left = [config_id for config_id in task.config_ids if config_id not in done]
        self._launch(task)

    def poll(self) -> Finished | None:
        """The end of the task in flight, or None; never waits.

        Raises:
            LaunchError: the GPU fails whatever it is given.
        """
        task = self._task
        if task is None:
            return None
        if not self._left:
            return self._finish(task, 0.0)
        ended = self._worker.poll()
        if ended is None:
            return None
        if isinstance(ended, Failed):
            return self._blame(task, ended)
        self._outcomes += ended.result
        self._left = []
        return self._finish(task, ended.seconds)

    def stop(self, *, kill: bool) -> None:
        """End the processes; with `kill`, even while one is busy."""
        for worker in (self._usual, self._heuristic):
            worker.stop(kill=kill)

    def _launch(self, task: Task) -> None:
        if self._left:
            rest = replace(task, config_ids=tuple(self._left))
            self._worker.start(MeasureJob(rest, self.ordinal, self._seed))

    def _blame(self, task: Task, failed: Failed) -> Finished | None:
        """The config reported last is the culprit; measure the others again, in a new process."""
        self._failures.append(failed)
        if failed.reported in self._left:
            self._left.remove(failed.reported)
            status: Status = "timeout" if failed.how == "silent" else "launch_error"
            self._outcomes.append(Outcome(failed.reported, status, message=failed.message))
        unexplained = sum(failure.reported is None for failure in self._failures)
        if len(self._failures) < MAX_FAILURES and unexplained < MAX_UNEXPLAINED:
            self._launch(task)
            return None if self._left else self._finish(task, 0.0)
        return self._finish(task, 0.0)

    def _finish(self, task: Task, seconds: float) -> Finished:
        message = self._failures[-1].message if self._failures else ""
        if self._outcomes:
            self._given_up = 0
        else:
            self._given_up += 1
        if self._given_up == MAX_GIVEN_UP:
            raise LaunchError(
                f"CUDA device {self.ordinal} failed {MAX_GIVEN_UP} problems in a row; the last one,"
                f" {task.problem}: {message}"
            )
        self._task = None
        return Finished(task, tuple(self._outcomes), len(self._left), message, seconds)
