"""Jobs of tuning in which one candidate, the config ``$FAULTY``, is planted to fail on the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from confpred.families.protocol import PYTORCH
from confpred.measure.timing import Outcome
from confpred.pytorch.run import tuning
from confpred.sampler.jobs import MeasureJob

JOB = f"{__name__}:job"


def job(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    faulty, fault = int(os.environ["FAULTY"]), os.environ["FAULT"]
    if job.task.provider != PYTORCH and faulty in job.task.config_ids:
        report(faulty)
        if fault == "hang":
            torch.cuda._sleep(1 << 44)
            torch.cuda.synchronize()
        if fault == "fault":
            beyond = torch.tensor([1 << 30], device="cuda")
            torch.zeros(4, device="cuda")[beyond].sum().item()  # an assertion on the device
        if fault == "wrong":
            _let_be_wrong(faulty)
    return tuning.compared_job(job, report)


def _let_be_wrong(faulty: int) -> None:
    load = tuning.load

    def loaded(assignment: Any, ordinal: int) -> Any:
        ready = load(assignment, ordinal)
        if assignment.candidate.config_id == faulty:
            run = ready.run
            ready = _Ready(assignment, lambda *given: [1.1 * t for t in run(*given)])
        return ready

    tuning.load = loaded


class _Ready:
    def __init__(self, assignment: Any, run: Any) -> None:
        self.assignment, self.run = assignment, run
