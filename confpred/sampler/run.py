"""The sampler's one loop: it keeps compilers and GPUs busy, and stores their results."""

from __future__ import annotations

import math
import os
import re
import secrets
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from confpred._version import __version__
from confpred.cuda.compiler import nvrtc_version
from confpred.cuda.driver import describe, device_count, device_of
from confpred.data.measurements import Measurement, Run
from confpred.data.remote import Folder
from confpred.data.suites import Suite
from confpred.errors import InvalidInput, LaunchError
from confpred.families.registry import operation_of
from confpred.measure.timing import Outcome
from confpred.problem.device import get_device
from confpred.problem.record import Record
from confpred.sampler import jobs
from confpred.sampler.jobs import Compilers, Compiling, Finished, Gpu, GpuWorker, Lost
from confpred.sampler.store import Store, open_store
from confpred.sampler.tasks import Choosing, RowKey, Task, Unit, plan, units_of
from confpred.sampler.worker import JobProcess

_TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Sampling(Choosing):
    """Settings of a run. The seed also orders the timed rounds.

    Attributes:
        anchors: tasks that every GPU measures first, if any other task is left.
        processes: compilations at a time; 0 if the kernels are in the cache already.
        budget_s: seconds after which no problem is begun; those under way are finished. None for no
            limit.
        silence_s: a worker that reports nothing for longer is killed.
        compile, measure: import paths of the job functions of the worker processes.
    """

    anchors: tuple[Task, ...] = ()
    processes: int = 1
    budget_s: float | None = None
    silence_s: float = 60.0
    compile: str = jobs.COMPILE
    measure: str = jobs.MEASURE


#: Workers that may die of a unit before it counts as failed.
MOST_KILLED = 2
#: GPUs that must measure the anchors to show which of them deviates.
LEAST_ANCHORED = 3
#: Largest deviation of a GPU's anchors from the others', as a share. The geometric means of the 12
#: runs in ``datasets/anchors`` are within 1.1 % of their median.
ANCHOR_NOISE = 0.03
#: Seconds that a GPU which has measured the anchors waits for others.
ANCHORS_WAIT_S = 30.0


@dataclass(slots=True)
class Anchored:
    """Anchors of one GPU: their times in ms, when they were done, and whether they were judged."""

    times: dict[Task, float] = field(default_factory=dict)
    since: float = 0.0
    judged: bool = False


def anchors_off(times: Mapping[Task, float], all_times: Sequence[Mapping[Task, float]]) -> float:
    """Return how far a GPU's `times` of the anchors are above those of all GPUs, `all_times`: the
    geometric mean of their ratios to the medians, less 1. Infinity if the GPU lacks the time of an
    anchor that most GPUs could time."""
    timed = {task for own in all_times for task in own}
    every = {task: [own[task] for own in all_times if task in own] for task in timed}
    if any(2 * len(values) > len(all_times) for task, values in every.items() if task not in times):
        return math.inf
    logs = [math.log(time_ms / median(every[task])) for task, time_ms in times.items()]
    return math.expm1(math.fsum(logs) / len(logs)) if logs else 0.0


