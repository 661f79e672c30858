"""The description of the GPU at hand: from the table of GPU models, else from its driver.

    name and multiprocessors are those of a GPU model in the table?  ->  that model
    it was measured before, with the same driver?                ->  the remembered description
    compute capability 8.0 or later                              ->  sizes from the driver; rates
                                                                     measured, and remembered

The rates are measured in a fraction of a second: a device copy, and the two kernels of
``kernels/rates.cu``. The driver reports clocks and widths, but not which share kernels reach, nor
the limits of a part of a GPU (MIG) or a virtual one.

The same benchmark finds a GPU that is slower than its description (`as_it_runs`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from confpred.cuda.compiler import compile_kernel
from confpred.errors import ConfpredError, DataError, LaunchError, StorageError, UnknownDevice
from confpred.files import cache_folder, read_json, write_json
from confpred.problem.device import (
    Device,
    device_from,
    has_measured_rates,
    introduce,
    key_of,
    listed,
    recall,
    remember,
)
from confpred.problem.operation import KernelSpec

log = logging.getLogger(__name__)
_OLDEST = (8, 0)  # the first with the asynchronous copies and the products that the kernels use
_ARCH_SPECIFIC = {"sm_90": "sm_90a"}  # the target that the measurements are of

#: Share of the tensor cores' rate that ``mma.sync`` reaches where the full rate needs other
#: instructions ("Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
#: Microbenchmarking", 2024: 62.9 % on average); elsewhere it reaches nearly all.
_MMA_SYNC_SHARE = {"sm_90a": 0.63}
_THREADS, _CHAINS, _STEPS, _WAVES = 256, 8, 4096, 4
_PRODUCT_FLOPS = 4096  # of one m16n8k16
_COPY_BYTES = 256 << 20  # at least; and a multiple of the cache
_L2_MULTIPLE = 4
_TURNS = 5

#: A rate is slow where the same work takes more than this many times as long as the description
#: says. GPUs of a kind differ by a few percent. The table's float32 rates are 90 % of the sheet's,
#: so that a lower clock is found a tenth later, and its factor is too low by as much.
SLOW = 1.15
CLOCK_FORMAT = "confpred-clock/1"
_ATTEMPTS = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Facts:
    """Description of a GPU by its driver: the GPU model's name, the driver's version, the compute
    capability, and the fields of the same names in `confpred.problem.device.Device`."""

    name: str
    driver: str
    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    smem_per_sm: int
    smem_per_block: int
    warps_per_sm: int
    blocks_per_sm: int
    regs_per_sm: int
    smem_reserved_per_block: int

    @classmethod
    def of(cls, cuda_device: Any, driver: str) -> Facts:
        """Return the facts of a `cuda.core` device."""
        properties = cuda_device.properties
        return cls(
            name=str(cuda_device.name),
            driver=driver,
            capability=(properties.compute_capability_major, properties.compute_capability_minor),
            sm_count=properties.multiprocessor_count,
            l2_bytes=properties.l2_cache_size,
            smem_per_sm=properties.max_shared_memory_per_multiprocessor,
            smem_per_block=properties.max_shared_memory_per_block_optin,
            warps_per_sm=properties.max_threads_per_multiprocessor // 32,
            blocks_per_sm=properties.max_blocks_per_multiprocessor,
            regs_per_sm=properties.max_registers_per_multiprocessor,
            smem_reserved_per_block=properties.reserved_shared_memory_per_block,
        )

    @property
    def arch(self) -> str:
        """NVRTC target."""
        plain = "sm_{}{}".format(*self.capability)
        return _ARCH_SPECIFIC.get(plain, plain)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of a GPU, as in `confpred.problem.device.Device`."""

    dram_bytes_per_s: float
    tensor_flops: float
    simt_flops: float


