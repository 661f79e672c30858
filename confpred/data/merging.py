"""Folders of shards, as the sampler writes them, and what is made of them: one sorted file, or a
new part of a folder of parts, none of which is ever written again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from confpred.data.parquet import operation_in, problem_columns, read, schema, write
from confpred.errors import DataError, InvalidInput
from confpred.families.registry import all_operations
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.operation import Operation

_SHARDS = "rows-*.parquet"
#: What `add_part` has written is read as the sampler's shards are.
_PARTS = "part-*.parquet"
#: What every run measures again (`confpred.sampler.tasks`).
_ANCHORS = "anchors-*.parquet"
#: The columns that tell rows of a problem apart, beside the problem's own.
_ROW = ("device", "run_id", "family", "config", "cudnn_mode", "time")
_MOST_PARTS = 99  # of a day


def shards_in(folder: Path, *, anchors: bool = False) -> list[Path]:
    """The shards and parts of a folder, or the shards of its `anchors`, sorted by name.

    Raises:
        InvalidInput: it is no folder.
    """
    if not folder.is_dir():
        raise InvalidInput("folder", str(folder), "a folder of measurements")
    patterns = (_ANCHORS,) if anchors else (_SHARDS, _PARTS)
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def is_shard_of(file: Path, folder: Path) -> bool:
    """Whether a file of this name would be one of the shards or parts of `folder`."""
    same = file.parent.exists() and folder.exists() and file.parent.samefile(folder)
    return same and any(file.match(pattern) for pattern in (_SHARDS, _PARTS, _ANCHORS))


def read_shards(
    folder: Path, operation: Operation, columns: Sequence[str], *, anchors: bool = False
) -> pa.Table:
    """The rows of all shards and parts of a folder, or of its `anchors`; none where it has none.

    Raises:
        InvalidInput: it is no folder.
        DataError: a shard is damaged or foreign.
    """
    known = schema(operation)
    empty = pa.schema([known.field(name) for name in columns], known.metadata).empty_table()
    shards = (read(path, operation, columns) for path in shards_in(folder, anchors=anchors))
    return pa.concat_tables([empty, *shards])


def merge(
    folders: Sequence[Path], file: Path, *, replace: bool = True, anchors: bool = False
) -> int:
    """Write the rows of all shards of `folders` to one `file`, sorted by problem; returns how many.

    Args:
        folders: of shards, or of parts.
        file: to write.
        replace: `file` may exist.
        anchors: merge the shards of anchors, and no others.

    Raises:
        DataError: a shard is damaged, or a folder has none.
        StorageError: the file system refused; `file` is then as it was.
    """
    table = _joined(folders, _operation_of(folders, anchors), anchors)
    write(table, file, replace=replace)
    return int(table.num_rows)


def add_part(
    folders: Sequence[Path], folder: Path, *, anchors: bool = False
) -> tuple[Path, int] | None:
    """Write the rows of `folders` that no part of `folder` has to a new part, sorted by problem.

    Args:
        folders: of shards, or of parts.
        folder: of parts, files of measurements; made if missing. The new part bears the day (UTC),
            as in ``part-2026-11-24.parquet``, ``part-2026-11-24_02.parquet``: it is the last one by
            name.
        anchors: merge the shards of anchors, and no others.

    Returns:
        The new part and how many rows it has; None where the parts have all rows already.

    Raises:
        InvalidInput: `folder` has shards of a sampler, or there are too many parts of this day.
        DataError: a shard or a part is damaged or of another operation, or a folder has no shards.
        StorageError: the file system refused; all parts are as they were.
    """
    if any(path for pattern in (_SHARDS, _ANCHORS) for path in folder.glob(pattern)):
        raise InvalidInput("file", str(folder), "a folder without a sampler's shards")
    operation = _operation_of(folders, anchors)
    table = _joined(folders, operation, anchors)
    known = [*problem_columns(operation), *_ROW]
    number = np.arange(table.num_rows)
    for part in sorted(folder.glob("*.parquet")):
        left = table.select(known).take(number).append_column("number", pa.array(number))
        there = read(part, operation, known)
        # One thread, as in `confpred.data.parquet.read`.
        left = left.join(there, known, join_type="left anti", use_threads=False)
        number = np.sort(left["number"].to_numpy())
    if not len(number):
        return None
    path = _new_part(folder)
    write(table.take(number), path, replace=False)
    return path, len(number)


def _new_part(folder: Path) -> Path:
    """The first name of today that no part of `folder` has."""
    day = datetime.now(timezone.utc).date().isoformat()
    # In the order of names, "_02.parquet" comes after ".parquet".
    for ending in ("", *(f"_{number:02}" for number in range(2, _MOST_PARTS + 1))):
        path = folder / f"part-{day}{ending}.parquet"
        if not path.exists():
            return path
    raise InvalidInput("file", str(folder), f"a folder with under {_MOST_PARTS} parts of {day}")


def _joined(folders: Sequence[Path], operation: Operation, anchors: bool) -> pa.Table:
    """The rows of all shards of `folders`, sorted by problem."""
    tables = []
    for folder in folders:
        table = read_shards(folder, operation, schema(operation).names, anchors=anchors)
        if not table.num_rows:
            raise DataError(f"{folder} holds no measurements ({_ANCHORS if anchors else _SHARDS})")
        tables.append(table)
    table = pa.concat_tables(tables)
    order = ["device", *problem_columns(operation), "family", "config", "time"]
    return table.take(pc.sort_indices(table, [(name, "ascending") for name in order]))


def _operation_of(folders: Sequence[Path], anchors: bool) -> Operation:
    """The operation of the first shard; `read` refuses shards of another operation."""
    for shard in (shard for folder in folders for shard in shards_in(folder, anchors=anchors)):
        name = operation_in(shard)
        if name not in all_operations():
            raise DataError(f"{shard} is of operation {name!r}, which no family computes")
        return all_operations()[name]
    return CONVOLUTION
