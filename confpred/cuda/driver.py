"""Loading and launching compiled kernels on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from confpred.cuda.compiler import Compiled
from confpred.cuda.discovery import Facts, Rates, device_with, measure_rates
from confpred.errors import LaunchError, MissingExtra, UnknownDevice
from confpred.problem.device import Device

if TYPE_CHECKING:
    from cuda.core import Kernel

_SMEM_WITHOUT_OPT_IN = 48 * 1024


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel in one device's context.

    Attributes:
        registers, local_bytes: what one thread takes, as compiled.
    """

    kernel: Kernel
    registers: int
    local_bytes: int


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


def device_of(ordinal: int) -> Device:
    """The description of CUDA device `ordinal`; of a GPU that is in no table it is measured, the
    first time that this user meets one under a driver (`confpred.cuda.discovery`).

    Raises:
        UnknownDevice: there can be none.
    """
    found = _found(ordinal)
    if isinstance(found, UnknownDevice):
        raise found
    return found


@lru_cache
def _found(ordinal: int) -> Device | UnknownDevice:
    """The description, or why there is none, so that nothing is measured twice."""
    cuda_device = _cuda_device(ordinal)
    facts = Facts.of(cuda_device, describe(ordinal)[1])

    def measured(arch: str) -> Rates:
        with _current(cuda_device), outside_capture():
            return measure_rates(cuda_device, facts)

    try:
        return device_with(facts, measured)
    except UnknownDevice as error:
        return error


@contextmanager
def _current(cuda_device: Any) -> Iterator[None]:
    """Let `cuda_device` be this thread's within the block; PyTorch may count on another one."""
    from cuda.bindings import driver

    _, former = driver.cuCtxGetCurrent()
    try:
        cuda_device.set_current()
        yield
    finally:
        driver.cuCtxSetCurrent(former)


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
    as much as a block can have beside the arrays that the kernel declares itself.

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


@contextmanager
def outside_capture() -> Iterator[None]:
    """Let this thread do what a stream capture forbids, such as loading a kernel; of what is done
    so, only launches on the captured stream become part of the graph."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, former = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(former)


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
