"""Measurements from Parquet files, ready to train on and to judge by."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import (
    ANCHORS,
    MEASURED_WITH,
    ROW,
    CheckedRows,
    operation_of_file,
    problem_columns,
    read,
    read_checked,
)
from confpred.errors import DataError, InvalidProblem
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate, Rows
from confpred.families.registry import all_families, config_ids
from confpred.families.table import legal_among
from confpred.measure.timing import STATUSES
from confpred.problem.device import KNOWN, Device, get_device
from confpred.problem.operation import Operation
from confpred.problem.record import Record


@dataclass(frozen=True, slots=True, eq=False)
class Timings:
    """Measurements of one problem with one kernel family."""

    problem: Record
    networks: tuple[str, ...]  # networks that have it, sorted; empty for a coverage problem
    family: str
    rows: Rows  # rows of its config table, ascending; never empty
    time_ms: NDArray[np.float64]  # median time of each row
    spread_ms: NDArray[np.float64]  # interquartile range of that time
    device: Device
    #: Registers of a thread of each row's kernel; 0 or None if they were not recorded.
    registers: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """All measurements of one device, and those of other devices that training uses too."""

    device: Device
    operation: Operation
    timings: tuple[Timings, ...]  # one a problem and family, in a fixed order
    pytorch_ms: Mapping[Record, float]  # median time of PyTorch's operator, if it was measured
    statuses: Mapping[str, int]  # rows read, by status; only the ``ok`` ones are in `timings`
    skipped: int  # ``ok`` rows of configs that this version does not allow for the problem
    kernels: Mapping[str, tuple[str, ...]]  # digests of each family's CUDA source
    #: Versions of ``driver`` and, for PyTorch's operator, of ``cudnn`` of the timed rows, which the
    #: times depend on.
    measured_with: Mapping[str, tuple[str, ...]]
    #: Measurements of the same operation on other devices, on which much the same makes one config
    #: slower than another.
    others: tuple[Dataset, ...] = ()

    @property
    def everywhere(self) -> tuple[Timings, ...]:
        """The timings of all devices, those of this one first."""
        return self.timings + tuple(t for other in self.others for t in other.timings)

    @property
    def pytorch_everywhere(self) -> dict[tuple[Device, Record], float]:
        """`pytorch_ms` of all devices."""
        return {(d.device, p): ms for d in (self, *self.others) for p, ms in d.pytorch_ms.items()}

    @property
    def rows(self) -> int:
        """Distinct (problem, config) pairs."""
        return sum(len(t.rows) for t in self.timings)

    def restricted(self, problems: Collection[Record]) -> Dataset:
        """Return the measurements of `problems`, on all devices."""
        return replace(
            self,
            timings=tuple(t for t in self.timings if t.problem in problems),
            pytorch_ms={p: ms for p, ms in self.pytorch_ms.items() if p in problems},
            others=tuple(other.restricted(problems) for other in self.others),
        )

    def of_families(self, families: Collection[str]) -> Dataset:
        """Return the measurements of `families`, on all devices, and PyTorch's times for their
        problems."""
        timings = tuple(t for t in self.timings if t.family in families)
        problems = {t.problem for t in timings}
        return replace(
            self,
            timings=timings,
            pytorch_ms={p: ms for p, ms in self.pytorch_ms.items() if p in problems},
            kernels={name: digests for name, digests in self.kernels.items() if name in families},
            others=tuple(other.of_families(families) for other in self.others),
        )

    @property
    def digest(self) -> str:
        """Identity of all timings, 16 hex digits; it does not depend on how they are spread over
        files."""
        state = hashlib.sha256(self.device.key.encode())
        for t in self.timings:
            state.update(f"\n{t.problem};{t.family};{','.join(t.networks)};".encode())
            state.update(t.rows.tobytes() + t.time_ms.tobytes())
            state.update(repr(self.pytorch_ms.get(t.problem)).encode())
            state.update(b"" if t.registers is None else t.registers.tobytes())
        for other in self.others:
            state.update(other.digest.encode())
        return state.hexdigest()[:16]


def read_dataset(paths: Sequence[Path], device: str | None = None) -> Dataset:
    """Read Parquet files, and folders of them, as the sampler writes them.

    Rows of the same problem and config are combined by their median. `device` is the one to train
    for; it may be None if the data is of one. Measurements of other devices are kept apart, or left
    out if the device has no description.

    Raises:
        DataError: a file cannot be read, is not Parquet, lacks a column or holds an impossible
            value; or nothing is left to train on.
        UnknownDevice: `device`, or that of the data, has no description.
    """
    files = data_files(paths)
    operation = operation_of_file(files[0])
    read = read_checked(files, operation)
    devices = sorted(pc.unique(read.table["device"]).to_pylist())
    if device is not None:
        wanted = get_device(device).key
        if wanted not in devices:
            raise DataError(f"no measurements of {wanted}; the data is of {' and '.join(devices)}")
    elif len(devices) > 1:
        raise DataError(f"the data is of {' and '.join(devices)}: choose one device")
    else:
        wanted = devices[0] if devices else ""
    further = (name for name in devices if name in KNOWN and name != wanted)
    others = [measured_on(name, read, operation) for name in further]
    dataset = replace(
        measured_on(wanted, read, operation), others=tuple(d for d in others if d.timings)
    )
    if not dataset.timings:
        raise DataError(
            f"nothing to learn from: {sum(dataset.statuses.values())} rows, "
            f"{dataset.statuses.get('ok', 0)} timed, {dataset.skipped} of configs that this "
            "version does not allow for their layers"
        )
    return dataset


def measured_on(name: str, read: CheckedRows, operation: Operation) -> Dataset:
    """Return the measurements on the device called `name`."""
    where = get_device(name)
    table = read.table.filter(pc.field("device") == name)
    # Times of PyTorch's operator are those of cuDNN's benchmark mode; a hold-out has both modes.
    timed = table.filter((pc.field("status") == "ok") & (pc.field("cudnn_mode") != "heuristics"))
    timings, pytorch_ms, skipped = _timings(timed, read, where, operation)
    counts = {e["values"]: e["counts"] for e in pc.value_counts(table["status"]).to_pylist()}
    ours = timed.filter(pc.field("family") != PYTORCH).group_by("family")
    kernels = ours.aggregate([("source_digest", "distinct")]).sort_by("family").to_pylist()
    return Dataset(
        device=where,
        operation=operation,
        timings=timings,
        pytorch_ms=pytorch_ms,
        statuses={status: counts[status] for status in STATUSES if status in counts},
        skipped=skipped,
        kernels={row["family"]: tuple(sorted(row["source_digest_distinct"])) for row in kernels},
        measured_with={
            name: tuple(sorted(filter(None, pc.unique(timed[name]).to_pylist())))
            for name in MEASURED_WITH
        },
    )


def capped(
    table: pa.Table, operation: Operation, columns: Sequence[str], most: Mapping[str, float]
) -> NDArray[np.intp]:
    """Return the numbers of rows so that each group by `columns`, of which a family is the first,
    has at most `most` of its family: whole problems, in an order that nobody can choose."""
    words = pc.binary_join_element_wise(
        *(pc.cast(table[name], pa.string()) for name in problem_columns(operation)), "|"
    ).to_pylist()
    groups = [*zip(*(table[name].to_pylist() for name in columns), strict=True)]
    order = sorted(range(len(words)), key=lambda row: (zlib.crc32(words[row].encode()), row))
    taken: Counter[tuple[str, ...]] = Counter()
    kept = []
    for row in order:
        taken[groups[row]] += 1
        if taken[groups[row]] <= most[groups[row][0]]:
            kept.append(row)
    return np.sort(np.array(kept, np.intp))


def by_problem(timings: Iterable[Timings]) -> dict[Record, list[Timings]]:
    """Return the timings of each problem, in the order of their first ones."""
    grouped: dict[Record, list[Timings]] = defaultdict(list)
    for t in timings:
        grouped[t.problem].append(t)
    return grouped


def times_of(timings: Iterable[Timings], pytorch_ms: float | None) -> dict[Candidate, float]:
    """Return milliseconds of all candidates of one problem; `pytorch_ms` is the time of PyTorch's
    operator, where it was measured."""
    times = {
        Candidate(t.family, int(row)): float(ms)
        for t in timings
        for row, ms in zip(t.rows, t.time_ms, strict=True)
    }
    return times if pytorch_ms is None else times | {PYTORCH_OPERATOR: pytorch_ms}


def data_files(paths: Sequence[Path], *, anchors: bool = False) -> list[Path]:
    """Return the files that `read_dataset` reads. A folder stands for all of its files, except the
    sampler's control configs unless `anchors`.

    Raises:
        DataError: a folder holds no such file.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if path.is_dir() and not anchors:
            inside = [file for file in inside if not file.match(ANCHORS)]
        if not inside:
            raise DataError(f"{path} holds no .parquet files")
        files += inside
    return files


