"""A *device*: the facts about a GPU model that legality, features and rooflines need.

The table of GPU models, ``devices.json``, has two parts. ``architectures`` are the limits of a
multiprocessor (CUDA Programming Guide, "Compute Capabilities"). ``boards`` are sizes and rates of
one GPU model each: ``sheet`` has its maker's figures for device memory (GB/s), dense half-precision
products with float32 sums, and float32 arithmetic (TFLOP/s); ``source`` is where. The rates beside
it are rates that kernels reach: measured on the H100 and the H200 (device copy, 8192^3 products;
``is_measured``), and 80 to 95 % of the sheet's for the others. Fewer multiprocessors, slower memory
or a lower clock make another GPU model: a model's times are of one device, and so is the order of
configs.

The driver's description of any other GPU lies in the user's cache folder, a file a device, because
its rates take a moment to measure (`confpred.cuda.discovery`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from confpred.concurrency import Later
from confpred.errors import DataError, StorageError, UnknownDevice, nearest
from confpred.files import cache_folder, read_json, write_json
from confpred.problem.record import Record

log = logging.getLogger(__name__)
_SHOWN = 3  # GPU models that an error names
TABLE_FORMAT, FORMAT = "confpred-devices/1", "confpred-device/1"
_TABLE = Path(__file__).with_name("devices.json")
_MOST_CHARACTERS = 100  # of a key, as it is a file's name, and of a device's name


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU model.

    Attributes:
        key: short name that users type, and that models are stored under.
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

    # The same in every architecture from sm_80 on (CUDA Programming Guide, "Compute Capabilities"):
    # registers of a multiprocessor, and shared memory that the driver takes of each block.
    regs_per_sm = 65_536
    smem_reserved_per_block = 1_024

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can be clusters, which share memory: from sm_90 on."""
        return int("".join(filter(str.isdigit, self.arch))) >= 90

    def memory_s(self, problem: Record) -> float:
        """Return the seconds in which device memory moves the problem's minimum of bytes."""
        return problem.minimum_bytes / self.dram_bytes_per_s

    def arithmetic_s(self, problem: Record) -> float:
        """Return the seconds of the problem's arithmetic: on tensor cores in half precision, and
        without them in float32."""
        rate = self.simt_flops if problem.dtype == "float32" else self.tensor_flops
        return problem.flops / rate

    def roofline_s(self, problem: Record) -> float:
        """Return the seconds below which no kernel can go: the larger of the two above."""
        return max(self.memory_s(problem), self.arithmetic_s(problem))


def is_near(device: Device, source: Device) -> bool:
    """Return whether `device` launches answers of the model of `source` that nobody measured on it:
    where their architecture is the same, as the evidence is of one (decision 186)."""
    return device.arch == source.arch


def read_table() -> list[dict[str, Any]]:
    """Return the GPU models of ``devices.json``, each with the limits of its architecture."""
    table = read_json(_TABLE, "a table of devices", TABLE_FORMAT)
    return [{**table["architectures"][row["arch"]], **row} for row in table["boards"]]


@lru_cache
def _table() -> tuple[Mapping[str, Device], Mapping[str, str]]:
    """Return the devices of the table by key, and their keys by the names that drivers give."""
    rows = read_table()
    devices = {row["key"]: device_from(row) for row in rows}
    keys = {}
    for row in rows:
        for name in map(plain, (row["product"], *row["other_names"])):
            # Drivers before version 460 leave out the vendor.
            keys[name] = keys[name.removeprefix("nvidia ")] = row["key"]
    return MappingProxyType(devices), keys


#: The GPU models that confpred knows by name, by key: those of ``devices.json``.
KNOWN: Mapping[str, Device] = Later(lambda: _table()[0])
_introduced: dict[str, Device] = {}