def device_with(facts: Facts, measure: Callable[[str], Rates]) -> Device:
    """Return the description of a GPU with these `facts`.

    `measure` is given the NVRTC target. It is called only if neither the table of GPU models nor
    the record of earlier measurements has the GPU.

    Raises:
        UnknownDevice: it is older than compute capability 8.0, its multiprocessors are not what
            the kernels count on, or its rates cannot be measured.
    """
    board, key = listed(facts.name), key_of(facts.name)
    if board is not None and board.sm_count == facts.sm_count:
        return board
    if board is not None:  # GPUs of one name may differ in size, such as virtual ones
        key = f"{key}-{facts.sm_count}sm"
    if facts.capability < _OLDEST:
        capability = ".".join(map(str, facts.capability))
        needed = "a GPU of compute capability 8.0 or later"
        raise UnknownDevice("device", f"{facts.name} (compute capability {capability})", needed)
    fixed = (Device.regs_per_sm, Device.smem_reserved_per_block)
    if (facts.regs_per_sm, facts.smem_reserved_per_block) != fixed:
        needed = "a GPU of {:,} registers a multiprocessor and {:,} bytes reserved a block"
        raise UnknownDevice("device", facts.name, needed.format(*fixed))
    record = recall(key)
    if record is not None and record.driver == facts.driver:
        return device_from(record.board)
    try:
        rates = measure(facts.arch)
    except ConfpredError as error:
        needed = f"a GPU of the table, or one whose rates can be measured ({error})"
        raise UnknownDevice("device", facts.name, needed) from error
    fields = [field.name for field in dataclasses.fields(Device)]
    sizes = {name: getattr(facts, name) for name in fields if hasattr(facts, name)}
    device = Device(key=key, product=facts.name, **sizes, **dataclasses.asdict(rates))
    remember(facts.driver, dataclasses.asdict(device))
    log.info("%s is described as %s, with measured rates", facts.name, device)
    return device


#: Share of an H100's memory rate that a copy reaches on a share of its multiprocessors: 0.134,
#: 0.101 and 0.093 ms on 32, 64 and 96 of 132, in place of 0.094.
_PART, _PART_OF_MEMORY = (0.0, 0.24, 0.48, 0.73, 1.0), (0.0, 0.70, 0.93, 1.0, 1.0)


@lru_cache
def part_of(board: Device, sm_count: int) -> Device:
    """Return the description of `sm_count` multiprocessors of a GPU, as a green context of CUDA has
    them: with all of the cache, and arithmetic in proportion."""
    share = sm_count / board.sm_count
    made = dataclasses.replace(
        board,
        key=f"{board.key}-{sm_count}sm",
        sm_count=sm_count,
        dram_bytes_per_s=board.dram_bytes_per_s * float(np.interp(share, _PART, _PART_OF_MEMORY)),
        tensor_flops=board.tensor_flops * share,
        simt_flops=board.simt_flops * share,
    )
    introduce(made)
    return made


def as_it_runs(device: Device, uuid: str, driver: str, measure: Callable[[], Rates]) -> Device:
    """Return `device` with the rates that the GPU of this `uuid` has now: lower ones where memory
    or arithmetic is slow by more than ``SLOW``; `device` itself where neither is, or where its
    rates are shares of a data sheet's.

    `measure` is called until neither is slow, and three times at most: a busy moment does not
    count. A GPU that is not slow is not measured again until the next boot, by the user's cache. A
    slow one is measured by each process, as heat and neighbours pass.

    A power limit is found where it binds at ``rates.cu``, which takes less power than products of
    random numbers do.
    """
    if not has_measured_rates(device):
        return device
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    path = cache_folder("clocks") / f"{uuid}.json"
    mark = {"format": CLOCK_FORMAT, "boot": boot, "driver": driver, "device": device.key}
    with suppress(DataError):
        if boot and read_json(path, "a clock that was checked", CLOCK_FORMAT) == mark:
            return device
    memory = arithmetic = math.inf
    for _ in range(_ATTEMPTS):
        rates = measure()
        memory = min(memory, device.dram_bytes_per_s / rates.dram_bytes_per_s)
        # One clock drives both, and either rate may be described as too low.
        units = (device.tensor_flops / rates.tensor_flops, device.simt_flops / rates.simt_flops)
        arithmetic = min(arithmetic, max(units))
        if max(memory, arithmetic) <= SLOW:
            if boot:
                with suppress(StorageError):  # a disk that is read-only
                    write_json(path, mark, private=True)
            return device
    memory, arithmetic = (times if times > SLOW else 1.0 for times in (memory, arithmetic))
    return dataclasses.replace(
        device,
        dram_bytes_per_s=device.dram_bytes_per_s / memory,
        tensor_flops=device.tensor_flops / arithmetic,
        simt_flops=device.simt_flops / arithmetic,
    )