def _timings(
    timed: pa.Table, read: CheckedRows, device: Device, operation: Operation
) -> tuple[tuple[Timings, ...], dict[Record, float], int]:
    """Return the timings, PyTorch's times, and how many rows were left out."""
    problems, networks, of_problem = _problems(timed, read, operation)
    provider = timed["family"].combine_chunks().dictionary_encode()
    names, of_name = provider.dictionary.to_pylist(), provider.indices.to_numpy()
    number = _config_numbers(timed["config"], names, of_name)
    time_ms, spread_ms = (timed[column].to_numpy() for column in ("time_ms", "spread_ms"))
    registers = timed["registers"].to_numpy().astype(np.int64)

    # Sorted, the rows of a provider and problem lie together, and in them those of a config.
    order = np.lexsort((number, of_problem, of_name))
    new = np.diff(of_problem[order]).astype(bool) | np.diff(of_name[order]).astype(bool)
    parts = np.split(order, np.flatnonzero(new) + 1) if len(order) else []
    timings: list[Timings] = []
    pytorch_ms: dict[Record, float] = {}
    used = 0
    for index, group in groupby(parts, lambda rows: of_name[rows[0]]):
        name, groups = names[index], list(group)
        asked = [problems[of_problem[rows[0]]] for rows in groups]
        if name == PYTORCH:
            pytorch_ms = {
                p: float(np.median(time_ms[rows])) for p, rows in zip(asked, groups, strict=True)
            }
            used += sum(map(len, groups))
            continue
        ids_of = [number[rows] for rows in groups]
        legal = legal_among(all_families()[name], asked, ids_of, device)
        for problem, rows, kept in zip(asked, groups, legal, strict=True):
            own, rows = networks[of_problem[rows[0]]], rows[kept]
            used += len(rows)
            if len(rows):
                ids, starts = np.unique(number[rows], return_index=True)
                median, spread = (_medians(c[rows], starts) for c in (time_ms, spread_ms))
                compiled = np.maximum.reduceat(registers[rows], starts)
                timings.append(Timings(problem, own, name, ids, median, spread, device, compiled))
    timings.sort(key=lambda t: (str(t.problem), t.family))
    return tuple(timings), pytorch_ms, timed.num_rows - used


