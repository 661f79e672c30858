"""Many kernels at once: NVRTC runs outside Python's lock, so threads compile in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from confpred.cuda.bundles import bundle_files
from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import Compiled, compile_kernel, nvrtc_version
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


def compiled_files(specs: Iterable[KernelSpec], arch: str) -> dict[str, str | bytes]:
    """Compile `specs` for `arch`, and return the files that let a start do without the compiler, by
    their names in a folder (`confpred.cuda.bundles`). Needs no GPU.

    Raises:
        CompileError, MissingExtra: see `compile_all`.
    """
    compiled = compile_all(specs, arch)
    cubins = {spec: kernel.cubin for spec, kernel in compiled.items()}
    return bundle_files(cubins, arch, nvrtc_version())


def _processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