def slowness(device: Device, now: Device) -> str:
    """Return in words how much slower a GPU is `now` than `device` says; empty where it is not."""
    memory = device.dram_bytes_per_s / now.dram_bytes_per_s
    arithmetic = device.simt_flops / now.simt_flops
    slow = {"memory": memory, "arithmetic": arithmetic}
    parts = [f"{name} takes {times:.2f} times as long" for name, times in slow.items() if times > 1]
    text = " and ".join(parts)
    return f"{text} as on the {device.key} that was measured" if text else ""


def measure_rates(cuda_device: Any, facts: Facts) -> Rates:
    """Measure the GPU `cuda_device` (of `cuda.core`, current in this thread), in about a tenth of a
    second and twice ``_COPY_BYTES`` of its memory, beside whatever else it does.

    Raises:
        CompileError, MissingExtra: a kernel of ``rates.cu`` cannot be compiled.
        LaunchError: the driver refuses memory or a launch.
    """
    try:
        stream = cuda_device.create_stream()
        products = _seconds(cuda_device, stream, _work("products", facts))
        arithmetic = _seconds(cuda_device, stream, _work("arithmetic", facts))
        size = max(_COPY_BYTES, _L2_MULTIPLE * facts.l2_bytes)
        one, other = (cuda_device.allocate(size, stream=stream) for _ in range(2))
        try:
            copy = _seconds(cuda_device, stream, lambda s: one.copy_to(other, stream=s))
        finally:
            one.close(stream)
            other.close(stream)
            stream.sync()
    except ConfpredError:
        raise
    except Exception as error:  # cuda.core raises several classes
        raise LaunchError(f"the rates of {facts.name} cannot be measured: {error}") from error
    finally:
        _give_back_memory(cuda_device)
    rounds = _blocks(facts) * _THREADS // 32 * _CHAINS * _STEPS  # of all warps
    reached = _MMA_SYNC_SHARE.get(facts.arch, 1.0)
    return Rates(
        dram_bytes_per_s=2 * size / copy,
        tensor_flops=rounds * _PRODUCT_FLOPS / products / reached,
        simt_flops=rounds * 32 * 2 / arithmetic,
    )


def _give_back_memory(cuda_device: Any) -> None:
    """Let the driver have what `cuda.core` would keep in its pool until this process ends."""
    with suppress(Exception):  # some virtual GPUs have no pool
        from cuda.bindings import driver

        driver.cuMemPoolTrimTo(cuda_device.memory_resource.handle, 0)


def rate_kernel(entry: str) -> KernelSpec:
    """Return the kernel ``products`` or ``arithmetic`` of ``rates.cu``."""
    sizes = (("THREADS", _THREADS), ("CHAINS", _CHAINS), ("STEPS", _STEPS))
    return KernelSpec("rates.cu", entry, (("DTYPE", "DTYPE_FLOAT16"), *sizes))


def _blocks(facts: Facts) -> int:
    """Return the blocks of a launch of ``rates.cu``: whole waves."""
    return facts.sm_count * _WAVES * (facts.warps_per_sm * 32 // _THREADS)


def _work(entry: str, facts: Facts) -> Callable[[Any], None]:
    """Return a function that launches a kernel of ``rates.cu`` on every multiprocessor."""
    from cuda.core import LaunchConfig, ObjectCode, launch

    compiled = compile_kernel(rate_kernel(entry), facts.arch)
    kernel = ObjectCode.from_cubin(compiled.cubin).get_kernel(compiled.entry)
    config = LaunchConfig(grid=_blocks(facts), block=_THREADS)
    nowhere = 0  # an address, as `cuda.core` takes a plain number for; nothing is stored
    return lambda stream: launch(stream, config, kernel, nowhere)


def _seconds(cuda_device: Any, stream: Any, enqueue: Callable[[Any], object]) -> float:
    """Return the fastest of some turns of `enqueue` on `stream`, by device events."""
    enqueue(stream)  # clocks rise, code is loaded
    seconds = []
    for _ in range(_TURNS):
        start, end = (cuda_device.create_event({"timing_enabled": True}) for _ in range(2))
        stream.record(start)
        enqueue(stream)
        stream.record(end)
        end.sync()
        seconds.append((end - start) * 1e-3)
    return float(min(seconds))