@dataclass(slots=True)
class Tally:
    """Progress of a run; it is updated while the run goes on.

    Attributes:
        rows, total_rows: rows that this run has so far, and rows that it is planned to have.
        tasks, total_tasks: the same for tasks, such as a problem and a family.
        kernels, total_kernels: distinct kernels, compiled or refused.
        statuses: rows by status.
        given_up: tasks that too many processes died of, with the last failure.
        gpus, lost: GPUs in use, and workers that ended with units.
        set_aside: why GPUs are not used any more: a text for each, with its name.
        current: the problem begun last.
        measured_rows, measuring_s: rows of successful tasks, and the GPUs' seconds for them;
            loading CUDA counts, waiting for the compiler does not.
        elapsed_s: seconds since the start.
    """

    total_rows: int = 0
    total_tasks: int = 0
    total_kernels: int = 0
    rows: int = 0
    tasks: int = 0
    kernels: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    given_up: list[str] = field(default_factory=list)
    gpus: int = 0
    lost: int = 0
    set_aside: list[str] = field(default_factory=list)
    current: Record | None = None
    measured_rows: int = 0
    measuring_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether every planned row is done."""
        return self.tasks == self.total_tasks

    def take(self, finished: Finished) -> None:
        """Count a finished task."""
        self.tasks += 1
        self.rows += len(finished.outcomes)
        self.statuses.update(outcome.status for outcome in finished.outcomes)
        if finished.seconds:
            self.measuring_s += finished.seconds
            self.measured_rows += len(finished.outcomes)
        if finished.given_up:
            self.given_up.append(f"{finished.task.problem}: {finished.message}")


class Engine(Protocol):
    """The GPUs and compilers of a run.

    Attributes:
        device: key of its GPUs' kind.
        run_id: id of the run; the GPUs' own ids begin with it.
        gpus: GPUs that can be used.
        set_aside: why GPUs were refused before the run: a text for each, with its name.
    """

    device: str
    run_id: str

    @property
    def gpus(self) -> Sequence[Gpu]: ...

    @property
    def set_aside(self) -> Sequence[str]: ...

    def compiling(self, settings: Sampling) -> list[Compiling]:
        """Return the processes that compile."""

    def wait(self, connections: list[Any], seconds: float) -> None:
        """Wait until one of the connections has something to read, or for so many seconds."""


class Here:
    """The engine of this machine's GPUs: child processes, as `Engine` describes.

    Args:
        runs: CUDA device -> the columns that its rows share. All are GPUs of one kind.
        settings: settings of the run.

    Raises:
        InvalidInput: the GPUs are not of one kind.
    """

    def __init__(self, runs: Mapping[int, Run], settings: Sampling) -> None:
        keys = {run.device for run in runs.values()}
        if len(keys) != 1:
            raise InvalidInput("gpus", sorted(keys), "GPUs of one kind in one run")
        (self.device,) = keys
        self.run_id = next(iter(runs.values())).run_id
        self.set_aside: list[str] = []
        own = (settings.measure, settings.silence_s, settings.seed)
        self.gpus = [GpuWorker(run, ordinal, *own) for ordinal, run in runs.items()]

    def compiling(self, settings: Sampling) -> list[Compiling]:
        """Return the processes that compile; each starts at its first kernel."""
        return [JobProcess(settings.compile, jobs.SILENCE_S) for _ in range(settings.processes)]

    def wait(self, connections: list[Any], seconds: float) -> None:
        """Wait until a process has something to read, or for so many seconds."""
        wait(connections, seconds)


def sample(
    suite: Suite,
    folder: Folder,
    engine: Engine,
    settings: Sampling,
    *,
    chosen: Callable[[Mapping[RowKey, AbstractSet[str]]], list[Task]] | None = None,
    interrupts: Callable[[], int] = lambda: 0,
    show: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Measure the configs of `suite` that `folder` lacks.

    Args:
        suite: the problems, all of one operation.
        folder: folder of Parquet shards; made if missing. Its rows are not measured again.
        engine: measures and compiles.
        settings: which of their candidates are measured, and how.
        chosen: returns the tasks in place of `plan`, given the measured configs of `folder`; of the
            suite only the operation counts then.
        interrupts: how often the user has asked to stop: once ends the run after the units in
            flight, twice at once.
        show: called about ten times a second.

    Returns:
        The tally; the rows that it counts are on disk.

    Raises:
        FolderBusy, StorageError, DataError: the folder cannot be used; see `open_store`.
        LaunchError: no GPU can be used any longer. Finished measurements are on disk.
        ConfpredError: the compiler cannot be used.
    """
    begun = time.monotonic()
    operation = operation_of(suite.entries[0].problem)
    device = get_device(engine.device)
    with open_store(folder, engine.run_id, operation) as store:
        measured = store.measured(device.key)
        tasks = plan(suite, device, settings, measured) if chosen is None else chosen(measured)
        units = units_of(tasks)
        compilers = Compilers(units, device.arch, engine.compiling(settings))
        tally = Tally(sum(len(task.config_ids) for task in tasks), len(tasks), compilers.total)
        tally.set_aside += engine.set_aside
        drive = _Drive(engine, compilers, store, tally, Unit(settings.anchors) if tasks else None)
        try:
            while True:
                tally.elapsed_s = time.monotonic() - begun
                is_over = settings.budget_s is not None and tally.elapsed_s >= settings.budget_s
                drive.collect()
                if interrupts() > 1:
                    break
                if interrupts() or is_over:
                    compilers.stop()
                else:
                    compilers.step()
                    drive.feed()
                tally.kernels = compilers.finished
                show(tally)
                if not drive.busy() and (tally.finished or interrupts() or is_over):
                    break
                engine.wait(compilers.connections() + drive.connections(), _TICK_SECONDS)
        finally:
            compilers.stop()
            for gpu in engine.gpus:
                gpu.stop(kill=bool(gpu.units))
            store.flush()
    return tally


