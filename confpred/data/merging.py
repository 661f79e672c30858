"""Folders of shards, as the sampler writes them, and the one sorted file that is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from confpred.data.parquet import operation_in, problem_columns, read, schema, write
from confpred.errors import DataError, InvalidInput
from confpred.families.registry import all_operations
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.operation import Operation

_SHARDS = "rows-*.parquet"
#: What every run measures again (`confpred.sampler.anchors`).
_ANCHORS = "anchors-*.parquet"


def shards_in(folder: Path, *, anchors: bool = False) -> list[Path]:
    """The shards of a folder, or those of its `anchors`, in the order of their names.

    Raises:
        InvalidInput: it is no folder.
    """
    if not folder.is_dir():
        raise InvalidInput("folder", str(folder), "a folder of measurements")
    return sorted(folder.glob(_ANCHORS if anchors else _SHARDS))


def is_shard_of(file: Path, folder: Path) -> bool:
    """Whether a file of this name would be one of the shards of `folder`."""
    same = file.parent.exists() and folder.exists() and file.parent.samefile(folder)
    return same and (file.match(_SHARDS) or file.match(_ANCHORS))


def read_shards(
    folder: Path, operation: Operation, columns: Sequence[str], *, anchors: bool = False
) -> pa.Table:
    """The rows of all shards of a folder, or of its `anchors`; none where it has none.

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
        folders: of shards.
        file: to write.
        replace: `file` may exist.
        anchors: merge the shards of anchors, and no others.

    Raises:
        DataError: a shard is damaged, or a folder has none.
        StorageError: the file system refused; `file` is then as it was.
    """
    operation = _operation_of(folders, anchors)
    tables = []
    for folder in folders:
        table = read_shards(folder, operation, schema(operation).names, anchors=anchors)
        if not table.num_rows:
            raise DataError(f"{folder} holds no measurements ({_ANCHORS if anchors else _SHARDS})")
        tables.append(table)
    table = pa.concat_tables(tables)
    order = ["device", *problem_columns(operation), "family", "config", "time"]
    indices = pc.sort_indices(table, [(name, "ascending") for name in order])
    write(table.take(indices), file, replace=replace)
    return int(table.num_rows)


def _operation_of(folders: Sequence[Path], anchors: bool) -> Operation:
    """The operation of the first shard; `read` refuses shards of another operation."""
    for shard in (shard for folder in folders for shard in shards_in(folder, anchors=anchors)):
        name = operation_in(shard)
        if name not in all_operations():
            raise DataError(f"{shard} is of operation {name!r}, which no family computes")
        return all_operations()[name]
    return CONVOLUTION
