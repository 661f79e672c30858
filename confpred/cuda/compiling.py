"""Many kernels at once: NVRTC runs outside Python's lock, so threads compile in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import Compiled, compile_kernel
from confpred.problem.operation import KernelSpec


def compile_all(
    specs: Iterable[KernelSpec],
    arch: str,
    kernel_cache: KernelCache | None = None,
    *,
    threads: int | None = None,
) -> dict[KernelSpec, Compiled]:
    """`compile_kernel` for each of `specs`, in as many threads as this process has processors, or
    in `threads`; each kernel once, however often it is given.

    Raises:
        CompileError: NVRTC refused one of them; raised when the others are done, and in the cache.
        MissingExtra: the compiler is not installed.
    """
    wanted = list(dict.fromkeys(specs))
    if not wanted:
        return {}
    workers = min(len(wanted), threads or _processors())
    with ThreadPoolExecutor(workers, "confpred-compile") as pool:
        futures = [pool.submit(compile_kernel, spec, arch, kernel_cache) for spec in wanted]
    return {spec: future.result() for spec, future in zip(wanted, futures, strict=True)}


def _processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
