"""The kernels of this process: compiled once, in threads, and loaded once on each device."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from confpred.cuda import driver
from confpred.cuda.compiler import Compiled, compile_kernel, compiled_before
from confpred.problem.operation import KernelSpec

_THREADS = 8
_compiling: dict[tuple[KernelSpec, str], Future[Compiled]] = {}
_loaded: dict[tuple[KernelSpec, int, int], Any] = {}


def submit(spec: KernelSpec, arch: str) -> Future[Compiled]:
    """`spec` compiled for `arch`, now or soon; nothing is compiled twice."""
    key = (spec, arch)
    if key not in _compiling:
        known = compiled_before(spec, arch)
        if known is None:
            _compiling[key] = _compilers().submit(compile_kernel, spec, arch)
        else:
            future: Future[Compiled] = Future()
            future.set_result(known)
            _compiling[key] = future
    return _compiling[key]


def loaded(spec: KernelSpec, smem_bytes: int, ordinal: int) -> Any:
    """`spec` in the context of CUDA device `ordinal`, compiled now if need be, also while a CUDA
    graph is captured; all launches of a kernel share it.

    Raises:
        UnknownDevice: confpred has no description of the device.
        CompileError, LaunchError, MissingExtra: it cannot be compiled or loaded.
    """
    key = (spec, smem_bytes, ordinal)
    if key not in _loaded:
        compiled = submit(spec, driver.device_of(ordinal).arch).result()
        with torch.cuda.device(ordinal):
            driver.make_current(ordinal)
            with driver.outside_capture():
                _loaded[key] = driver.load(compiled, smem_bytes).kernel
    return _loaded[key]


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "confpred-compiler")


def _reset_after_fork() -> None:
    """A child process has neither the threads nor the context of its parent."""
    _compiling.clear()
    _loaded.clear()
    _compilers.cache_clear()


os.register_at_fork(after_in_child=_reset_after_fork)
