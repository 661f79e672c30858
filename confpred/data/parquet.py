"""Tables of measurements in Parquet files: their columns, reading, writing, checks and merging.

A file holds problems of one operation, whose name is in its metadata. The sampler writes folders of
shards; merging makes one sorted file of them, or a new part of a folder of parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from confpred.concurrency import submit
from confpred.data.measurements import OWN_COLUMNS, Run
from confpred.data.remote import Folder, RemoteFile
from confpred.errors import DataError, InvalidInput
from confpred.families.protocol import PYTORCH
from confpred.families.registry import all_families, all_operations, config_ids
from confpred.files import write_whole
from confpred.measure.timing import STATUSES
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.operation import Operation

_OPERATION = "operation"
_NUMBERS = {"int": pa.int32(), "float": pa.float64(), "bool": pa.bool_()}  # others are text
#: Columns that files of confpred 0.1.0 lack; they are read as if empty.
_ADDED = ("cudnn", "cudnn_mode")


def schema(operation: Operation) -> pa.Schema:
    """Return names and types of the columns, in the order of `Measurement.to_row`."""
    kinds = {**operation.problem.column_types()}
    kinds |= dict.fromkeys(("networks", "family", "config"), "str") | OWN_COLUMNS
    kinds |= {field.name: str(field.type) for field in dataclasses.fields(Run)}
    columns = [(name, _NUMBERS.get(kind, pa.string())) for name, kind in kinds.items()]
    return pa.schema(columns, metadata={_OPERATION: operation.name})


def problem_columns(operation: Operation) -> list[str]:
    """Return the names of the columns that identify a problem."""
    return list(operation.problem.column_types())


#: A file on this machine, or in an object store.
File = Path | RemoteFile


def operation_in(path: File) -> str:
    """Return the name of the operation whose problems are in a file.

    Raises:
        DataError: the file is missing, truncated or damaged.
    """
    with _opened(path) as file:
        return _operation_of(file)


def operation_of_file(path: File) -> Operation:
    """Return the operation whose measurements are in a file.

    Raises:
        DataError: it cannot be read, or no family computes that operation.
    """
    name = operation_in(path)
    if name not in all_operations():
        raise unknown_operation(path, name)
    return all_operations()[name]


@contextlib.contextmanager
def _opened(path: File, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a file; any error in the ``with`` block becomes a DataError that names the file."""
    try:
        with path.open("rb") as file:
            yield pq.ParquetFile(file, page_checksum_verification=True, **options)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"{path} is not a whole file of measurements: {reason}") from error


def _operation_of(file: pq.ParquetFile) -> str:
    metadata = file.schema_arrow.metadata or {}
    return str(metadata.get(_OPERATION.encode(), b"").decode(errors="replace"))


def unknown_operation(path: File, name: str) -> DataError:
    """Return the error for a file of an operation that no family computes, or without a name of
    one."""
    if name:
        return DataError(f"{path} is of operation {name!r}, which no family computes")
    return DataError(
        f"{path} lacks the metadata {_OPERATION!r}, which programs such as pandas drop; if it "
        "measures conv2d, confpred merge --operation conv2d FOLDER FILE writes it again"
    )


def read(
    path: File, operation: Operation, columns: Sequence[str] | None = None, *, unnamed: bool = False
) -> pa.Table:
    """Return the rows of one file, with all columns or only `columns`. With `unnamed`, the file's
    metadata need not name the operation.

    Raises:
        DataError: the file is missing, truncated or damaged, is of another operation, or lacks a
            column.
    """
    full = schema(operation)
    names = full.names if columns is None else list(columns)
    with _opened(path) as file:
        holds, present = _operation_of(file), file.schema_arrow.names
        if not holds and not unnamed:
            raise unknown_operation(path, holds)
        if holds not in ("", operation.name):
            raise DataError(f"{path} holds measurements of {holds!r}, not of {operation.name!r}")
        absent = [name for name in names if name in _ADDED and name not in present]
        # One thread: a process that ends soon afterwards would sometimes abort because Arrow is
        # still starting threads.
        table = file.read([name for name in names if name not in absent], use_threads=False)
        for name in absent:
            table = table.append_column(name, pa.array([""] * table.num_rows, pa.string()))
        wanted = pa.schema([full.field(name) for name in names], full.metadata)
        table = table.select(names).cast(wanted)
        table.validate(full=True)  # finds texts that are not UTF-8, for instance
    return table


