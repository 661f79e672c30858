"""Jobs of made-up GPUs: a timer is in place of the measurement, and takes ``$ROW_S`` seconds a row.
All else is real: Ray, its actors and their children, kernels that are compiled, files.

Ray's workers find this module because they inherit Python's path. A file in the folder
``$FAULTS_IN`` is a fault of the problem with that batch: ``kill-5`` kills the actor each time,
``die-5`` once, ``stop-5`` stops it once, and ``hang-5`` has the measurement hang.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from confpred.data.measurements import Run
from confpred.measure.timing import Outcome
from confpred.sampler.jobs import MeasureJob, compile_job
from confpred.sampler.run import project_version

__all__ = ["compile_job"]

COMPILE = f"{__name__}:compile_job"
MEASURE = f"{__name__}:measure"
MEASURE_ON_ONE = f"{__name__}:measure_on_one"
MEASURE_UNLIKE = f"{__name__}:measure_unlike"
DESCRIBE = f"{__name__}:describe"
DESCRIBE_KINDS = f"{__name__}:describe_kinds"
DESCRIBE_VERSIONS = f"{__name__}:describe_versions"


def describe(gpus: str, *, kind: str = "h100") -> dict[int, Run]:
    """Describe the made-up GPU that Ray has given to this process, by its number on the host."""
    number = int(os.environ["CUDA_VISIBLE_DEVICES"])
    return {number: Run("", kind, kind.upper(), "0", "13", project_version())}


def describe_kinds(gpus: str) -> dict[int, Run]:
    (number,) = describe(gpus)
    return describe(gpus, kind="h200" if number == 0 else "h100")


def describe_versions(gpus: str) -> dict[int, Run]:
    """Describe GPU 0 as that of a host with another confpred."""
    found = describe(gpus)
    return {n: replace(run, project=run.project if n else "0.0.9") for n, run in found.items()}


def measure(
    job: MeasureJob, report: Callable[[int], None], *, unlike: int | None = None
) -> list[Outcome]:
    """Wait in place of measuring; the time in a row depends on the problem and config alone."""
    task, faults = job.task, Path(os.environ.get("FAULTS_IN", "/nowhere"))
    batch, outcomes = getattr(task.problem, "n", 0), []
    for row in task.config_ids:
        report(row)
        if (faults / f"kill-{batch}").exists() or taken(faults / f"die-{batch}"):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if taken(faults / f"stop-{batch}"):
            os.kill(os.getppid(), signal.SIGSTOP)
        if (faults / f"hang-{batch}").exists():
            time.sleep(60)
        time.sleep(float(os.environ.get("ROW_S", "0.002")))
        time_ms = 1.0 + zlib.crc32(f"{task.provider} {row} {task.problem}".encode()) % 1000
        time_ms *= 1.2 if unlike == job.ordinal else 1.0
        outcomes.append(Outcome(row, "ok", time_ms, 0.0, 3))
    return outcomes


def measure_unlike(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Measure; GPU 2 is a fifth slower than the others."""
    return measure(job, report, unlike=2)


def measure_on_one(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Measure; GPU 0 fails whatever it is given."""
    if job.ordinal == 0:
        raise RuntimeError("an illegal memory access was encountered")
    time.sleep(0.5)  # so that there is work left when GPU 0 is given up
    return measure(job, report)


def taken(path: Path) -> bool:
    """Whether there is a file of that name, which is then removed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