class _Drive:
    """The dispatcher of a run: it hands units from the compilers to the GPUs, and their rows to the
    store.

    A GPU measures the anchors first, and begins the suite once they are compared with those of the
    others. Units of a lost worker are sent again before new ones.
    """

    def __init__(
        self,
        engine: Engine,
        compilers: Compilers,
        store: Store,
        tally: Tally,
        anchors: Unit | None,
    ) -> None:
        self._compilers, self._store, self._tally = compilers, store, tally
        self._gpus = list(engine.gpus)
        self._anchors = anchors if anchors is not None and anchors.tasks else None
        self._anchored: dict[str, Anchored] = {}  # by the id of the run that measured them
        self._again: deque[Unit] = deque()
        self._killed: Counter[Unit] = Counter()
        tally.gpus = len(self._gpus)

    def busy(self) -> bool:
        """Return whether a GPU has units."""
        return any(gpu.units for gpu in self._gpus)

    def connections(self) -> list[Any]:
        """Return the connections to wait for until the next `collect`."""
        return [connection for gpu in self._gpus for connection in gpu.connections()]

    def collect(self) -> None:
        """Store the GPUs' finished tasks, and take back the units that they lost.

        Raises:
            LaunchError: no GPU is left.
            StorageError: the rows cannot be stored.
        """
        for gpu in list(self._gpus):
            try:
                for event in gpu.poll():
                    if isinstance(event, Lost):
                        self._take_back(gpu, event)
                    else:
                        self._keep(gpu, event)
            except LaunchError as error:
                self._set_aside(gpu, error)
        self._judge()
        self._store.flush(only_if_due=True)

    def feed(self) -> None:
        """Give each GPU that has room a unit, those with the fewest units first."""
        while sum(self._give(gpu) for gpu in sorted(self._gpus, key=lambda gpu: len(gpu.units))):
            pass

    def _give(self, gpu: Gpu) -> bool:
        """Send the GPU the anchors, or the next unit whose kernels are compiled. Return whether it
        got one: not if it has no room, its anchors are not compared yet, or no unit is ready."""
        if not gpu.has_room():
            return False
        anchored = self._anchored.get(gpu.run.run_id)
        if self._anchors is not None and anchored is None:
            self._anchored[gpu.run.run_id] = Anchored()
            gpu.send(self._anchors, {})
            return True
        if anchored is not None and not anchored.judged:
            return False
        unit = self._again.popleft() if self._again else self._compilers.next_ready()
        if unit is not None:
            gpu.send(unit, {task: _refused(task, self._compilers) for task in unit.tasks})
            self._tally.current = unit.problem
        return unit is not None

    def _keep(self, gpu: Gpu, finished: Finished) -> None:
        """Store a finished task."""
        task = finished.task
        if task.anchor:
            times = self._anchored[gpu.run.run_id].times
            times.update((task, o.time_ms) for o in finished.outcomes if o.status == "ok")
        else:
            self._tally.take(finished)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        facts = (task.problem, task.networks, task.provider, task.source_digest, gpu.run)
        rows = [Measurement(*facts, outcome, now) for outcome in finished.outcomes]
        self._store.add(rows, anchors=task.anchor)

    def _take_back(self, gpu: Gpu, lost: Lost) -> None:
        """Have the units of a lost worker measured again. The one that it had begun is measured
        again only once: a unit that has killed two workers has failed."""
        for unit in reversed([unit for unit in lost.units if not unit.anchors]):
            self._killed[unit] += unit == lost.begun
            if self._killed[unit] < MOST_KILLED:
                self._again.appendleft(unit)
                continue
            message = f"killed {MOST_KILLED} workers: {lost.message}"
            for task in unit.tasks:
                refused = _refused(task, self._compilers)
                done = {outcome.config_id for outcome in refused}
                left = [config_id for config_id in task.config_ids if config_id not in done]
                failed = [Outcome(config_id, lost.status, message=message) for config_id in left]
                self._keep(gpu, Finished(task, (*refused, *failed), 0, message, 0.0))
        self._tally.lost += 1
        if any(unit.anchors for unit in lost.units):
            del self._anchored[gpu.run.run_id]

    def _set_aside(self, gpu: Gpu, error: LaunchError) -> None:
        """Use the GPU no more, and send its units to others."""
        self._gpus.remove(gpu)
        gpu.stop(kill=True)
        if not self._gpus:
            raise error
        self._again.extendleft(unit for unit in reversed(gpu.units) if not unit.anchors)
        gpu.units.clear()
        self._anchored.pop(gpu.run.run_id, None)
        self._tally.gpus = len(self._gpus)
        self._tally.set_aside.append(str(error))

    def _judge(self) -> None:
        """Compare the anchors of each GPU that has measured them with the median of all; a GPU that
        differs by more than the noise is set aside.

        Two GPUs that differ do not show which of them deviates, so it takes three, and a GPU waits
        for others that are about to measure the anchors.
        """
        if self._anchors is None:
            return
        now = time.monotonic()
        done = []
        for gpu in self._gpus:
            anchored = self._anchored.get(gpu.run.run_id)
            if anchored is not None and not any(unit.anchors for unit in gpu.units):
                anchored.since = anchored.since or now
                done.append((gpu, anchored))
        waiting = [anchored for _, anchored in done if not anchored.judged]
        if not waiting:
            return
        waited = now - min(anchored.since for anchored in waiting)
        if len(done) < min(LEAST_ANCHORED, len(self._gpus)) and waited < ANCHORS_WAIT_S:
            return
        all_times = [anchored.times for _, anchored in done]
        for gpu, anchored in done:
            anchored.judged = True
            off = anchors_off(anchored.times, all_times)
            if len(done) >= LEAST_ANCHORED and abs(off) > ANCHOR_NOISE:
                text = f"{gpu.name} takes {1 + off:.2f} of the others' time for the anchors"
                self._set_aside(gpu, LaunchError(f"{text}: set aside"))


