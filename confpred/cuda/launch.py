"""Launches that lack only the addresses of their operands."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from confpred.errors import LaunchError
from confpred.problem.operation import Launch

if TYPE_CHECKING:
    from cuda.core import Kernel


class BoundLaunch:
    """Kernels with their grids and scalars; only the addresses of the operands are missing.

    `enqueue` is the hot path of the library. It hands the driver arrays of arguments that were laid
    out beforehand; `cuda.core.launch` would work out the type of each of twenty arguments at each
    launch. All steps point into one array of addresses.

    Args:
        kernels: one for each step of `launch`.
        launch: the steps.
        names: the operands' names, in the order in which `enqueue` is given their addresses.
    """

    __slots__ = ("_addresses", "_kept", "_launch", "_lock", "_steps")

    def __init__(self, kernels: Sequence[Kernel], launch: Launch, names: Sequence[str]) -> None:
        from cuda.bindings import driver

        self._launch = driver.cuLaunchKernel
        self._addresses = (ctypes.c_uint64 * (len(names) + 1))()  # the last one is always null
        place = {name: index for index, name in enumerate(names)}
        self._steps: list[tuple[Any, ...]] = []
        self._kept = []
        for kernel, step in zip(kernels, launch.steps, strict=True):
            scalars = (ctypes.c_int32 * len(step.scalars))(*step.scalars.values())
            slots = [place.get(name, len(names)) for name in step.operands]
            starts = [ctypes.addressof(self._addresses) + 8 * slot for slot in slots]
            starts += [ctypes.addressof(scalars) + 4 * i for i in range(len(scalars))]
            arguments = (ctypes.c_void_p * len(starts))(*starts)
            self._kept.append((scalars, arguments))
            # The driver takes a library's kernel in place of a function (CUDA driver API,
            # "CUkernel").
            function = driver.CUfunction(int(kernel.handle))
            dimensions = (*step.grid, *step.block, step.smem_bytes)
            self._steps.append((function, dimensions, ctypes.addressof(arguments)))
        self._lock = threading.Lock()  # the one array of addresses may have many callers

    def enqueue(self, stream: int, addresses: list[Any]) -> None:
        """Launch all steps on the CUDA stream of handle `stream` with the operands' device
        addresses, 0 for an absent one. The current context must be the kernels'.

        Raises:
            LaunchError: the driver refused.
        """
        with self._lock:
            self._addresses[: len(addresses)] = addresses
            for function, dimensions, arguments in self._steps:
                (code,) = self._launch(function, *dimensions, stream, arguments, 0)
                if code:
                    raise LaunchError(f"launch failed: {code.name}")