def get_device(name: str | Device) -> Device:
    """Return the device called `name`: a key such as ``h100``, or the name that the driver reports.

    A GPU model that the table lacks has a description once its driver was asked on this machine
    (`confpred.cuda.discovery`), and is found by its key from then on.

    Raises:
        UnknownDevice: no description has that name. A part of a GPU (MIG) or a virtual GPU has none
            before its driver was asked: these have fewer multiprocessors than the whole GPU.
    """
    if isinstance(name, Device):
        return name
    if isinstance(name, str) and len(name) <= _MOST_CHARACTERS:
        device = listed(name) or _introduced.get(key_of(name)) or _remembered(name)
        if device is not None:
            return device
        if " mig " in plain(name):
            some = ", ".join([*KNOWN][:_SHOWN])
            raise UnknownDevice("device", name, f"a whole GPU, such as {some}")
    if isinstance(name, str) and name.partition(":")[0] in ("cuda", "cpu"):
        allowed = "the GPU model to answer for, such as h100; cuda:0 is for commands that measure"
        raise UnknownDevice("device", name, allowed)
    near = nearest(name, KNOWN)
    some = near if near != " or ".join(KNOWN) else ", ".join([*KNOWN][:_SHOWN])
    raise UnknownDevice("device", name, f"{some}, or another one of `confpred devices`")


def listed(name: str) -> Device | None:
    """Return the table's device of this key or driver's name."""
    wanted = plain(name)
    return KNOWN.get(wanted) or KNOWN.get(_table()[1].get(wanted, ""))


@lru_cache
def has_measured_rates(device: Device) -> bool:
    """Return whether kernels have shown the rates of `device`: those of the table's devices are
    shares of their data sheets', but for some."""
    rows = {row["key"]: row for row in read_table()}
    return device.key not in rows or bool(rows[device.key].get("is_measured"))


def introduce(device: Device) -> None:
    """Register a model's own device for `get_device` in this process. The table takes
    precedence."""
    _introduced[device.key] = device


def device_from(fields: Mapping[str, Any]) -> Device:
    """Return the device with these values of `Device`'s fields, as ``dataclasses.asdict`` gives
    them.

    Raises:
        DataError: a field is missing, or its value is impossible.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Device):
        kind: Any = {"str": str, "int": int, "float": float}[str(field.type)]
        value: Any = fields.get(field.name, field.default)
        if value is dataclasses.MISSING:
            raise DataError(f"a device's {field.name} is missing")
        is_valid = isinstance(value, kind) and (kind is str or 0 < value < math.inf)
        if not is_valid or not value:
            raise DataError(f"a device's {field.name} is {value!r}, not {kind.__name__} above 0")
        values[field.name] = value
    return Device(**values)


def plain(name: str) -> str:
    """Return `name` in lower case with single blanks, for comparison."""
    return " ".join(name.lower().split())


def key_of(name: str) -> str:
    """Return the key for a driver's name of a GPU, such as ``rtx-a2000`` for ``NVIDIA RTX A2000``.
    The key of a key is itself."""
    words = plain(name).removeprefix("nvidia ").removeprefix("geforce ")
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:_MOST_CHARACTERS]


class StoredDescription(NamedTuple):
    """A driver's description of a GPU: the driver's version, and the fields of a `Device`."""

    driver: str
    board: Mapping[str, Any]


def remembered_folder() -> Path:
    """Return the folder of drivers' descriptions, in the user's cache or as configured."""
    return cache_folder("devices")


def recall(key: str) -> StoredDescription | None:
    """Return the stored description of a device; None if there is none, or an incomplete one."""
    path = remembered_folder() / f"{key}.json"
    if not key or not os.path.isfile(path):
        return None
    try:
        content = read_json(path, "a description of a device", FORMAT)
        driver, board = content.get("driver"), content.get("board")
        if isinstance(driver, str) and isinstance(board, dict) and board.get("key") == key:
            return StoredDescription(driver, board)
        raise DataError(f"{path} is no description of {key}")
    except DataError as error:
        log.warning("%s", error)
        return None


def remember(driver: str, board: Mapping[str, Any]) -> None:
    """Store a driver's description of the device with the fields `board`. If the folder cannot be
    written, the next process measures again."""
    content = {"format": FORMAT, "driver": driver, "board": dict(board)}
    try:
        write_json(remembered_folder() / f"{board['key']}.json", content, private=True)
    except StorageError as error:
        log.warning("the description of %s is not kept: %s", board["key"], error)


def _remembered(name: str) -> Device | None:
    description = recall(key_of(name))
    try:
        return description and device_from(description.board)
    except DataError as error:  # as if it had never been stored: the driver is asked again
        log.warning("the description of %s is damaged: %s", name, error)
        return None
