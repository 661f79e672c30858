"""The table of measurements in a Parquet file: its columns, and how a file is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from confpred.errors import DataError
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
        DataError: the file is missing, truncated, or lacks a column.
    """
    try:
        table = pq.read_table(
            path, columns=None if columns is None else list(columns), partitioning=None
        )
        return table.select(columns or schema().names).cast(
            pa.schema([schema().field(name) for name in columns or schema().names])
        )
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a whole file of measurements: {reason}") from error
