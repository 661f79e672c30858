"""Launches that lack only the addresses of their operands."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from confpred.errors import LaunchError
from confpred.problem.operation import Launch

if TYPE_CHECKING:
    from cuda.core import Kernel


class _Config(ctypes.Structure):
    """``CUlaunchConfig`` (CUDA driver API)."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class NoContext(LaunchError):
    """The thread has no current CUDA context, as a thread that has not used the GPU yet."""


@cache
def _launch_kernel() -> Any:
    """The driver's ``cuLaunchKernelEx``.

    It is called through `ctypes` with arguments that are laid out beforehand: `cuda.bindings` would
    convert eleven arguments and make an object of the result at every launch.
    """
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function


class BoundLaunch:
    """Kernels with their grids and scalars; only the addresses of the operands are missing.

    `enqueue` is the hot path of the library. All steps point into one array of addresses.

    Args:
        kernels: one for each step of `launch`.
        launch: the steps.
        names: the operands' names, in the order in which `enqueue` is given their addresses.
    """

    __slots__ = (
        "_addresses",
        "_calls",
        "_configs",
        "_kept",
        "_launch",
        "_lock",
        "_pack",
        "_stream",
    )

    def __init__(self, kernels: Sequence[Kernel], launch: Launch, names: Sequence[str]) -> None:
        self._launch = _launch_kernel()
        self._addresses = ctypes.create_string_buffer(8 * (len(names) + 1))  # the last stays null
        self._pack = struct.Struct(f"{len(names)}Q").pack_into
        place = {name: index for index, name in enumerate(names)}
        self._configs: list[_Config] = []
        self._calls: list[tuple[Any, ...]] = []
        self._kept: list[Any] = []
        self._stream = 0  # the one that the configs name
        for kernel, step in zip(kernels, launch.steps, strict=True):
            scalars = (ctypes.c_int32 * len(step.scalars))(*step.scalars.values())
            slots = [place.get(name, len(names)) for name in step.operands]
            starts = [ctypes.addressof(self._addresses) + 8 * slot for slot in slots]
            starts += [ctypes.addressof(scalars) + 4 * i for i in range(len(scalars))]
            arguments = (ctypes.c_void_p * len(starts))(*starts)
            config = _Config(
                (ctypes.c_uint * 3)(*step.grid), (ctypes.c_uint * 3)(*step.block), step.smem_bytes
            )
            # The driver takes a library's kernel in place of a function (CUDA driver API,
            # "CUkernel").
            function = ctypes.c_void_p(int(kernel.handle))
            self._configs.append(config)
            self._calls.append((ctypes.byref(config), function, arguments, None))
            self._kept.append((scalars, kernel))
        self._lock = threading.Lock()  # the one array of addresses may have many callers

    def enqueue(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch all steps on the CUDA stream of handle `stream` with the device address of each
        operand, 0 for an absent one. The current context must be the kernels'.

        Raises:
            NoContext: this thread has no current context.
            LaunchError: the driver refused.
        """
        with self._lock:
            self._pack(self._addresses, 0, *addresses)
            if stream != self._stream:
                for config in self._configs:
                    config.stream = stream
                self._stream = stream
            for call in self._calls:
                code = self._launch(*call)
                if code:
                    _refuse(code)


def _refuse(code: int) -> None:
    from cuda.bindings import driver

    kind = NoContext if code == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT else LaunchError
    raise kind(f"launch failed: {driver.CUresult(code).name}")
