"""Launches that lack only the addresses of their operands."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
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

    All steps point into one array of addresses.

    Args:
        kernels: one for each step of `launch`.
        launch: the steps.
        names: the operands' names, in the order in which `enqueue` is given their addresses.

    Attributes:
        enqueue: called with the handle of a CUDA stream and the device address of each operand, 0
            for an absent one; launches all steps there. The current context must be the kernels'.
            It raises `NoContext` where this thread has none, and `LaunchError` where the driver
            refuses. It is the hot path of the library: one function that holds what it needs.
    """

    __slots__ = ("enqueue",)

    def __init__(self, kernels: Sequence[Kernel], launch: Launch, names: Sequence[str]) -> None:
        addresses = ctypes.create_string_buffer(8 * (len(names) + 1))  # the last one stays null
        place = {name: index for index, name in enumerate(names)}
        configs: list[_Config] = []
        calls: list[tuple[Any, ...]] = []
        kept: list[Any] = [kernels]
        for kernel, step in zip(kernels, launch.steps, strict=True):
            scalars = (ctypes.c_int32 * len(step.scalars))(*step.scalars.values())
            slots = [place.get(name, len(names)) for name in step.operands]
            starts = [ctypes.addressof(addresses) + 8 * slot for slot in slots]
            starts += [ctypes.addressof(scalars) + 4 * i for i in range(len(scalars))]
            arguments = (ctypes.c_void_p * len(starts))(*starts)
            config = _Config(
                (ctypes.c_uint * 3)(*step.grid), (ctypes.c_uint * 3)(*step.block), step.smem_bytes
            )
            # The driver takes a library's kernel in place of a function (CUDA driver API,
            # "CUkernel").
            function = ctypes.c_void_p(int(kernel.handle))
            configs.append(config)
            calls.append((ctypes.byref(config), function, arguments, None))
            kept.append(scalars)
        self.enqueue = _enqueue_of(addresses, len(names), configs, calls, kept)


def _enqueue_of(
    buffer: Any, count: int, configs: list[_Config], calls: list[tuple[Any, ...]], kept: list[Any]
) -> Callable[[int, Sequence[int]], None]:
    """`BoundLaunch.enqueue`; `kept` lives as long as it does."""
    pack, launch = struct.Struct(f"{count}Q").pack_into, _launch_kernel()
    lock = threading.Lock()  # the one array of addresses may have many callers
    current = 0  # the stream that the configs name

    def enqueue(stream: int, addresses: Sequence[int], _kept: list[Any] = kept) -> None:
        nonlocal current
        with lock:
            pack(buffer, 0, *addresses)
            if stream != current:
                for config in configs:
                    config.stream = stream
                current = stream
            for call in calls:
                code = launch(*call)
                if code:
                    _refuse(code)

    return enqueue


def _refuse(code: int) -> None:
    from cuda.bindings import driver

    kind = NoContext if code == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT else LaunchError
    raise kind(f"launch failed: {driver.CUresult(code).name}")


def launch_with(
    kernel: Kernel,
    grid: tuple[int, int, int],
    threads: int,
    stream: int,
    argument: ctypes.Structure,
) -> None:
    """Launch `kernel`, whose one parameter is `argument`, passed by value, on a CUDA stream.

    Raises:
        NoContext: this thread has no current CUDA context.
        LaunchError: the driver refused.
    """
    config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), 0, stream)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    code = _launch_kernel()(
        ctypes.byref(config), ctypes.c_void_p(int(kernel.handle)), arguments, None
    )
    if code:
        _refuse(code)
