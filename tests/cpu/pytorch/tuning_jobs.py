"""Jobs of a GPU that is not there: times are made up, and configs fail as kernels do.

``$FAULT`` names what the config ``$FAULTY`` does, or every one: ``crash``, ``hang``, ``fault`` or
``wrong``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from confpred.families.protocol import PYTORCH
from confpred.measure.timing import Outcome
from confpred.sampler.jobs import MeasureJob

JOB = f"{__name__}:job"
PYTORCH_MS, FIRST_MS, NEXT_MS = 1.0, 0.5, 0.1


def job(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    fault, faulty, outcomes = os.environ.get("FAULT", ""), os.environ.get("FAULTY"), []
    with Path(os.environ["MEASURED"]).open("a") as record:
        record.write(f"{job.task.provider} {job.task.config_ids}\n")
    for place, row in enumerate(job.task.config_ids):
        report(row)
        ours = Outcome(row, "ok", FIRST_MS + NEXT_MS * place, 0.0, 3, error=0.0)
        if job.task.provider == PYTORCH:
            ours = replace(ours, time_ms=PYTORCH_MS)
        elif fault and faulty in (None, str(row)):
            ours = replace(ours, status=_misbehave(fault))
        outcomes.append(ours)
    return outcomes


def _misbehave(fault: str) -> str:
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(3600)
    if fault == "fault":
        raise RuntimeError("an illegal memory access was encountered")
    return "wrong_result"