def check_size(path: Path, operation: Operation, *, rows: int, size: int, text: int) -> None:
    """Check, before a file is read, that it has at most `rows` rows, of `size` bytes in all, and no
    text longer than `text` bytes: a small compressed file can unpack to gigabytes.

    Raises:
        DataError: the file has more, or is damaged.
    """
    texts = [field.name for field in schema(operation) if pa.types.is_string(field.type)]
    with _opened(path, read_dictionary=texts) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        count, unpacked = file.metadata.num_rows, sum(group.total_byte_size for group in groups)
        if not 0 < count <= rows or unpacked > size:
            raise DataError(
                f"{count} rows of {unpacked} bytes; allowed: 1 to {rows} rows, of {size} bytes"
            )
        for name in (name for name in texts if name in file.schema_arrow.names):
            in_all = 0
            for part in file.read(columns=[name], use_threads=False)[name].chunks:
                if not pa.types.is_dictionary(part.type):
                    break  # not a text column; reading refuses it
                lengths = pc.binary_length(part.dictionary).fill_null(0)
                longest = pc.max(lengths).as_py() or 0
                in_all += pc.sum(lengths.take(part.indices)).as_py() or 0
                if longest > text or in_all > size:
                    raise DataError(
                        f"column {name} has a text of {longest} bytes, and {in_all} bytes in all; "
                        f"allowed: {text}, and {size} in all"
                    )


def write(table: pa.Table, path: File, *, replace: bool = True) -> None:
    """Write `table` to `path`, whole or not at all, with checksums that `read` verifies; for
    `replace`, see `write_whole`.

    Raises:
        StorageError: the file system, or the object store, refused.
    """
    fill = partial(pq.write_table, table, compression="zstd", write_page_checksum=True)
    if isinstance(path, RemoteFile):
        fill(content := io.BytesIO())
        path.write_bytes(content.getvalue(), new=not replace)
        return
    write_whole(path, fill, replace=replace)


def write_rows(rows: Sequence[Mapping[str, Any]], operation: Operation, path: File) -> None:
    """Write rows of `Measurement.to_row` to `path`; raises as `write`."""
    write(pa.Table.from_pylist(list(rows), schema(operation)), path)


#: The column with a row's number among all files; see `CheckedRows`.
ROW = "row"
#: Columns of the versions, other than the kernels', that times depend on.
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
    """Rows whose values are each possible; a combination of sizes may still describe no problem.

    Attributes:
        table: the columns that identify a problem, those of ``_TEXTS`` and ``_TIMES``,
            ``registers``, or all; and ``row``: how many rows of `files` come before it.
        files: the files that the rows are from, in order.
        ends: number of rows up to the end of each file.
    """

    table: pa.Table
    files: tuple[Path, ...]
    ends: tuple[int, ...]

    def error(self, row: int, error: InvalidInput) -> DataError:
        """Return `error` with the file and row of the number `row` in the column ``row``."""
        file = int(np.searchsorted(self.ends, row, side="right"))
        return _error(self.files[file], row - (self.ends[file - 1] if file else 0), error)


def read_checked(
    files: Sequence[Path], operation: Operation, *, whole: bool = False
) -> CheckedRows:
    """Return the rows of `files`, in their order; with `whole`, all columns.

    Raises:
        DataError: a file cannot be read or lacks a column, or a value is not allowed; the error
            names file, row (counted from 0), column, value and what is allowed.
    """
    columns = [*problem_columns(operation), *_TEXTS, _REGISTERS]
    tables = [read(file, operation, None if whole else [*columns, *_TIMES]) for file in files]
    for file, table in zip(files, tables, strict=True):
        _check(file, table, columns, operation)
    table = pa.concat_tables(tables).combine_chunks()
    table = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
    ends = np.cumsum([part.num_rows for part in tables])
    return CheckedRows(table, tuple(files), tuple(ends.tolist()))


def _check(file: Path, table: pa.Table, columns: Sequence[str], operation: Operation) -> None:
    """Raise an error for the first wrong value of the first broken rule."""
    for name, wrong, allowed, names in _rules(table, columns, operation):
        row = pc.index(wrong, True).as_py()
        if row >= 0:
            value = table[name][row].as_py()
            for near in difflib.get_close_matches(value, names, 1, cutoff=0.0) if names else ():
                allowed += f"; the nearest is {near!r}"
            raise _error(file, row, InvalidInput(name, value, allowed))


