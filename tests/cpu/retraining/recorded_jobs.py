"""Jobs for the sampler's worker processes that stand for a GPU: times come from a record.

The record is of a made-up GPU: a config takes its family's estimate for the device, bent by a
function of the config and the layer alone, so that there is something to learn; ``$RECORDED`` can
slow it down (``{"slow": 1.3}``) or let a provider fail (``{"fail": "pytorch"}``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable

import numpy as np

from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import all_families
from confpred.measure.timing import Outcome
from confpred.problem.device import get_device
from confpred.problem.record import Record
from confpred.sampler.jobs import CompileJob, MeasureJob

COMPILE = f"{__name__}:compile_nothing"
MEASURE = f"{__name__}:measure"
DEVICE = get_device("h100")


def compile_nothing(job: CompileJob, report: Callable[[int], None]) -> str | None:
    return None


def measure(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    told = json.loads(os.environ.get("RECORDED", "{}"))
    task = job.task
    if task.provider == told.get("fail"):
        return [Outcome(row, "launch_error", message="recorded") for row in task.config_ids]
    slow = told.get("slow", 1.0)
    cudnn = "9.19.0" if task.provider == PYTORCH_OPERATOR.provider else ""
    return [
        Outcome(row, "ok", slow * ms(task.problem, task.provider, row), 1e-4, 5, cudnn=cudnn)
        for row in task.config_ids
    ]


def ms(problem: Record, provider: str, row: int) -> float:
    """Recorded milliseconds."""
    if provider == PYTORCH_OPERATOR.provider:
        return 4e3 * DEVICE.roofline_s(problem) + 0.005
    family = all_families()[provider]
    estimate = float(family.estimate_s(problem, DEVICE, np.array([row], np.intp))[0])
    fields = [float(family.configs[name][row]) for name in family.configs.dtype.names or ()]
    bend = sum(math.sin(1.7 * i + value) for i, value in enumerate(fields)) / len(fields)
    return estimate * math.exp(0.8 * bend) * 1e3
