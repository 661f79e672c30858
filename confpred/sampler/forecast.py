"""Forecast of a run: its tasks, and the kernels that it needs; no GPU is touched here.

Compiling takes longer than measuring. So the kernels of a plan can be compiled on another machine,
by an NVRTC of the same version as on the machine with the GPU, and be copied as one archive of the
cache.
"""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from confpred.cuda.cache import sealed
from confpred.cuda.compiler import cache_entry, compile_all, compiled_before
from confpred.errors import CompileError
from confpred.families.protocol import PYTORCH
from confpred.families.registry import all_families
from confpred.files import write_whole
from confpred.measure.timing import MAX_LAUNCHES, REPLAY_SECONDS, REPLAYS
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec
from confpred.sampler.tasks import BENCHMARK, HEURISTICS, Task, Unit

#: Seconds a row beside its replays, for loading, checking and building graphs: from the rates in
#: ``benchmarks/results/*/sampling_rate.json`` (277 rows a second on an H100, 307 on an H200),
#: without the replays and the start of the processes.
ROW_S = 1.4e-3
#: Seconds of PyTorch's operator on a problem by the mode of cuDNN, mostly to choose an algorithm:
#: means of 843 problems on an H200 (``datasets/README.md``).
PYTORCH_S = {BENCHMARK: 0.35, HEURISTICS: 0.11}
#: Seconds of one core for a kernel: 0.5 to 1.7, by the family.
COMPILE_S = 1.0
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Forecast:
    """Rows, kernels and seconds of a plan.

    Attributes:
        problems: problems with configs to measure.
        rows: planned rows, by provider.
        kernels: distinct kernels of the rows.
        compiled: those of them that are in the cache.
        measuring_s: seconds of one GPU, with every kernel compiled; the start of the processes
            apart.
    """

    problems: int
    rows: Mapping[str, int]
    kernels: int
    compiled: int
    measuring_s: float

    @property
    def compiling_s(self) -> float:
        """Return the seconds of one core for the missing kernels."""
        return (self.kernels - self.compiled) * COMPILE_S


def kernels_of(tasks: Sequence[Task]) -> list[KernelSpec]:
    """Return the distinct kernels of `tasks`, in the order in which they are needed."""
    return Unit(tuple(tasks)).kernels()


def measuring_s(task: Task, device: Device) -> float:
    """Return the seconds of one GPU for `task`: its replays, by the family's own estimate of each
    config, and ``ROW_S`` a config. The sum over the committed measurements is within 7 %."""
    if task.provider == PYTORCH:
        return PYTORCH_S[task.cudnn_mode]
    family = all_families()[task.provider]
    launch_s = family.estimate_s(task.problem, device, np.array(task.config_ids, np.intp))
    launches = np.ceil(REPLAY_SECONDS / launch_s).clip(2, MAX_LAUNCHES)
    replays = REPLAYS + 1  # one is not timed; the last ones are of few configs
    return float((launch_s * (1 + replays * launches) + ROW_S).sum())


def forecast(tasks: Sequence[Task], kernels: Sequence[KernelSpec], device: Device) -> Forecast:
    """Return the rows and seconds of `tasks`, which need `kernels`, on `device`.

    Raises:
        MissingExtra: the compiler, whose version is part of the cache's keys, is not installed.
    """
    rows: Counter[str] = Counter()
    for task in tasks:
        rows[task.provider] += len(task.config_ids)
    compiled = sum(compiled_before(kernel, device.arch) is not None for kernel in kernels)
    seconds = sum(measuring_s(task, device) for task in tasks)
    return Forecast(len({t.problem for t in tasks}), rows, len(kernels), compiled, seconds)


def compile_into_cache(
    kernels: Sequence[KernelSpec],
    arch: str,
    *,
    threads: int | None = None,
    show: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Compile those of `kernels` that the cache lacks, by `threads` threads (default: one a
    processor); `show` is called now and then with how many are done.

    Returns:
        NVRTC's reason for each kernel that it refused.

    Raises:
        MissingExtra: the compiler is not installed.
    """
    refused = []
    for start in range(0, len(kernels), _CHUNK):
        chunk = kernels[start : start + _CHUNK]
        try:
            compile_all(chunk, arch, threads=threads)
        except CompileError as error:
            refused.append(str(error))
        show(min(start + _CHUNK, len(kernels)))
    return refused


def write_archive(kernels: Sequence[KernelSpec], arch: str, path: Path, *, replace: bool) -> int:
    """Write the cached ones of `kernels` as a tar file compressed by xz, to be unpacked in another
    machine's cache; return how many there are.

    Raises:
        StorageError: the file system refused the write.
        MissingExtra: the compiler is not installed.
    """
    # Kernels of one source lie together, because similar files compress best.
    listed = sorted(kernels, key=lambda k: (k.file, k.entry, str(k.defines)))
    packed: list[KernelSpec] = []

    def write(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w:xz", preset=9) as tar:
            for kernel in listed:
                if (compiled := compiled_before(kernel, arch)) is not None:
                    content = sealed(compiled.cubin)
                    member = tarfile.TarInfo(cache_entry(kernel, arch))
                    member.size, member.mode = len(content), 0o600
                    tar.addfile(member, io.BytesIO(content))
                    packed.append(kernel)

    write_whole(path, write, replace=replace)
    return len(packed)
