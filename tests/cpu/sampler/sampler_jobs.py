"""Jobs for the sampler's worker processes on a machine without a GPU.

Compilations are real. A measurement times a real convolution, in NumPy and on the CPU. Rows named
in ``$FAULTS`` (as ``{"12": "crash"}``) misbehave the way that kernels do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from confpred.measure.timing import Outcome, Status
from confpred.problem.device import get_device
from confpred.problem.operation import KernelSpec
from confpred.sampler.jobs import CompileJob, MeasureJob, compile_job

COMPILE = f"{__name__}:compile_job"
COMPILE_OR_REFUSE = f"{__name__}:compile_or_refuse"
MEASURE = f"{__name__}:measure"
SLOWLY = f"{__name__}:measure_slowly"
WHERE = f"{__name__}:measure_where"
ONCE_SENT = f"{__name__}:measure_once_sent"

__all__ = ["compile_job"]


def compile_or_refuse(job: CompileJob, report: Callable[[int], None]) -> str | None:
    """Compile, but give the compiler a name that it does not know for every second kernel."""
    kernel = job.kernel
    if refused(kernel):
        kernel = replace(kernel, defines=(*kernel.defines, ("threadIdx", "no_such_name")))
    return compile_job(replace(job, kernel=kernel), report)


def refused(kernel: KernelSpec) -> bool:
    """Whether `compile_or_refuse` breaks `kernel`."""
    return zlib.crc32(repr(kernel).encode()) % 2 == 1


def measure(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    faults = json.loads(os.environ.get("FAULTS", "{}"))
    if fault := faults.get("start"):
        _misbehave(fault)
    outcomes = []
    for row in job.task.config_ids:
        report(row)
        if fault := faults.get(str(row)):
            _misbehave(fault)
        times = [_time_convolution(row) for _ in range(3)]
        outcomes.append(Outcome(row, "ok", statistics.median(times), samples=3, error=0.0))
    return outcomes


def measure_slowly(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    time.sleep(0.5)
    return measure(job, report)


def _misbehave(fault: str) -> None:
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(3600)
    raise RuntimeError("an illegal memory access was encountered")


def _time_convolution(seed: int) -> float:
    """Milliseconds of a 3x3 convolution of 8 channels."""
    generator = np.random.default_rng(abs(seed))
    image, weight = generator.random((8, 16, 16)), generator.random((8, 8, 3, 3))
    start = time.perf_counter()
    windows = np.lib.stride_tricks.sliding_window_view(image, (3, 3), axis=(1, 2))
    np.einsum("cpqrs,kcrs->kpq", windows, weight)
    return (time.perf_counter() - start) * 1e3


def measure_where(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Name the process that measures, and the mode of cuDNN that it is asked for."""
    mode = job.task.cudnn_mode
    return [
        Outcome(row, "ok", 1.0, 0.0, 3, message=str(os.getpid()), cudnn_mode=mode)
        for row in job.task.config_ids
    ]


def measure_once_sent(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Make times up; all problems but the first wait until a shard was sent to the service, and
    fail without."""
    sent = Path(os.environ["SENT"])
    with contextlib.suppress(FileExistsError):
        sent.with_name("begun").touch(exist_ok=False)
        sent = sent.with_name("begun")
    deadline = time.monotonic() + 15
    while not sent.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    status: Status = "ok" if sent.exists() else "wrong_result"
    ms = 2e3 * get_device("h100").roofline_s(job.task.problem)
    return [Outcome(row, status, ms, 0.01 * ms, 3) for row in job.task.config_ids]
