"""A *device*: the facts about a GPU that legality, features and rooflines need."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from confpred.errors import DataError, UnknownDevice, nearest
from confpred.problem import boards
from confpred.problem.record import Record

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU model.

    Attributes:
        key: short name, as users type it and as models are filed under.
        product: the name that the driver reports (others: ``devices.json``).
        arch: NVRTC target.
        sm_count: multiprocessors.
        l2_bytes: level-2 cache.
        smem_per_sm: shared memory of a multiprocessor, bytes.
        smem_per_block: largest shared memory of one block (opt-in), bytes.
        dram_bytes_per_s: copy bandwidth, bytes read plus bytes written.
        tensor_flops: dense half-precision matrix rate with float32 accumulation.
        simt_flops: float32 rate of ordinary arithmetic.
        warps_per_sm, blocks_per_sm: most of each that a multiprocessor holds at once.
    """

    key: str
    product: str
    arch: str
    sm_count: int
    l2_bytes: int
    smem_per_sm: int
    smem_per_block: int
    dram_bytes_per_s: float
    tensor_flops: float
    simt_flops: float
    warps_per_sm: int = 64
    blocks_per_sm: int = 32

    # Of every architecture from sm_80 on (CUDA Programming Guide, "Compute Capabilities"):
    # registers of a multiprocessor, and the driver's part of each block's shared memory.
    regs_per_sm = 65_536
    smem_reserved_per_block = 1_024

    def memory_s(self, problem: Record) -> float:
        """Seconds that device memory takes for what must cross it."""
        return problem.minimum_bytes / self.dram_bytes_per_s

    def arithmetic_s(self, problem: Record) -> float:
        """Seconds of the problem's arithmetic: on tensor cores in half precision, and without them
        in float32."""
        rate = self.simt_flops if problem.dtype == "float32" else self.tensor_flops
        return problem.flops / rate

    def roofline_s(self, problem: Record) -> float:
        """Seconds below which no kernel can go: the larger of the two above."""
        return max(self.memory_s(problem), self.arithmetic_s(problem))


@lru_cache
def _table() -> tuple[Mapping[str, Device], Mapping[str, str]]:
    """The boards by key, and the key by what a driver may call a board."""
    devices, keys = {}, {}
    for row in boards.read_table():
        device = device_from(row)
        devices[device.key] = device
        for called in (device.product, *row["other_names"]):
            keys[boards.plain(called)] = device.key
            # Drivers before version 460 leave out the vendor.
            keys[boards.plain(called).removeprefix("nvidia ")] = device.key
    return MappingProxyType(devices), keys


#: The boards that confpred knows by name, by key: those of ``devices.json`` beside this module,
#: read when the first one is asked for.
KNOWN: Mapping[str, Device] = boards.Lazily(lambda: _table()[0])


def get_device(name: str | Device) -> Device:
    """The device called `name`: a key such as ``h100``, or the name that the driver reports.

    A GPU that is no board of the table has a description once its driver was asked on this machine
    (`confpred.cuda.discovery`), and is found by its key from then on.

    Raises:
        UnknownDevice: no description is of that name. Neither is one of a part of a GPU (MIG), or
            of a virtual GPU, before its driver was asked: these have fewer multiprocessors than the
            board.
    """
    if isinstance(name, Device):
        return name
    if isinstance(name, str):
        device = listed(name) or _introduced.get(boards.key_of(name)) or _remembered(name)
        if device is not None:
            return device
        if " mig " in boards.plain(name):
            raise UnknownDevice("device", name, f"a whole GPU: {' or '.join(KNOWN)}")
    near, known = nearest(name, KNOWN), " or ".join(KNOWN)
    raise UnknownDevice("device", name, known if near == known else f"{near}, say; all are {known}")


def listed(name: str) -> Device | None:
    """The device of the table that `name` is of, by its key or by what a driver calls it."""
    wanted = boards.plain(name)
    return KNOWN.get(wanted) or KNOWN.get(_table()[1].get(wanted, ""))


def introduce(device: Device) -> None:
    """Have `get_device` know `device` in this process, as a model of it is loaded that brings its
    description along; a board of the table stays what it is."""
    _introduced[device.key] = device


_introduced: dict[str, Device] = {}


def device_from(fields: Mapping[str, Any]) -> Device:
    """The device with these values of `Device`'s fields, as ``dataclasses.asdict`` gives them.

    Raises:
        DataError: a field is missing or is no possible value.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Device):
        kind: Any = {"str": str, "int": int, "float": float}[str(field.type)]
        value: Any = fields.get(field.name, field.default)
        known = isinstance(value, kind) and (kind is str or 0 < value < math.inf)
        if not known or not value:
            raise DataError(f"a device's {field.name} is {value!r}, not {kind.__name__} above 0")
        found[field.name] = value
    return Device(**found)


def _remembered(name: str) -> Device | None:
    found = boards.recall(boards.key_of(name))
    if found is None:
        return None
    try:
        return device_from(found.board)
    except DataError as error:  # as if it had never been kept: the driver is asked again
        log.warning("the description of %s is damaged: %s", name, error)
        return None
