"""The job of a made-up GPU for the Triton kernel of ``made_up_kernel``: its times are true ones,
``$SLOWER`` times as long."""

from __future__ import annotations

import os
from collections.abc import Callable

from made_up_kernel import true_ms

from confpred.measure.timing import Outcome
from confpred.sampler.jobs import MeasureJob

MEASURE = f"{__name__}:measure"


def measure(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    ms = float(os.environ.get("SLOWER", "1")) * true_ms(job.task.problem)
    return [Outcome(row, "ok", float(ms[row]), 1e-4, 5) for row in job.task.config_ids]