def _refused(task: Task, compilers: Compilers) -> list[Outcome]:
    """Return an outcome for each config of `task` whose kernels do not compile."""
    if not compilers.errors:
        return []
    return [
        Outcome(config_id, "compile_error", message=refused[0])
        for config_id, kernels in zip(task.config_ids, task.kernels(), strict=True)
        if (refused := [compilers.errors[k] for k in kernels if k in compilers.errors])
    ]


def find_gpus(gpus: str) -> dict[int, Run]:
    """Return the `Run` of each CUDA device; each GPU has a run id of its own.

    Args:
        gpus: ``all``, or CUDA device numbers such as ``0,1``.

    Raises:
        MissingExtra: the CUDA packages are not installed.
        LaunchError: there is no GPU.
        InvalidInput: a number names no GPU.
        UnknownDevice: a GPU cannot be described (`confpred.cuda.driver.device_of`).
    """
    cuda = nvrtc_version()
    count = device_count()
    if not count:
        raise LaunchError("measuring needs an NVIDIA GPU, and no CUDA device can be used here")
    if gpus == "all":
        ordinals = list(range(count))
    elif re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", gpus):
        ordinals = sorted({int(number) for number in gpus.split(",")})
    else:
        raise InvalidInput("gpus", gpus, "all, or CUDA device numbers such as 0,1")
    if ordinals[-1] >= count:
        raise InvalidInput("gpus", gpus, f"CUDA device numbers from 0 to {count - 1}")
    run_id, project = secrets.token_hex(4), project_version()
    runs = {}
    for ordinal in ordinals:
        name, driver = describe(ordinal)
        own_id = run_id if len(ordinals) == 1 else f"{run_id}-{ordinal}"
        runs[ordinal] = Run(own_id, device_of(ordinal).key, name, driver, cuda, project)
    return runs


def project_version() -> str:
    """Return the version and the commit: ``$CONFPRED_COMMIT``, or that of this checkout."""
    if commit := os.environ.get("CONFPRED_COMMIT"):
        return f"{__version__}+{commit}"
    # A package installed in another project's checkout is not tracked there.
    tracked, commit = "ls-files --error-unmatch __init__.py", "rev-parse --short=10 HEAD"
    try:
        for words in (tracked, commit):
            command = ["git", "-C", str(Path(__file__).parents[1]), *words.split()]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{__version__}+{done.stdout.strip()}"
