"""Loading and launching compiled kernels on one GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from confpred.cuda.compiler import Compiled
from confpred.device import Device, get_device
from confpred.errors import LaunchError, MissingExtra
from confpred.operation import Launch

if TYPE_CHECKING:
    from cuda.core import Kernel

_SMEM_WITHOUT_OPT_IN = 48 * 1024


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel in one device's context.

    Attributes:
        registers, local_bytes: of one thread, as compiled.
    """

    kernel: Kernel
    registers: int
    local_bytes: int


class BoundLaunch:
    """Kernels with their grids and scalars; only the operands' addresses are missing.

    `enqueue` is the hot path of the library. It hands the driver arrays of arguments that were laid
    out beforehand, where `cuda.core.launch` would work out the type of each of twenty arguments at
    each launch. All steps point into one array of addresses.

    Args:
        kernels: one a step of `launch`.
        launch: the steps.
        names: of the operands, in the order in which `enqueue` is given their addresses.
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
            scalars = (ctypes.c_int32 * len(step.scalars))(*step.scalars)
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
        self._lock = threading.Lock()  # the array of addresses is one, the callers may be many

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


def _cuda_device(ordinal: int) -> Any:
    try:
        from cuda.core import Device as CudaDevice
    except ImportError as error:
        raise MissingExtra("cuda-core", "gpu") from error
    try:
        return CudaDevice(ordinal)
    except Exception as error:
        raise LaunchError(f"CUDA device {ordinal} cannot be used: {error}") from error


def device_count() -> int:
    """How many CUDA devices this process can see; 0 without a driver or without `cuda-core`."""
    try:
        from cuda.core import Device as CudaDevice

        return len(CudaDevice.get_all_devices())
    except Exception:  # no cuda-core, no driver, or a driver that refuses
        return 0


def make_current(ordinal: int) -> Any:
    """The `cuda.core` device `ordinal`, its primary context current in this thread.

    Raises:
        MissingExtra: `cuda-core` is not installed.
        LaunchError: there is no such device.
    """
    device = _cuda_device(ordinal)
    device.set_current()
    return device


@lru_cache
def device_of(ordinal: int) -> Device:
    """The description of CUDA device `ordinal`.

    Raises:
        UnknownDevice: it is a GPU that confpred has no description of.
    """
    return get_device(_cuda_device(ordinal).name)


def describe(ordinal: int) -> tuple[str, str]:
    """Name of CUDA device `ordinal`, and the driver's version."""
    from cuda.core import system

    version = ".".join(map(str, system.get_kernel_mode_driver_version()))
    return str(_cuda_device(ordinal).name), version


def sm_clock_mhz(ordinal: int) -> int:
    """Current multiprocessor clock of CUDA device `ordinal`, or 0 where it cannot be read."""
    from cuda.core import system

    try:
        clock = _cuda_device(ordinal).to_system_device().get_clock(system.typing.ClockType.SM)
        return int(clock.get_current_mhz())
    except Exception:  # NVML is optional: a clock that cannot be read is recorded as 0
        return 0


def load(compiled: Compiled, smem_bytes: int) -> LoadedKernel:
    """Load a cubin into the current context and allow it `smem_bytes` of dynamic shared memory, or
    what the arrays that it declares itself leave of a block's.

    Raises:
        LaunchError: the driver refused the cubin or the size.
    """
    from cuda.core import ObjectCode

    try:
        kernel = ObjectCode.from_cubin(compiled.cubin).get_kernel(compiled.entry)
        attributes = kernel.attributes
        if smem_bytes > _SMEM_WITHOUT_OPT_IN:
            _allow_smem(kernel, smem_bytes, attributes.shared_size_bytes)
        return LoadedKernel(kernel, attributes.num_regs, attributes.local_size_bytes)
    except Exception as error:
        raise LaunchError(f"kernel {compiled.entry} cannot be loaded: {error}") from error


def _allow_smem(kernel: Kernel, smem_bytes: int, declared_bytes: int) -> None:
    """Opt in to more dynamic shared memory than a kernel gets by default, on the current device."""
    from cuda.bindings import driver

    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _, device = driver.cuCtxGetDevice()
    _, most = driver.cuDeviceGetAttribute(limit, device)
    allowed = min(smem_bytes, most - declared_bytes)
    (code,) = driver.cuKernelSetAttribute(attribute, allowed, kernel.handle, device)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{allowed} bytes of shared memory are refused: {code.name}")
