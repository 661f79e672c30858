"""Measurements on disk: a folder of Parquet shards that is written by one sampler at a time.

A shard is written whole or not at all, every few seconds, so a process killed at any moment loses
only those seconds. `confpred.data.parquet` makes of them the one sorted file that is committed and
trained on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from confpred.data.measurements import Measurement, problem_of_row
from confpred.data.parquet import problem_columns, read_shards, schema, write
from confpred.errors import FolderBusy, StorageError
from confpred.families.protocol import PYTORCH
from confpred.problem.operation import Operation
from confpred.sampler.tasks import Measured

FLUSH_ROWS = 20_000
FLUSH_SECONDS = 5.0


@contextlib.contextmanager
def open_store(folder: Path, run_id: str, operation: Operation) -> Iterator[Store]:
    """The store of `folder` for problems of `operation`, held by this process alone while the
    `with` block lasts.

    Raises:
        FolderBusy: another sampler holds the folder (a lock of a dead process does not count).
        StorageError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderBusy(f"another sampler is writing to {folder}") from None
    except OSError as error:
        raise StorageError(f"cannot use {folder}: {error.strerror or error}") from error
    try:
        for stale in folder.glob(".rows-*.tmp"):  # left by a sampler that was killed while writing
            stale.unlink(missing_ok=True)
        yield Store(folder, run_id, operation)
    finally:
        lock.release()


def measured_in(folder: Path, operation: Operation, device: str) -> dict[Measured, set[str]]:
    """The configs that have a row of the device with this key in a folder of shards, whatever its
    status; of PyTorch's operator, which has one config, the modes of cuDNN.

    Raises:
        DataError: a shard is damaged or foreign.
    """
    if not folder.is_dir():
        return {}
    keys = [*problem_columns(operation), "family", "source_digest"]
    columns = [*keys, "config", "cudnn_mode", "device"]
    table = read_shards(folder, operation, columns)
    table = table.filter(pc.field("device") == device)
    kind = operation.problem
    found: dict[Measured, set[str]] = {}
    wanted = [("config", "distinct"), ("cudnn_mode", "distinct")]
    for row in table.group_by(keys).aggregate(wanted).to_pylist():
        key = Measured(problem_of_row(row, kind), row["family"], row["source_digest"])
        which = "cudnn_mode" if row["family"] == PYTORCH else "config"
        found[key] = set(row[f"{which}_distinct"])
    return found


class Store:
    """Reads and appends the shards of a folder; made by `open_store`."""

    def __init__(self, folder: Path, run_id: str, operation: Operation) -> None:
        self.folder = folder
        self._operation = operation
        self._run_id = run_id
        self._rows: list[Measurement] = []
        self._anchors: list[Measurement] = []
        self._shards = 0
        self._flushed = time.monotonic()

    def measured(self, device: str) -> dict[Measured, set[str]]:
        """What the folder has of the device with this key; see `measured_in`."""
        return measured_in(self.folder, self._operation, device)

    def add(self, rows: Sequence[Measurement], *, anchors: bool = False) -> None:
        """Keep `rows` for the next flush; those of `anchors` go to shards of their own."""
        if anchors:
            self._anchors += rows
        else:
            self._rows += rows

    def flush(self, *, only_if_due: bool = False) -> None:
        """Write what was added as one shard.

        Args:
            only_if_due: do nothing until there are many rows, or the last flush is a while ago.

        Raises:
            StorageError: the file system refused; no part of the shard is left behind, and the
                next flush tries again.
        """
        waited = time.monotonic() - self._flushed
        if only_if_due and len(self._rows) < FLUSH_ROWS and waited < FLUSH_SECONDS:
            return
        self._flushed = time.monotonic()
        for kind, rows in (("rows", self._rows), ("anchors", self._anchors)):
            if rows:
                table = pa.Table.from_pylist([r.to_row() for r in rows], schema(self._operation))
                write(table, self.folder / f"{kind}-{self._run_id}-{self._shards:05d}.parquet")
                self._shards += 1
                rows.clear()
