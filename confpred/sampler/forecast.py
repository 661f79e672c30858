"""What a run would measure, and what it needs beforehand: no GPU is touched here.

GPU time is scarce, and compiling takes more of it than measuring. So the kernels of a plan can be
compiled elsewhere, into the same cache (`confpred.cuda.cache`), by an NVRTC of the same version as
on the machine with the GPU, and travel as one archive.
"""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from confpred.cuda.cache import sealed
from confpred.cuda.compiler import cache_entry, compiled_before
from confpred.cuda.compiling import compile_all
from confpred.errors import CompileError
from confpred.families.candidate import PYTORCH
from confpred.files import write_whole
from confpred.problem.operation import KernelSpec
from confpred.sampler.tasks import Task

#: Rows a second of one GPU whose kernels are compiled, where all legal configs of a problem are
#: measured together (``benchmarks/results/*/sampling_rate.json``: 277 on an H100, 307 on an H200).
ROWS_PER_S = 290.0
#: Seconds of PyTorch's own operator on a problem, in one mode of cuDNN.
PYTORCH_S = 0.1
#: Seconds of one core for a kernel: 0.5 to 1.7, by the family.
COMPILE_S = 1.0
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is planned.

    Attributes:
        problems: that have something left to measure.
        rows: planned, by provider.
        kernels: distinct ones that the rows need.
        compiled: those of them that lie in the cache.
    """

    problems: int
    rows: Mapping[str, int]
    kernels: int
    compiled: int

    @property
    def measuring_s(self) -> float:
        """Seconds of one GPU, with every kernel compiled; the start of the processes apart."""
        theirs = self.rows.get(PYTORCH, 0)
        return (sum(self.rows.values()) - theirs) / ROWS_PER_S + theirs * PYTORCH_S

    @property
    def compiling_s(self) -> float:
        """Seconds of one core for the kernels that are missing."""
        return (self.kernels - self.compiled) * COMPILE_S


def kernels_of(tasks: Sequence[Task]) -> list[KernelSpec]:
    """The distinct kernels of `tasks`, in the order in which they are needed."""
    return list(
        dict.fromkeys(kernel for task in tasks for step in task.kernels() for kernel in step)
    )


def forecast(tasks: Sequence[Task], kernels: Sequence[KernelSpec], arch: str) -> Forecast:
    """What `tasks`, which need `kernels`, come to.

    Raises:
        MissingExtra: the compiler is not installed, whose version the cache tells apart.
    """
    rows: Counter[str] = Counter()
    for task in tasks:
        rows[task.provider] += len(task.config_ids)
    compiled = sum(compiled_before(kernel, arch) is not None for kernel in kernels)
    return Forecast(len({task.problem for task in tasks}), rows, len(kernels), compiled)


def compile_into_cache(
    kernels: Sequence[KernelSpec],
    arch: str,
    *,
    threads: int | None = None,
    show: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Compile those of `kernels` that the cache lacks; what is compiled stays if this is stopped.

    Args:
        kernels: what a plan needs (`kernels_of`).
        arch: such as ``sm_90a``.
        threads: at a time; by default as many as there are processors.
        show: called now and then with how many are done.

    Returns:
        Why NVRTC refused a kernel, for each that it refused.

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
    """Write the cached ones of `kernels` as a tar file compressed by xz, to be unpacked in the
    folder of another machine's cache; returns how many they are.

    Raises:
        StorageError: the file system refused the write.
        MissingExtra: the compiler is not installed.
    """
    packed = 0

    def write(file: BinaryIO) -> None:
        nonlocal packed
        with tarfile.open(fileobj=file, mode="w:xz", preset=9) as tar:
            # Kernels of one source lie together, as they compress best beside their like.
            for kernel in sorted(kernels, key=lambda k: (k.file, k.entry, str(k.defines))):
                found = compiled_before(kernel, arch)
                if found is None:
                    continue
                content = sealed(found.cubin)
                member = tarfile.TarInfo(cache_entry(kernel, arch))
                member.size, member.mode = len(content), 0o600
                tar.addfile(member, io.BytesIO(content))
                packed += 1

    write_whole(path, write, replace=replace)
    return packed