def _problems(
    timed: pa.Table, read: CheckedRows, operation: Operation
) -> tuple[list[Record], list[tuple[str, ...]], NDArray[np.intp]]:
    """Return the distinct problems in the order of their first rows, the networks of each, and the
    position of each row's problem among them."""
    columns = problem_columns(operation)
    position = pa.array(np.arange(timed.num_rows))
    groups = (
        timed.append_column("position", position)
        .group_by(columns, use_threads=False)
        .aggregate([("position", "list"), ("networks", "distinct"), (ROW, "min")])
        .sort_by(f"{ROW}_min")
        .combine_chunks()
    )
    problems: list[Record] = []
    for fields in groups.select([*columns, f"{ROW}_min"]).to_pylist():
        try:
            problems.append(problem_of_row(fields, operation.problem))
        except InvalidProblem as error:
            raise read.error(fields[f"{ROW}_min"], error) from None
    networks = [
        tuple(sorted({name for names in texts for name in names.split(",") if name}))
        for texts in groups["networks_distinct"].to_pylist()
    ]
    of_problem = np.empty(timed.num_rows, np.intp)
    members = groups["position_list"]
    lengths = pc.list_value_length(members).to_numpy()
    of_problem[pc.list_flatten(members).to_numpy()] = np.repeat(np.arange(len(lengths)), lengths)
    return problems, networks, of_problem


def _config_numbers(
    configs: pa.ChunkedArray, names: Sequence[str], of_name: NDArray[np.int32]
) -> NDArray[np.intp]:
    """Return the number of each row's config in its provider's table."""
    encoded = configs.combine_chunks().dictionary_encode()
    words, of_words = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    number = np.empty(len(of_words), np.intp)
    for index, name in enumerate(names):
        ids = config_ids(name)
        of_all = np.array([ids.get(text, -1) for text in words], np.intp)
        mine = of_name == index
        number[mine] = of_all[of_words[mine]]
    return number


def _medians(values: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the median of each run of `values` from one of `starts` to the next; missing numbers
    do not count."""
    if len(starts) == len(values):
        return values
    runs = (run[~np.isnan(run)] for run in np.split(values, starts[1:]))
    return np.array([np.median(run) if len(run) else np.nan for run in runs])


@dataclass(frozen=True, slots=True)
class RunNoise:
    """The noise of times across runs."""

    runs: int  # runs that timed a config which another run timed too
    repeated: int  # configs that several runs timed
    #: Standard deviation of the logarithm of a config's time over the runs, pooled over the
    #: configs; 0.01 is about one percent.
    deviation: float
    largest: float  # largest deviation of one run's logarithm from the mean of all runs


def noise_across_runs(files: Sequence[Path], operation: Operation, device: str) -> RunNoise:
    """Return the noise across the runs in `files` on the device with this key.

    The median counts if a run timed a config several times.

    Raises:
        DataError: a file cannot be read, or no config was timed in two runs.
    """
    keys = [*problem_columns(operation), "family", "config", "source_digest", "cudnn_mode"]
    wanted = [*keys, "run_id", "device", "status", "time_ms"]
    table = pa.concat_tables(read(file, operation, wanted) for file in files)
    table = table.filter((pc.field("device") == device) & (pc.field("status") == "ok"))
    times: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table.to_pylist():
        times[tuple(row[key] for key in keys)][row["run_id"]].append(row["time_ms"])
    repeated = [runs for runs in times.values() if len(runs) > 1]
    if not repeated:
        raise DataError(f"no config of {device} was timed in two runs: their noise is unknown")
    logs = [np.log([np.median(ms) for ms in runs.values()]) for runs in repeated]
    off = np.concatenate([log - log.mean() for log in logs])
    return RunNoise(
        runs=len({run for runs in repeated for run in runs}),
        repeated=len(repeated),
        deviation=float(np.sqrt((off**2).sum() / (len(off) - len(logs)))),
        largest=float(np.abs(off).max()),
    )