def _rules(
    table: pa.Table, columns: Sequence[str], operation: Operation
) -> Iterator[tuple[str, pa.ChunkedArray, str, Sequence[str]]]:
    """Yield for each rule a column, the mask of wrong values, the allowed values in words, and
    their names if the nearest is to be suggested."""
    for name in columns:
        if table[name].null_count:
            yield name, table[name].is_null(), "a value in every row", ()
    yield "status", _not_in(table["status"], STATUSES), " or ".join(STATUSES), ()
    time = table["time_ms"].fill_null(np.nan)
    positive = pc.and_(pc.is_finite(time), pc.greater(time, 0))
    wrong = pc.and_not(pc.equal(table["status"], "ok"), positive)
    yield "time_ms", wrong, "a number above 0 where status is ok", ()
    registers = table[_REGISTERS]
    outside = pc.or_(pc.less(registers, 0), pc.greater_equal(registers, _MOST_REGISTERS))
    yield _REGISTERS, outside, f"a number from 0 to {_MOST_REGISTERS - 1}", ()
    families = [name for name, family in all_families().items() if family.operation is operation]
    providers = [PYTORCH, *families]
    yield "family", _not_in(table["family"], providers), " or ".join(providers), providers
    for family in pc.unique(table["family"]).to_pylist():
        words = list(config_ids(family))
        wrong = pc.and_(pc.equal(table["family"], family), _not_in(table["config"], words))
        yield "config", wrong, f"a config of this version's {family}", words


def _not_in(column: pa.ChunkedArray, values: Sequence[str]) -> pa.ChunkedArray:
    return pc.invert(pc.is_in(column, value_set=pa.array(values)))


def _error(file: Path, row: int, error: InvalidInput) -> DataError:
    return DataError(f"{file}: row {row}: {error}")


_SHARDS = "rows-*.parquet"
#: Files that `add_part` writes; they are read as the sampler's shards are.
_PARTS = "part-*.parquet"
#: Files of configs that every run measures again (`confpred.sampler.tasks`).
ANCHORS = "anchors-*.parquet"
#: The columns that distinguish rows of a problem, beside the problem's own.
_ROW = ("device", "run_id", "family", "config", "cudnn_mode", "time")
#: Columns that, with those of its problem, identify a measurement under any run id.
_CONTENT = ("device", "family", "config", "source_digest", "cudnn_mode", "status", "time_ms")
#: Column in the parts that a service has admitted: digest of a row's content.
CONTENT = "content"
_MOST_PARTS = 99  # of one day
_READERS = 16  # files of an object store that are read at a time


def shards_in(folder: Folder, *, anchors: bool = False) -> list[File]:
    """Return the shards and parts of a folder, or the shards of its `anchors`, sorted by name.

    Raises:
        InvalidInput: `folder` is no folder.
        StorageError: the object store cannot be read.
    """
    if not folder.is_dir():
        raise InvalidInput("folder", str(folder), "a folder of measurements")
    patterns = (ANCHORS,) if anchors else (_SHARDS, _PARTS)
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def is_shard_of(file: Path, folder: Folder) -> bool:
    """Return whether a file of this name would be one of the shards or parts of `folder`."""
    if not isinstance(folder, Path):
        return False
    same = file.parent.exists() and folder.exists() and file.parent.samefile(folder)
    return same and any(file.match(pattern) for pattern in (_SHARDS, _PARTS, ANCHORS))


def read_shards(
    folder: Folder, operation: Operation, columns: Sequence[str], *, anchors: bool = False,
    unnamed: bool = False,
) -> pa.Table:  # fmt: skip
    """Return the rows of all shards and parts of a folder, or of its `anchors`; for `unnamed`, see
    `read`.

    Raises:
        InvalidInput: `folder` is no folder.
        DataError: a shard is damaged or foreign.
    """
    full = schema(operation)
    wanted = pa.schema([full.field(name) for name in columns], full.metadata)
    shards = shards_in(folder, anchors=anchors)
    one = partial(read, operation=operation, columns=columns, unnamed=unnamed)
    # A request to an object store takes long.
    with ThreadPoolExecutor(1 if isinstance(folder, Path) else _READERS) as readers:
        futures = [submit(readers, one, shard) for shard in shards]
        return pa.concat_tables([wanted.empty_table(), *(future.result() for future in futures)])


def merge(
    folders: Sequence[Folder], file: Path, *, replace: bool = True, anchors: bool = False,
    operation: Operation | None = None,
) -> int:  # fmt: skip
    """Write the rows of all shards and parts of `folders` to one `file`, and return how many.

    Args:
        folders: folders of a sampler's shards, or of a dataset's parts.
        file: sorted by device, problem, family, config and time. No row is left out.
        replace: whether `file` may exist; otherwise that is a `StorageError`.
        anchors: write the shards of control configs, and no others. Each session and GPU measures
            these, so that their times can be compared; no model learns from them.
        operation: operation of shards that name none; None refuses such shards.

    Raises:
        InvalidInput: `folders` is empty.
        DataError: a shard is damaged, of another operation, or of none; or a folder has no shards.
        StorageError: the file system refused; `file` is then as it was.
    """
    table, _ = _joined(folders, operation, anchors)
    write(table, file, replace=replace)
    return int(table.num_rows)


