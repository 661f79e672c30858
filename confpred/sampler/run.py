"""The sampler's one loop: compilers and GPUs are kept busy, and what they answer is stored."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing.connection import wait
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from confpred._version import __version__
from confpred.cuda.compiler import nvrtc_version
from confpred.cuda.driver import describe, device_count, device_of
from confpred.data.measurements import Measurement, Run, problem_of_row
from confpred.data.parquet import problem_columns, read_shards, schema, write
from confpred.data.suites import Suite
from confpred.errors import FolderBusy, InvalidInput, LaunchError, StorageError
from confpred.families.protocol import PYTORCH
from confpred.families.registry import operation_of
from confpred.measure.timing import Outcome
from confpred.problem.device import get_device
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.sampler import jobs
from confpred.sampler.jobs import Compilers, Finished, GpuWorker
from confpred.sampler.tasks import Choosing, Measured, Task, plan

_TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Settings(Choosing):
    """Settings of a run, beside what it measures; the seed is also of the order of timed rounds.

    Attributes:
        anchors: measured by every GPU before all else, wherever anything is left to measure.
        processes: compilations at a time; 0 where the kernels are in the cache already.
        budget_s: no problem is begun after this many seconds, and those that were begun are
            measured to their end; None for no limit.
        silence_s: a worker that reports nothing for longer is killed.
        compile, measure: import paths of the job functions of the worker processes.
    """

    anchors: tuple[Task, ...] = ()
    processes: int = 1
    budget_s: float | None = None
    silence_s: float = 60.0
    compile: str = jobs.COMPILE
    measure: str = jobs.MEASURE


@dataclass(slots=True)
class Tally:
    """Progress of a run; it is updated while the run goes on.

    Attributes:
        rows, total_rows: rows that this run has so far, and rows that it is planned to have.
        tasks, total_tasks: the same for pairs of a problem and a family.
        kernels, total_kernels: distinct kernels, compiled or refused.
        statuses: rows by status.
        given_up: tasks that too many processes died of, with the last failure.
        current: the problem begun last.
        measured_rows, measuring_s: rows of the tasks that went well, and the GPUs' seconds for
            them; loading CUDA counts, waiting for the compiler does not.
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
    current: Record | None = None
    measured_rows: int = 0
    measuring_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether all that was planned is done."""
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


def sample(
    suite: Suite,
    folder: Path,
    runs: Mapping[int, Run],
    settings: Settings,
    *,
    chosen: Callable[[Mapping[Measured, AbstractSet[str]]], list[Task]] | None = None,
    interrupts: Callable[[], int] = lambda: 0,
    show: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Measure what `folder` lacks of `suite`.

    Args:
        suite, settings: the problems, and which of their candidates are measured, and how.
        folder: of Parquet shards; made if missing. Rows that it holds are not measured again.
        runs: CUDA device -> what its rows share. All of them are GPUs of one kind.
        chosen: names the tasks in place of `plan`, given what `folder` holds.
        interrupts: how often the user has asked to stop: once ends the run after the problems in
            flight, twice at once.
        show: called about ten times a second.

    Returns:
        The tally; all that it counts is on disk.

    Raises:
        InvalidInput: the GPUs are not of one kind.
        FolderBusy, StorageError, DataError: the folder cannot be used; see `open_store`.
        LaunchError: a GPU fails whatever it is given. Finished measurements are on disk.
        ConfpredError: the compiler cannot be used.
    """
    begun = time.monotonic()
    keys = {run.device for run in runs.values()}
    if len(keys) != 1:
        raise InvalidInput("gpus", sorted(keys), "GPUs of one kind in one run")
    device = get_device(next(iter(keys)))
    run_id = next(iter(runs.values())).run_id
    operation = operation_of(suite.entries[0].problem)
    with open_store(folder, run_id, operation) as store:
        measured = store.measured(device.key)
        tasks = plan(suite, device, settings, measured) if chosen is None else chosen(measured)
        compilers = Compilers(tasks, device.arch, settings.processes, settings.compile)
        gpus = [
            GpuWorker(run, ordinal, settings.measure, settings.silence_s, settings.seed)
            for ordinal, run in runs.items()
        ]
        owners: dict[Record, GpuWorker] = {}
        anchors = {gpu.ordinal: deque(settings.anchors) for gpu in gpus if tasks}
        tally = Tally(sum(len(task.config_ids) for task in tasks), len(tasks), compilers.total)
        try:
            while True:
                tally.elapsed_s = time.monotonic() - begun
                over = settings.budget_s is not None and tally.elapsed_s >= settings.budget_s
                _collect(gpus, store, tally)
                if interrupts() > 1:
                    break
                if interrupts() or over:
                    compilers.stop()
                else:
                    compilers.step()
                if not interrupts():
                    for gpu in gpus:
                        if gpu.task is None and anchors.get(gpu.ordinal):
                            gpu.start(anchors[gpu.ordinal].popleft(), [])
                    _feed(gpus, compilers, tally, owners, begun_only=over)
                tally.kernels = compilers.finished
                show(tally)
                idle = not any(gpu.task for gpu in gpus)
                if idle and (tally.finished or interrupts() or over):
                    break
                busy = compilers.connections() + [c for x in gpus for c in x.connections()]
                wait(busy, _TICK_SECONDS)
        finally:
            compilers.stop()
            for gpu in gpus:
                gpu.stop(kill=gpu.task is not None)
            store.flush()
    return tally


