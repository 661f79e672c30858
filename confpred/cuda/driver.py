"""Loading and launching compiled kernels on one GPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from confpred.cuda import discovery
from confpred.cuda.compiler import CompiledKernel
from confpred.cuda.discovery import Facts, Rates, device_with, measure_rates, part_of
from confpred.errors import LaunchError, MissingExtra, UnknownDevice
from confpred.problem.device import Device
from confpred.problem.operation import Launch, Step

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
    """Return how many CUDA devices this process can see; 0 without a driver or `cuda-core`."""
    try:
        from cuda.core import Device as CudaDevice

        return len(CudaDevice.get_all_devices())
    except Exception:  # no cuda-core, no driver, or a driver that refuses
        return 0


def is_exclusive(ordinal: int) -> bool:
    """Return whether no second process can use CUDA device `ordinal`, by its compute mode."""
    prohibited, exclusive_process = 2, 3  # CUcomputemode
    return int(_cuda_device(ordinal).properties.compute_mode) in (prohibited, exclusive_process)


def make_current(ordinal: int) -> Any:
    """Return the `cuda.core` device `ordinal`, its primary context current in this thread.

    Raises:
        MissingExtra: `cuda-core` is not installed.
        LaunchError: there is no such device.
    """
    device = _cuda_device(ordinal)
    device.set_current()
    return device


def device_of(ordinal: int) -> Device:
    """Return the description of CUDA device `ordinal`, or of the part that this thread's context
    has of it.

    A GPU that is in no table is measured, once a user and driver (`confpred.cuda.discovery`).

    Raises:
        UnknownDevice: the GPU cannot be described.
    """
    description = _describe_device(ordinal)
    if isinstance(description, UnknownDevice):
        raise description
    count = _context_sm_count(ordinal)
    return part_of(description, count) if 0 < count < description.sm_count else description


def is_part(ordinal: int) -> bool:
    """Return whether this thread's context has a part of the multiprocessors of a CUDA device."""
    count = int(_cuda_device(ordinal).properties.multiprocessor_count)
    return 0 < _context_sm_count(ordinal) < count


def _context_sm_count(ordinal: int) -> int:
    """Return the multiprocessors of this thread's context, if it is of CUDA device `ordinal`; 0
    where there is none, or the driver does not say."""
    try:
        from cuda.bindings import driver

        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        _, context = driver.cuCtxGetCurrent()
        if not int(context):  # the next call would be an error
            return 0
        code, device = driver.cuCtxGetDevice()
        if code != driver.CUresult.CUDA_SUCCESS or int(device) != ordinal:
            return 0
        code, resource = driver.cuCtxGetDevResource(context, kind)
        return int(resource.sm.smCount) if code == driver.CUresult.CUDA_SUCCESS else 0
    except Exception:  # an older driver has no such parts
        return 0


@lru_cache
def _describe_device(ordinal: int) -> Device | UnknownDevice:
    """Return the description, or why there is none, so that nothing is measured twice."""
    cuda_device = _cuda_device(ordinal)
    facts = Facts.of(cuda_device, describe(ordinal)[1])

    def measured(arch: str) -> Rates:
        with _current(cuda_device), outside_capture():
            return measure_rates(cuda_device, facts)

    try:
        return device_with(facts, measured)
    except UnknownDevice as error:
        return error


def as_it_runs(ordinal: int) -> Device:
    """Return the description of CUDA device `ordinal` with the rates that it has now, see
    `confpred.cuda.discovery.as_it_runs`."""
    cuda_device, version = _cuda_device(ordinal), describe(ordinal)[1]
    facts = Facts.of(cuda_device, version)
    with _current(cuda_device), outside_capture():
        return discovery.as_it_runs(
            device_of(ordinal), cuda_device.uuid, version, lambda: measure_rates(cuda_device, facts)
        )


@contextmanager
def _current(cuda_device: Any) -> Iterator[None]:
    """Make `cuda_device` current in this thread within the block, and then the former one again."""
    from cuda.bindings import driver

    _, former = driver.cuCtxGetCurrent()
    try:
        cuda_device.set_current()
        yield
    finally:
        driver.cuCtxSetCurrent(former)


def describe(ordinal: int) -> tuple[str, str]:
    """Return the name of CUDA device `ordinal`, and the driver's version."""
    from cuda.core import system

    version = ".".join(map(str, system.get_kernel_mode_driver_version()))
    return str(_cuda_device(ordinal).name), version


def sm_clock_mhz(ordinal: int) -> int:
    """Return the current multiprocessor clock of CUDA device `ordinal`, 0 if it cannot be read."""
    from cuda.core import system

    try:
        clock = _cuda_device(ordinal).to_system_device().get_clock(system.typing.ClockType.SM)
        return int(clock.get_current_mhz())
    except Exception:  # NVML is optional: a clock that cannot be read is recorded as 0
        return 0


def load(compiled: CompiledKernel, smem_bytes: int) -> LoadedKernel:
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
    """Allow this thread what a stream capture forbids, such as loading a kernel. Only launches on
    the captured stream become part of the graph."""
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


# Launches that lack only the addresses of their operands.


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


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` (CUDA driver API), of an integer value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


def _attributes(step: Step) -> Any:
    """Return the launch attributes of `step`, an array that may be empty."""
    cooperative = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attributes = [_Attribute(cooperative, 0, (ctypes.c_int * 16)(1))] if step.cooperative else []
    return (_Attribute * len(attributes))(*attributes)


class NoContext(LaunchError):
    """The thread has no current CUDA context, as a thread that has not used the GPU yet."""


@cache
def _launch_kernel() -> Any:
    """Return the driver's ``cuLaunchKernelEx``.

    It is called through `ctypes` with arguments that are laid out beforehand: `cuda.bindings` would
    convert eleven arguments and make an object of the result at every launch.
    """
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function


def bind(
    kernels: Sequence[LoadedKernel], launch: Launch, names: Sequence[str]
) -> Callable[[int, Sequence[int]], None]:
    """Return a function that enqueues the steps of `launch` by `kernels`, one for each; their grids
    and scalars are laid out, and all steps point into one array of addresses.

    The function is called with the handle of a CUDA stream and the device address of each operand
    in the order of `names`, 0 for an absent one. The current context must be the kernels'. It
    raises `NoContext` where this thread has none, and `LaunchError` where the driver refuses. It is
    the hot path of the library, so one function holds all that a launch needs.
    """
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
        attributes = _attributes(step)
        config = _Config(
            (ctypes.c_uint * 3)(*step.grid),
            (ctypes.c_uint * 3)(*step.block),
            step.smem_bytes,
            None,
            ctypes.addressof(attributes) if len(attributes) else None,
            len(attributes),
        )
        # The driver takes a library's kernel in place of a function (CUDA driver API, "CUkernel").
        function = ctypes.c_void_p(int(kernel.kernel.handle))
        configs.append(config)
        calls.append((ctypes.byref(config), function, arguments, None))
        kept += [scalars, attributes]
    return _enqueue_of(addresses, len(names), configs, calls, kept)


def _enqueue_of(
    buffer: Any, count: int, configs: list[_Config], calls: list[tuple[Any, ...]], kept: list[Any]
) -> Callable[[int, Sequence[int]], None]:
    """Return the function that `bind` returns, which keeps `kept` alive."""
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
    kernel: LoadedKernel,
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
        ctypes.byref(config), ctypes.c_void_p(int(kernel.kernel.handle)), arguments, None
    )
    if code:
        _refuse(code)