def add_part(
    folders: Sequence[Folder], folder: Path, *, anchors: bool = False,
    operation: Operation | None = None,
) -> tuple[Path, int] | None:  # fmt: skip
    """Write the rows of `folders` that no part of `folder` has yet to a new part, sorted by
    problem.

    Args:
        folders: folders of shards, or of parts.
        folder: folder of parts; made if missing. The new part bears the day (UTC), as in
            ``part-2026-11-24.parquet``, ``part-2026-11-24_02.parquet``: the last one by name.
        anchors: merge the shards of anchors, and no others.
        operation: operation of shards that name none; None refuses such shards.

    Returns:
        The new part and how many rows it has; None if the parts have all rows already.

    Raises:
        InvalidInput: `folder` has shards of a sampler, or there are too many parts of this day.
        DataError: a shard or a part is damaged or of another operation, or a folder has no shards.
        StorageError: the file system refused; all parts are as they were.
    """
    if any(path for pattern in (_SHARDS, ANCHORS) for path in folder.glob(pattern)):
        raise InvalidInput("file", str(folder), "a folder without a sampler's shards")
    table, kind = _joined(folders, operation, anchors)
    keys = [*problem_columns(kind), *_ROW]
    parts = (read(part, kind, keys) for part in sorted(folder.glob("*.parquet")))
    number = rows_beyond(table, parts, keys)
    if not len(number):
        return None
    path = _new_part(folder)
    write(table.take(number), path, replace=False)
    return path, len(number)


def rows_beyond(
    table: pa.Table, others: Iterable[pa.Table], keys: Sequence[str]
) -> NDArray[np.intp]:
    """Return the numbers of the rows of `table` whose `keys` are in no row of `others`."""
    number = np.arange(table.num_rows)
    for other in others:
        left = table.select(keys).take(number).append_column("number", pa.array(number))
        # One thread, as in `confpred.data.parquet.read`.
        left = left.join(other.select(keys), keys, join_type="left anti", use_threads=False)
        number = np.sort(left["number"].to_numpy())
    return number


def content_of(table: pa.Table, operation: Operation) -> NDArray[np.int64]:
    """Return a digest of each row's problem, config and time: rows with one digest are the same
    measurement, under any run id and time of day."""
    columns = [pc.cast(table[n], pa.string()) for n in (*problem_columns(operation), *_CONTENT)]
    words = pc.binary_join_element_wise(*columns, "|", null_handling="replace")
    digests = b"".join(blake2b(row.encode(), digest_size=8).digest() for row in words.to_pylist())
    return np.frombuffer(digests, np.int64)


def new_rows(table: pa.Table, parts: Sequence[Path], operation: Operation) -> pa.Table:
    """Return the rows of `table` whose content no part has, without duplicates, with a column of
    their content."""
    content, first = np.unique(content_of(table, operation), return_index=True)
    for part in parts:
        with pq.ParquetFile(part) as file:
            if CONTENT in file.schema_arrow.names:
                stored = file.read(columns=[CONTENT], use_threads=False)[CONTENT].to_numpy()
                new = ~np.isin(content, stored)
                content, first = content[new], first[new]
    order = np.argsort(first)
    return table.take(first[order]).append_column(CONTENT, pa.array(content[order]))


def _new_part(folder: Path) -> Path:
    """Return the first file name of today that no part of `folder` has."""
    day = datetime.now(timezone.utc).date().isoformat()
    # In the order of names, "_02.parquet" comes after ".parquet".
    for ending in ("", *(f"_{number:02}" for number in range(2, _MOST_PARTS + 1))):
        path = folder / f"part-{day}{ending}.parquet"
        if not path.exists():
            return path
    raise InvalidInput("file", str(folder), f"a folder with under {_MOST_PARTS} parts of {day}")


def _joined(
    folders: Sequence[Folder], operation: Operation | None, anchors: bool
) -> tuple[pa.Table, Operation]:
    """Return the rows of all shards of `folders`, sorted by problem, and their operation: by
    default that of the first shard. Reading refuses shards of another one."""
    shards = (shard for folder in folders for shard in shards_in(folder, anchors=anchors))
    kind = operation or next(map(operation_of_file, shards), CONVOLUTION)
    tables, how = [], {"anchors": anchors, "unnamed": operation is not None}
    for folder in folders:
        table = read_shards(folder, kind, schema(kind).names, **how)
        if not table.num_rows:
            raise DataError(f"{folder} holds no measurements ({ANCHORS if anchors else _SHARDS})")
        tables.append(table)
    table = pa.concat_tables(tables).combine_chunks()  # which sorts several times as fast
    order = ["device", *problem_columns(kind), "family", "config", "time"]
    return table.take(pc.sort_indices(table, [(name, "ascending") for name in order])), kind
