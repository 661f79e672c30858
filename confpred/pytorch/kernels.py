"""The kernels of this process: compiled once, in threads, and loaded once on each device."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from confpred.cuda import driver
from confpred.cuda.compiler import Compiled, compile_kernel
from confpred.cuda.launch import NoContext
from confpred.problem.operation import KernelSpec

_compiling: dict[tuple[KernelSpec, str], Future[Compiled]] = {}
_loaded: dict[tuple[KernelSpec, int, int], Any] = {}
#: The handle of the current stream of a CUDA device, without the object that PyTorch makes of it.
#: A PyTorch without CUDA lacks the function, and never calls it here.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)


def _new_threads() -> ThreadPoolExecutor:
    """Return threads that compile; each starts when it is first needed."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "confpred-compiler")


_threads = _new_threads()


def submit(spec: KernelSpec, arch: str) -> Future[Compiled]:
    """Return `spec` compiled for `arch`, now or soon; nothing is compiled twice."""
    key = (spec, arch)
    if key not in _compiling:
        _compiling[key] = _threads.submit(compile_kernel, spec, arch)
    return _compiling[key]


def loaded(spec: KernelSpec, smem_bytes: int, ordinal: int) -> Any:
    """Return `spec` in the context of CUDA device `ordinal`, compiled now if need be, also while a
    CUDA graph is captured; all launches of a kernel share it.

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


def in_context(ordinal: int, launch: Callable[[], Any]) -> None:
    """Call `launch`, again where this thread had not used CUDA device `ordinal` yet, as the one of
    a backward pass."""
    try:
        launch()
    except NoContext:
        driver.make_current(ordinal)
        launch()


def _reset_after_fork() -> None:
    """A child process has neither the threads nor the context of its parent."""
    global _threads
    _compiling.clear()
    _loaded.clear()
    _threads = _new_threads()


os.register_at_fork(after_in_child=_reset_after_fork)