def _feed(
    gpus: list[GpuWorker],
    compilers: Compilers,
    tally: Tally,
    owners: dict[Record, GpuWorker],
    *,
    begun_only: bool,
) -> None:
    """Give each free GPU the next task whose kernels are compiled; with `begun_only`, no further
    problem is begun. All tasks of a problem go to one GPU, its owner, in one session."""
    for gpu in gpus:
        if gpu.task is not None:
            continue

        def mine(task: Task, gpu: GpuWorker = gpu) -> bool:
            owner = owners.get(task.problem)
            return not begun_only if owner is None else owner is gpu

        if (task := compilers.next_ready(mine)) is not None:
            owners[task.problem] = gpu
            gpu.start(task, _refused(task, compilers))
            tally.current = task.problem


def _collect(gpus: list[GpuWorker], store: Store, tally: Tally) -> None:
    """Store what the GPUs have finished."""
    for gpu in gpus:
        if (finished := gpu.poll()) is not None:
            task = finished.task
            if not task.anchor:
                tally.take(finished)
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            facts = (task.problem, task.networks, task.provider, task.source_digest, gpu.run)
            store.add([Measurement(*facts, o, now) for o in finished.outcomes], anchors=task.anchor)
    store.flush(only_if_due=True)


def _refused(task: Task, compilers: Compilers) -> list[Outcome]:
    """Return an outcome for each config of `task` whose kernels do not compile."""
    if not compilers.errors:
        return []
    return [
        Outcome(config_id, "compile_error", message=refused[0])
        for config_id, kernels in zip(task.config_ids, task.kernels(), strict=True)
        if (refused := [compilers.errors[k] for k in kernels if k in compilers.errors])
    ]


# The store: a folder of Parquet shards that one sampler at a time writes to. A shard is written
# whole or not at all, every few seconds, so a process killed at any moment loses only those.

FLUSH_ROWS = 20_000
FLUSH_SECONDS = 5.0


