"""Kernels, compiled in threads, loaded once for all launches, and bound to operands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from confpred.concurrency import submit
from confpred.cuda import driver
from confpred.cuda.compiler import CompiledKernel, compile_kernel
from confpred.problem.operation import KernelSpec, Launch

#: Enqueues a launch, given the handle of a CUDA stream and the addresses of the operands.
Enqueue = Callable[[int, Sequence[int]], None]


@cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that compile; each starts when it is first needed."""
    return ThreadPoolExecutor(min(32, os.cpu_count() or 1), "confpred-compiler")


@cache
def _submitted(spec: KernelSpec, arch: str) -> Future[CompiledKernel]:
    """Return `spec` compiled for `arch`, now or soon; nothing is compiled twice."""
    return submit(_threads(), compile_kernel, spec, arch)


def compile_soon(launch: Launch, ordinal: int) -> None:
    """Compile the kernels of `launch` for CUDA device `ordinal`, side by side."""
    for kernel in launch.kernels:
        _submitted(kernel, driver.device_of(ordinal).arch)


@cache
def loaded(spec: KernelSpec, ordinal: int) -> driver.LoadedKernel:
    """Return `spec` in the context of CUDA device `ordinal`, which becomes this thread's: compiled
    now if need be, also while a CUDA graph is captured. It may use all the shared memory of a
    block.

    Raises:
        CompileError, LaunchError, MissingExtra: it cannot be compiled or loaded.
        UnknownDevice: the device has no description.
    """
    device = driver.device_of(ordinal)
    compiled = _submitted(spec, device.arch).result()
    driver.make_current(ordinal)
    with driver.outside_capture():
        return driver.load(compiled, device.smem_per_block)


def bound(launch: Launch, names: Sequence[str], ordinal: int) -> Enqueue:
    """Return a function that enqueues the kernels of `launch` on CUDA device `ordinal`, given the
    addresses of the operands in the order of `names`, 0 for an absent one; see `driver.bind`.
    Raises what `loaded` does."""
    compile_soon(launch, ordinal)
    kernels = [loaded(step.kernel, ordinal) for step in launch.steps]
    return driver.bind(kernels, launch, names)


def _reset_after_fork() -> None:
    """Forget threads and kernels, which a child process does not have."""
    for cached in (_threads, _submitted, loaded):
        cached.cache_clear()


os.register_at_fork(after_in_child=_reset_after_fork)
