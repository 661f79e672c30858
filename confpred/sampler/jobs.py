"""What the worker processes run: compilations, and measurements on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from confpred.cuda.compiler import compile_kernel
from confpred.errors import CompileError
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import all_families, operation_of
from confpred.measure.kernels import measure
from confpred.measure.outcome import Outcome
from confpred.problem.operation import KernelSpec
from confpred.sampler.tasks import Task

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
    """Compile one kernel; returns the compiler's log if it refuses, else None."""
    if os.getpriority(os.PRIO_PROCESS, 0) < _NICE:  # a GPU worker that waits leaves its GPU idle
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        compile_kernel(job.kernel, job.arch)
    except CompileError as error:
        return str(error)
    return None


def measure_job(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Measure one task; reports the number of each config just before its first launch."""
    task = job.task
    where = {"ordinal": job.ordinal, "seed": job.seed}
    if task.provider == PYTORCH_OPERATOR.provider:
        from confpred.measure.pytorch import measure_pytorch  # needs PyTorch, which may be absent

        report(PYTORCH_OPERATOR.config_id)
        operation = operation_of(task.problem)
        return [measure_pytorch(operation, task.problem, mode=task.cudnn_mode, **where)]
    family = all_families()[task.provider]
    return measure(task.problem, family, task.config_ids, report=report, **where)
