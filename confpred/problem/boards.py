"""Descriptions of GPUs as files: the table of boards that ships with the package, and what was read
from the drivers of this user's machines.

The table, ``devices.json``, has two parts. ``architectures`` are the limits of a multiprocessor
(CUDA Programming Guide, "Compute Capabilities"). ``boards`` are sizes and rates of one board each:
``sheet`` is what its maker says of device memory (GB/s), of dense half-precision products with
float32 sums, and of float32 arithmetic (TFLOP/s); ``source`` is where. The rates beside it are what
kernels reach: measured on the H100 and the H200 (device copy, 8192^3 products), and 80 to 95 % of
the sheet's for the others. A board with fewer multiprocessors, slower memory or a lower clock is
one of its own: a model's times are of one device, and so is the order of configs.

What a driver said of any other GPU lies in the user's cache folder, a file a device, because its
rates take a moment to measure (`confpred.cuda.discovery`).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from confpred.errors import DataError, StorageError
from confpred.files import read_json, write_whole

log = logging.getLogger(__name__)
TABLE_FORMAT, FORMAT = "confpred-devices/1", "confpred-device/1"
_TABLE = Path(__file__).with_name("devices.json")
_MOST_CHARACTERS = 100  # of a key, as it is a file's name
_Value = TypeVar("_Value")


class Lazily(Mapping[str, _Value]):
    """A mapping that is made when it is first looked at."""

    def __init__(self, make: Callable[[], Mapping[str, _Value]]) -> None:
        self._make = make

    def __getitem__(self, key: str) -> _Value:
        return self._make()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


@dataclass(frozen=True, slots=True)
class Remembered:
    """A description that a driver gave.

    Attributes:
        driver: its version.
        board: the fields of a `confpred.problem.device.Device`.
    """

    driver: str
    board: Mapping[str, Any]


def read_table() -> list[dict[str, Any]]:
    """The boards of ``devices.json``, each with the limits of its architecture."""
    table = read_json(_TABLE, "a table of devices", TABLE_FORMAT)
    return [{**table["architectures"][board["arch"]], **board} for board in table["boards"]]


def plain(name: str) -> str:
    """`name` as it is compared with others."""
    return " ".join(name.lower().split())


def key_of(name: str) -> str:
    """The key of a board that a driver calls `name`, such as ``rtx-a2000`` for
    ``NVIDIA RTX A2000``; that of a key is the key itself."""
    words = plain(name).removeprefix("nvidia ").removeprefix("geforce ")
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:_MOST_CHARACTERS]


def remembered_folder() -> Path:
    """Where descriptions of drivers are kept: in ``$CONFPRED_CACHE_DIR``, or in the user's cache
    folder as the operating system names it."""
    chosen = os.environ.get("CONFPRED_CACHE_DIR")
    return Path(chosen or platformdirs.user_cache_dir("confpred")) / "devices"


def recall(key: str) -> Remembered | None:
    """What was remembered of the device called `key`; None if nothing, or nothing that is whole."""
    path = remembered_folder() / f"{key}.json"
    if not key or not path.is_file():
        return None
    try:
        content = read_json(path, "a description of a device", FORMAT)
        driver, board = content.get("driver"), content.get("board")
        if not isinstance(driver, str) or not isinstance(board, dict) or board.get("key") != key:
            raise DataError(f"{path} is no description of {key}")
    except DataError as error:
        log.warning("%s", error)
        return None
    return Remembered(driver, board)


def remember(driver: str, board: Mapping[str, Any]) -> None:
    """Keep what `driver` said of the device with the fields `board`; a folder that cannot be
    written only costs the next process the measurement."""
    content = {"format": FORMAT, "driver": driver, "board": dict(board)}
    text = json.dumps(content, indent=1) + "\n"
    path = remembered_folder() / f"{board['key']}.json"
    try:
        write_whole(path, lambda file: file.write(text.encode()), private=True)
    except StorageError as error:
        log.warning("the description of %s is not kept: %s", board["key"], error)
