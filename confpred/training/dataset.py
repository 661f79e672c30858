"""Measurements from Parquet files, ready to train on and to judge by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import operation_in, problem_columns, read
from confpred.errors import DataError, InvalidProblem
from confpred.families.candidate import PYTORCH
from confpred.families.protocol import Rows
from confpred.families.registry import all_families, all_operations, config_ids
from confpred.measure.outcome import STATUSES
from confpred.problem.device import Device, get_device
from confpred.problem.operation import Operation
from confpred.problem.record import Record

_TEXTS = ("networks", "family", "config", "source_digest", "device", "status")
_TIMES = ("time_ms", "spread_ms")


@dataclass(frozen=True, slots=True, eq=False)
class Timings:
    """What was measured of one problem with one kernel family.

    Attributes:
        problem: what was computed.
        networks: the networks that have it, sorted; empty for a coverage problem.
        family: name of the kernel family.
        rows: rows of its config table, ascending; never empty.
        time_ms: median time of each row, milliseconds.
        spread_ms: interquartile range of that time, milliseconds.
    """

    problem: Record
    networks: tuple[str, ...]
    family: str
    rows: Rows
    time_ms: NDArray[np.float64]
    spread_ms: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """All that was measured on one device.

    Attributes:
        device: the device that was measured.
        operation: the operation that was measured.
        timings: one a problem and family, in a fixed order.
        pytorch_ms: median time of PyTorch's own operator, milliseconds, where it was measured.
        statuses: rows read, by status; only the ``ok`` ones are in `timings`.
        skipped: ``ok`` rows left out because this version has no such family or config, or does
            not allow it for the problem.
        kernels: digests of each family's CUDA source.
    """

    device: Device
    operation: Operation
    timings: tuple[Timings, ...]
    pytorch_ms: Mapping[Record, float]
    statuses: Mapping[str, int]
    skipped: int
    kernels: Mapping[str, tuple[str, ...]]

    @property
    def rows(self) -> int:
        """Distinct (problem, config) pairs."""
        return sum(len(t.rows) for t in self.timings)

    @property
    def digest(self) -> str:
        """Identity of the timings, however they are spread over files: 16 hex digits."""
        state = hashlib.sha256(self.device.key.encode())
        for t in self.timings:
            state.update(f"\n{t.problem};{t.family};{','.join(t.networks)};".encode())
            state.update(t.rows.tobytes() + t.time_ms.tobytes())
            state.update(repr(self.pytorch_ms.get(t.problem)).encode())
        return state.hexdigest()[:16]


def read_dataset(paths: Sequence[Path], device: str | None = None) -> Dataset:
    """Read Parquet files, and folders of them, as the sampler writes them.

    Rows of the same problem and config are combined by their median.

    Args:
        paths: files or folders.
        device: keep the rows of this device only; may be None where the data is of one device.

    Raises:
        DataError: a file cannot be read, is not Parquet, lacks a column or holds an impossible
            value; or nothing is left to train on.
        UnknownDevice: the data's device, or the one asked for, has no description.
    """
    files = _files(paths)
    operation = _operation(files[0])
    table = pd.concat([_read_file(file, operation) for file in files], ignore_index=True)
    found = sorted(table["device"].unique())
    if device is not None:
        wanted = get_device(device).key
        table = table[table["device"] == wanted]
        if table.empty:
            raise DataError(f"no measurements of {wanted}; the data is of {' and '.join(found)}")
    elif len(found) > 1:
        raise DataError(f"the data is of {' and '.join(found)}: choose one device")
    where = get_device(str(table["device"].iloc[0]))
    timed = table[table["status"] == "ok"]
    timings, pytorch_ms, skipped = _timings(timed, where, operation)
    if not timings:
        raise DataError(
            f"nothing to learn from: {len(table)} rows, {len(timed)} timed, {skipped} of configs "
            "that this version does not have"
        )
    kernels = timed[timed["family"] != PYTORCH].groupby("family")["source_digest"].unique()
    return Dataset(
        device=where,
        operation=operation,
        timings=timings,
        pytorch_ms=pytorch_ms,
        statuses={s: int(n) for s in STATUSES if (n := (table["status"] == s).sum())},
        skipped=skipped,
        kernels={family: tuple(sorted(digests)) for family, digests in kernels.items()},
    )


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path} holds no .parquet files")
        files += inside
    return files


def _operation(path: Path) -> Operation:
    name = operation_in(path)
    if name not in all_operations():
        raise DataError(f"{path} is of operation {name!r}, which no family computes")
    return all_operations()[name]


def _read_file(path: Path, operation: Operation) -> pd.DataFrame:
    fields = [*problem_columns(operation), *_TEXTS]
    frame: pd.DataFrame = read(path, operation, [*fields, *_TIMES]).to_pandas()
    _refuse(path, frame[fields].isna().any(axis=1), "an empty field")
    _refuse(path, ~frame["status"].isin(STATUSES), f"a status other than {', '.join(STATUSES)}")
    good = np.isfinite(frame["time_ms"]) & (frame["time_ms"] > 0)
    _refuse(path, (frame["status"] == "ok") & ~good, "status ok, and a time that is not positive")
    return frame


def _refuse(path: Path, bad: pd.Series[bool], what: str) -> None:
    if bad.any():
        raise DataError(f"{path}: row {int(bad.to_numpy().argmax())} has {what}")


def _timings(
    timed: pd.DataFrame, device: Device, operation: Operation
) -> tuple[tuple[Timings, ...], dict[Record, float], int]:
    """The timings, PyTorch's times, and how many rows were left out."""
    timings: list[Timings] = []
    pytorch_ms: dict[Record, float] = {}
    used = 0
    for _, rows in timed.groupby(problem_columns(operation), sort=False):
        problem = _problem(rows.iloc[0].to_dict(), operation)
        networks = {name for names in rows["networks"] for name in names.split(",") if name}
        for name, of_family in rows.groupby("family", sort=False):
            if name == PYTORCH:
                pytorch_ms[problem] = float(of_family["time_ms"].median())
                used += len(of_family)
            elif name in all_families():
                legal = all_families()[name].legal(problem, device)
                ids = of_family["config"].map(config_ids(name)).fillna(-1).astype(int)
                known = (ids >= 0) & legal[ids]
                used += int(known.sum())
                medians = of_family[known].groupby(ids[known])[list(_TIMES)].median().sort_index()
                if len(medians):
                    timings.append(
                        Timings(
                            problem,
                            tuple(sorted(networks)),
                            str(name),
                            medians.index.to_numpy(np.intp),
                            *(medians[column].to_numpy(np.float64) for column in _TIMES),
                        )
                    )
    timings.sort(key=lambda t: (str(t.problem), t.family))
    return tuple(timings), pytorch_ms, len(timed) - used


def _problem(row: Mapping[str, Any], operation: Operation) -> Record:
    try:
        return problem_of_row(row, operation.problem)
    except (InvalidProblem, ValueError) as error:
        raise DataError(f"a measured problem is impossible: {error}") from error
