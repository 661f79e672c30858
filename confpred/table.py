"""The table of measurements in a Parquet file: its columns, reading and writing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from confpred.errors import DataError
from confpred.files import write_whole
from confpred.measurement import Measurement, Run
from confpred.problem import PAIRS, Problem

_TYPES = {
    "int": pa.int32(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.string(),
    "Status": pa.string(),
}


def schema() -> pa.Schema:
    """Names and types of the columns, in the order of `Measurement.to_row`."""
    columns: list[tuple[str, pa.DataType]] = []
    for field in dataclasses.fields(Problem):
        names = (f"{field.name}_h", f"{field.name}_w") if field.name in PAIRS else (field.name,)
        columns += [
            (name, _TYPES["int" if field.name in PAIRS else str(field.type)]) for name in names
        ]
    columns.append(("networks", pa.string()))
    for record, nested in ((Measurement, ("problem", "networks", "run")), (Run, ())):
        columns += [
            (field.name, _TYPES[str(field.type)])
            for field in dataclasses.fields(record)
            if field.name not in nested
        ]
    return pa.schema(columns)


def problem_columns() -> list[str]:
    """Names of the columns that tell a problem."""
    names: list[str] = schema().names
    return names[: names.index("networks")]


def read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one file, or those of `columns`.

    Raises:
        DataError: the file is missing, truncated or damaged, or lacks a column.
    """
    names = schema().names if columns is None else list(columns)
    try:
        with path.open("rb") as file:
            # One thread: a process that ends soon after, with an error say, would now and then be
            # aborted over threads that Arrow is still starting.
            found = pq.read_table(
                file,
                columns=names,
                use_threads=False,
                pre_buffer=False,
                page_checksum_verification=True,
            )
        table = found.select(names).cast(pa.schema([schema().field(name) for name in names]))
        table.validate(full=True)  # a text that is no UTF-8, say
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"{path} is not a whole file of measurements: {reason}") from error
    return table


def write(table: pa.Table, path: Path) -> None:
    """Write `table` to `path`, whole or not at all, with checksums that `read` verifies.

    Raises:
        StorageError: the file system refused.
    """

    def fill(file: BinaryIO) -> None:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)

    write_whole(path, fill)