@contextlib.contextmanager
def open_store(folder: Path, run_id: str, operation: Operation) -> Iterator[Store]:
    """Yield the store of `folder` for problems of `operation`, held by this process alone.

    Raises:
        FolderBusy: another sampler holds the folder (a lock of a dead process does not count).
        StorageError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderBusy(f"another sampler is writing to {folder}") from None
    except OSError as error:
        raise StorageError(f"cannot use {folder}: {error.strerror or error}") from error
    try:
        for stale in folder.glob(".rows-*.tmp"):  # left by a sampler that was killed while writing
            stale.unlink(missing_ok=True)
        yield Store(folder, run_id, operation)
    finally:
        lock.release()


def measured_in(folder: Path, operation: Operation, device: str) -> dict[Measured, set[str]]:
    """Return the configs that have a row of this device in a folder of shards, whatever its status;
    of PyTorch's operator the modes of cuDNN.

    Raises:
        DataError: a shard is damaged or foreign.
    """
    if not folder.is_dir():
        return {}
    keys = [*problem_columns(operation), "family", "source_digest"]
    columns = [*keys, "config", "cudnn_mode", "device"]
    table = read_shards(folder, operation, columns)
    table = table.filter(pc.field("device") == device)
    found: dict[Measured, set[str]] = {}
    wanted = [("config", "distinct"), ("cudnn_mode", "distinct")]
    for row in table.group_by(keys).aggregate(wanted).to_pylist():
        problem = problem_of_row(row, operation.problem)
        key = Measured(problem, row["family"], row["source_digest"])
        which = "cudnn_mode" if row["family"] == PYTORCH else "config"
        found[key] = set(row[f"{which}_distinct"])
    return found


class Store:
    """The shards of a folder, read and appended; made by `open_store`."""

    def __init__(self, folder: Path, run_id: str, operation: Operation) -> None:
        self.folder, self._run_id, self._operation = folder, run_id, operation
        self._rows: list[Measurement] = []
        self._anchors: list[Measurement] = []
        self._shards = 0
        self._flushed = time.monotonic()

    def measured(self, device: str) -> dict[Measured, set[str]]:
        return measured_in(self.folder, self._operation, device)

    def add(self, rows: Sequence[Measurement], *, anchors: bool = False) -> None:
        """Keep `rows` for the next flush; those of `anchors` go to shards of their own."""
        (self._anchors if anchors else self._rows).extend(rows)

    def flush(self, *, only_if_due: bool = False) -> None:
        """Write what was added as one shard; `only_if_due`, once there are many rows, or the last
        flush is a while ago.

        Raises:
            StorageError: the file system refused; the next flush tries again.
        """
        waited = time.monotonic() - self._flushed
        if only_if_due and len(self._rows) < FLUSH_ROWS and waited < FLUSH_SECONDS:
            return
        self._flushed = time.monotonic()
        for kind, rows in (("rows", self._rows), ("anchors", self._anchors)):
            if rows:
                table = pa.Table.from_pylist([r.to_row() for r in rows], schema(self._operation))
                write(table, self.folder / f"{kind}-{self._run_id}-{self._shards:05d}.parquet")
                self._shards += 1
                rows.clear()


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
        raise LaunchError("sampling needs an NVIDIA GPU, and no CUDA device can be used here")
    if gpus == "all":
        ordinals = list(range(count))
    elif re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", gpus):
        ordinals = sorted({int(number) for number in gpus.split(",")})
    else:
        raise InvalidInput("gpus", gpus, "all, or CUDA device numbers such as 0,1")
    if ordinals[-1] >= count:
        raise InvalidInput("gpus", gpus, f"CUDA device numbers from 0 to {count - 1}")
    run_id, project = secrets.token_hex(4), _project()
    runs = {}
    for ordinal in ordinals:
        name, driver = describe(ordinal)
        sitting = run_id if len(ordinals) == 1 else f"{run_id}-{ordinal}"
        runs[ordinal] = Run(sitting, device_of(ordinal).key, name, driver, cuda, project)
    return runs


def _project() -> str:
    """Return the version and the commit: ``$CONFPRED_COMMIT``, or that of this checkout."""
    if commit := os.environ.get("CONFPRED_COMMIT"):
        return f"{__version__}+{commit}"
    # A package installed into some other project's checkout is not tracked there.
    tracked, commit = "ls-files --error-unmatch __init__.py", "rev-parse --short=10 HEAD"
    try:
        for words in (tracked, commit):
            command = ["git", "-C", str(Path(__file__).parents[1]), *words.split()]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{__version__}+{done.stdout.strip()}"
