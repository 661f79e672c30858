"""The table of measurements in a Parquet file: its columns, reading and writing.

A file holds problems of one operation, whose name is in its metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from confpred.data.measurements import OWN_COLUMNS, Measurement, Run
from confpred.errors import DataError
from confpred.files import write_whole
from confpred.problem.operation import Operation

_OPERATION = "operation"
_TYPES = {
    "int": pa.int32(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.string(),
    "Status": pa.string(),
}
#: Columns that files of confpred 0.1.0 lack; they are read as if empty.
_ADDED = ("cudnn", "cudnn_mode")


def schema(operation: Operation) -> pa.Schema:
    """Names and types of the columns, in the order of `Measurement.to_row`."""
    columns: list[tuple[str, pa.DataType]] = []
    for field in dataclasses.fields(operation.problem):
        if field.name in operation.problem.PAIRS:
            columns += [(f"{field.name}_{axis}", _TYPES["int"]) for axis in "hw"]
        else:
            columns.append((field.name, _TYPES[str(field.type)]))
    columns += [(name, _TYPES["str"]) for name in ("networks", "family", "config")]
    own = {field.name: _TYPES.get(str(field.type)) for field in dataclasses.fields(Measurement)}
    columns += [(name, own[name]) for name in OWN_COLUMNS]
    columns += [(field.name, _TYPES[str(field.type)]) for field in dataclasses.fields(Run)]
    return pa.schema(columns, metadata={_OPERATION: operation.name})


def problem_columns(operation: Operation) -> list[str]:
    """Names of the columns that identify a problem."""
    names: list[str] = schema(operation).names
    return names[: names.index("networks")]


def operation_in(path: Path) -> str:
    """Name of the operation whose problems are in a file.

    Raises:
        DataError: the file is missing, truncated or damaged.
    """
    return _operation_of(_schema_in(path))


def _schema_in(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise _not_whole(path, error) from error


def _operation_of(found: pa.Schema) -> str:
    metadata = found.metadata or {}
    return str(metadata.get(_OPERATION.encode(), b"").decode(errors="replace"))


def read(path: Path, operation: Operation, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one file, with all columns or only `columns`.

    Raises:
        DataError: the file is missing, truncated or damaged, is of another operation, or lacks a
            column.
    """
    present = _schema_in(path)
    if (holds := _operation_of(present)) != operation.name:
        raise DataError(f"{path} holds measurements of {holds!r}, not of {operation.name!r}")
    known = schema(operation)
    names = known.names if columns is None else list(columns)
    absent = [name for name in names if name in _ADDED and name not in present.names]
    try:
        with path.open("rb") as file:
            # One thread: a process that ends soon afterwards, for instance with an error, would
            # sometimes abort because Arrow is still starting threads.
            found = pq.read_table(
                file,
                columns=[name for name in names if name not in absent],
                use_threads=False,
                pre_buffer=False,
                page_checksum_verification=True,
            )
        for name in absent:
            found = found.append_column(name, pa.array([""] * found.num_rows, pa.string()))
        table = found.select(names).cast(
            pa.schema([known.field(name) for name in names], known.metadata)
        )
        table.validate(full=True)  # finds texts that are not UTF-8, for instance
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise _not_whole(path, error) from error
    return table


def _not_whole(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return DataError(f"{path} is not a whole file of measurements: {reason}")


def write(table: pa.Table, path: Path, *, replace: bool = True) -> None:
    """Write `table` to `path`, whole or not at all, with checksums that `read` verifies; `replace`
    as `write_whole` has it.

    Raises:
        StorageError: the file system refused.
    """

    def fill(file: BinaryIO) -> None:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)

    write_whole(path, fill, replace=replace)
