"""The rows of several files of measurements as one table, each column checked as a whole."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from confpred.data.parquet import problem_columns, read
from confpred.errors import DataError, InvalidInput
from confpred.families.candidate import PYTORCH
from confpred.families.registry import all_families, config_ids
from confpred.measure.timing import STATUSES
from confpred.problem.operation import Operation

#: The column that says where a row comes from; see `CheckedRows`.
ROW = "row"
#: Columns of the versions that times depend on, beside the kernels.
MEASURED_WITH = ("driver", "cudnn")
_TEXTS = (
    *("networks", "family", "config", "source_digest", "device", "status", "cudnn_mode"),
    *MEASURED_WITH,
)
_TIMES = ("time_ms", "spread_ms")
_REGISTERS = "registers"
_MOST_REGISTERS = 1024  # no device's threads have as many


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRows:
    """Rows without an impossible value, save combinations of sizes that describe no problem.

    Attributes:
        table: the columns that identify a problem, those of ``_TEXTS`` and ``_TIMES``,
            ``registers``, and ``row``: how many rows of `files` come before it.
        files: where the rows come from, in order.
        ends: how many rows there are up to the end of each file.
    """

    table: pa.Table
    files: tuple[Path, ...]
    ends: tuple[int, ...]

    def error(self, row: int, error: InvalidInput) -> DataError:
        """`error`, found in the row that has this number in the column ``row``, with its place."""
        file = int(np.searchsorted(self.ends, row, side="right"))
        return _error(self.files[file], row - (self.ends[file - 1] if file else 0), error)


def read_checked(files: Sequence[Path], operation: Operation) -> CheckedRows:
    """The rows of `files`, in their order.

    Raises:
        DataError: a file cannot be read or lacks a column, or a value is not allowed, such as a
            kernel family or a config that this version does not have; the error names file, row
            (counted from 0), column, value and what is allowed.
    """
    columns = [*problem_columns(operation), *_TEXTS, _REGISTERS]
    tables = [read(file, operation, [*columns, *_TIMES]) for file in files]
    for file, table in zip(files, tables, strict=True):
        _check(file, table, columns)
        _check_configs(file, table, operation)
    table = pa.concat_tables(tables).combine_chunks()
    table = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
    ends = np.cumsum([part.num_rows for part in tables])
    return CheckedRows(table, tuple(files), tuple(ends.tolist()))


def _check(file: Path, table: pa.Table, columns: Sequence[str]) -> None:
    for name in columns:
        if table[name].null_count:
            _refuse(file, table, name, table[name].is_null(), "a value in every row")
    known = pc.is_in(table["status"], value_set=pa.array(STATUSES))
    _refuse(file, table, "status", pc.invert(known), " or ".join(STATUSES))
    time = table["time_ms"].fill_null(np.nan)
    positive = pc.and_(pc.is_finite(time), pc.greater(time, 0))
    wrong = pc.and_not(pc.equal(table["status"], "ok"), positive)
    _refuse(file, table, "time_ms", wrong, "a number above 0 where status is ok")
    inside = pc.and_(
        pc.greater_equal(table[_REGISTERS], 0), pc.less(table[_REGISTERS], _MOST_REGISTERS)
    )
    allowed = f"a number from 0 to {_MOST_REGISTERS - 1}"
    _refuse(file, table, _REGISTERS, pc.invert(inside), allowed)


def _check_configs(file: Path, table: pa.Table, operation: Operation) -> None:
    families = [name for name, each in all_families().items() if each.operation is operation]
    known = [PYTORCH, *families]
    unknown = pc.invert(pc.is_in(table["family"], value_set=pa.array(known)))
    _refuse(file, table, "family", unknown, partial(_nearest, known, " or ".join(known)))
    for family in pc.unique(table["family"]).to_pylist():
        words = list(config_ids(family))
        unknown = pc.invert(pc.is_in(table["config"], value_set=pa.array(words)))
        wrong = pc.and_(pc.equal(table["family"], family), unknown)
        allowed = f"a config of this version's {family}"
        _refuse(file, table, "config", wrong, partial(_nearest, words, allowed))


def _nearest(known: Sequence[str], allowed: str, value: str) -> str:
    """Say what is `allowed`, and what of it is most like `value`."""
    (near,) = difflib.get_close_matches(value, known, 1, cutoff=0.0)
    return f"{allowed}; the nearest is {near!r}"


def _refuse(
    file: Path,
    table: pa.Table,
    name: str,
    wrong: pa.ChunkedArray,
    allowed: str | Callable[[Any], str],
) -> None:
    """Refuse the first wrong value; `allowed` may depend on it."""
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        value = table[name][row].as_py()
        said = allowed if isinstance(allowed, str) else allowed(value)
        raise _error(file, row, InvalidInput(name, value, said))


def _error(file: Path, row: int, error: InvalidInput) -> DataError:
    return DataError(f"{file}: row {row}: {error}")
