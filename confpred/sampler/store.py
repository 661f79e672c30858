"""The store: a folder of Parquet shards, on this machine or in an object store, that one sampler at
a time writes to.

A shard is written whole or not at all, every few seconds, so a process killed at any moment loses
only the rows of these seconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

import pyarrow.compute as pc
from filelock import FileLock, Timeout

from confpred.data.measurements import Measurement, problem_of_row
from confpred.data.parquet import problem_columns, read_shards, write_rows
from confpred.data.remote import Folder, Lease, RemoteFolder
from confpred.errors import FolderBusy, StorageError
from confpred.families.protocol import PYTORCH
from confpred.files import raising
from confpred.problem.operation import Operation
from confpred.sampler.tasks import RowKey

log = logging.getLogger(__name__)
_KINDS = ("rows", "anchors")  # of shards, by the beginning of their names
FLUSH_ROWS = 20_000
FLUSH_SECONDS = 5.0
#: Seconds that an object store may fail before a run ends; the rows are kept meanwhile.
PATIENCE_S = 300.0
_RETRY_S = 2.0  # between the last tries of a run


@contextlib.contextmanager
def open_store(folder: Folder, run_id: str, operation: Operation) -> Iterator[Store]:
    """Yield the store of `folder` for problems of `operation`, held by this process alone.

    Raises:
        FolderBusy: another sampler holds the folder (a lock of a dead process does not count).
        StorageError: the folder cannot be made or written to.
    """
    if isinstance(folder, RemoteFolder):
        with Lease(folder, run_id) as lease:
            yield Store(folder, run_id, operation, lease)
        return
    with raising(StorageError, f"use {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderBusy(f"another sampler is writing to {folder}") from None
    try:
        for kind in _KINDS:  # left by a sampler that was killed while writing
            for stale in folder.glob(f".{kind}-*.tmp"):
                stale.unlink(missing_ok=True)
        yield Store(folder, run_id, operation)
    finally:
        lock.release()


def measured_in(folder: Folder, operation: Operation, device: str) -> dict[RowKey, set[str]]:
    """Return the configs that have a row of this device in a folder of shards, whatever its status;
    for PyTorch's operator the modes of cuDNN.

    Raises:
        DataError: a shard is damaged or foreign.
    """
    if not folder.is_dir():
        return {}
    keys = [*problem_columns(operation), "family", "source_digest"]
    columns = [*keys, "config", "cudnn_mode", "device"]
    table = read_shards(folder, operation, columns)
    table = table.filter(pc.field("device") == device)
    configs: dict[RowKey, set[str]] = {}
    wanted = [("config", "distinct"), ("cudnn_mode", "distinct")]
    for row in table.group_by(keys).aggregate(wanted).to_pylist():
        problem = problem_of_row(row, operation.problem)
        key = RowKey(problem, row["family"], row["source_digest"])
        which = "cudnn_mode" if row["family"] == PYTORCH else "config"
        configs[key] = set(row[f"{which}_distinct"])
    return configs


class Store:
    """The shards of a folder, read and appended; made by `open_store`."""

    def __init__(
        self, folder: Folder, run_id: str, operation: Operation, lease: Lease | None = None
    ) -> None:
        self.folder, self._run_id, self._operation = folder, run_id, operation
        self._lease = lease
        self._failing_since: float | None = None
        self._rows: list[Measurement] = []
        self._anchors: list[Measurement] = []
        self._shards = 0
        self._flushed = time.monotonic()

    def measured(self, device: str) -> dict[RowKey, set[str]]:
        return measured_in(self.folder, self._operation, device)

    def add(self, rows: Sequence[Measurement], *, anchors: bool = False) -> None:
        """Keep `rows` for the next flush; those of `anchors` go to shards of their own."""
        (self._anchors if anchors else self._rows).extend(rows)

    def flush(self, *, only_if_due: bool = False) -> None:
        """Write the added rows as one shard; with `only_if_due`, only if there are many, or the
        last flush is some time ago.

        Rows that an object store refuses are kept, and the next flush tries again.

        Raises:
            StorageError: the file system refused, or the object store for too long.
            FolderBusy: another sampler has taken the object store's folder over.
        """
        waited = time.monotonic() - self._flushed
        if only_if_due and len(self._rows) < FLUSH_ROWS and waited < FLUSH_SECONDS:
            return
        while True:
            try:
                self._write()
                return
            except StorageError as error:
                now = time.monotonic()
                since = self._failing_since = self._failing_since or now
                if self._lease is None or now - since > PATIENCE_S:
                    raise
                log.warning("%s; trying again", error)
                if only_if_due:
                    return
            time.sleep(_RETRY_S)

    def _write(self) -> None:
        self._flushed = time.monotonic()
        if self._lease is not None:
            self._lease.renew()
        for kind, rows in zip(_KINDS, (self._rows, self._anchors), strict=True):
            if rows:
                path = self.folder / f"{kind}-{self._run_id}-{self._shards:05d}.parquet"
                write_rows([r.to_row() for r in rows], self._operation, path)
                self._shards += 1
                rows.clear()
        self._failing_since = None
