"""What the worker processes run: compilations, and measurements on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from confpred.cuda.compiler import compile_kernel
from confpred.errors import CompileError
from confpred.families.candidate import PYTORCH
from confpred.families.registry import all_families, operation_of
from confpred.measure.kernels import measure
from confpred.measure.outcome import Outcome
from confpred.problem.operation import KernelSpec
from confpred.sampler.tasks import PYTORCH_ROW, Task

#: Import paths of the two job functions.
COMPILE = f"{__name__}:compile_job"
MEASURE = f"{__name__}:measure_job"

_NICE = 10


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel to be compiled for `arch` into the kernel cache."""

    kernel: KernelSpec
    arch: str


@dataclass(frozen=True, slots=True)
class Bench:
    """A task to be measured on CUDA device `ordinal`; `seed` orders its timed rounds."""

    task: Task
    ordinal: int
    seed: int


def compile_job(job: Compilation, report: Callable[[int], None]) -> str | None:
    """Compile one kernel; returns the compiler's log if it refuses, else None."""
    if os.getpriority(os.PRIO_PROCESS, 0) < _NICE:  # a GPU worker that waits leaves its GPU idle
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        compile_kernel(job.kernel, job.arch)
    except CompileError as error:
        return str(error)
    return None


def measure_job(job: Bench, report: Callable[[int], None]) -> list[Outcome]:
    """Measure one task; reports each config just before its first launch."""
    task = job.task
    if task.family == PYTORCH:
        from confpred.measure.pytorch import measure_pytorch  # needs PyTorch, which may be absent

        report(PYTORCH_ROW)
        operation = operation_of(task.problem)
        return [measure_pytorch(operation, task.problem, ordinal=job.ordinal, seed=job.seed)]
    family = all_families()[task.family]
    return measure(
        task.problem, family, task.rows, ordinal=job.ordinal, seed=job.seed, report=report
    )
