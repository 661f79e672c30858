"""Measurements of others: which files are taken, and which of their rows a model learns from.

Whoever sends times may be wrong or lie. A file is refused as a whole where one of its rows cannot
be, where its times as a whole are not those of its device, or where control configs (anchors) take
other times than elsewhere. A few wrong times among many are found later: they are far from what the
model in use expects, and from their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from confpred.cuda.epilogue import FILE as EPILOGUE
from confpred.data.measurements import problem_of_row
from confpred.data.parquet import (
    ROW,
    operation_in,
    problem_columns,
    read,
    read_checked,
    rows_beyond,
)
from confpred.errors import DataError
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH, Rows
from confpred.families.registry import all_families, config_ids
from confpred.model.folder import Model
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.training.dataset import Dataset, measured_on, operation_of_file

#: A file may have so many rows, and so many bytes when it is unpacked.
MOST_ROWS, MOST_BYTES = 400_000, 2**28
#: No time is below this share of what device memory takes for the problem, nor of its arithmetic on
#: tensor cores, which the transforms of some algorithms cut to less than half.
LEAST_MEMORY, LEAST_ARITHMETIC = 0.9, 0.4
#: The median of a file's spreads, over the time; committed measurements have 0.005.
MOST_SPREAD = 0.2
#: Control configs take the time that they take elsewhere, within this share: three times what they
#: differ by between committed runs.
CONTROL = 0.06
#: A file's times, over what the model in use expects: their median is within this factor, and no
#: more than the share is far off. On networks that a model has never seen, medians of a family are
#: within 2 % and no config is so far below.
FACTOR, MOST_OFF = 1.3, 0.02
#: Logarithms of time over expected time beyond which one config is far off its neighbours, and a
#: problem's configs together.
FAST, SLOW, PROBLEM, PYTORCHS = -0.4, 0.9, 0.35, -0.6
#: The same below which a time is not believed to be the best of its problem: one in ten of those of
#: networks that a model has never seen is.
BEST, BEST_PYTORCHS = -0.12, -0.3
#: Fewer times say nothing of a file as a whole, and so many of a file's problems are looked at.
_LEAST, _LOOKED_AT = 20, 150


class Distrusted(DataError):
    """The control configs of some runs take other times than elsewhere; `run_ids` are the runs."""

    def __init__(self, message: str, run_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.run_ids = run_ids


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The rows of a file that passed, those of control configs apart, and the runs in it."""

    rows: pa.Table
    controls: pa.Table
    run_ids: tuple[str, ...]


def check_shard(path: Path, models: Mapping[str, Model], controls: Sequence[Path]) -> Shard:
    """Return the rows of a file if all of it is plausible.

    Args:
        path: the file.
        models: those in use, by device.
        controls: files of times that control configs took elsewhere.

    Raises:
        ConfpredError: the reason for which it is refused.
    """
    operation = operation_of_file(path)
    metadata = pq.read_metadata(path)
    unpacked = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    if not 0 < metadata.num_rows <= MOST_ROWS or unpacked > MOST_BYTES:
        raise DataError(
            f"{metadata.num_rows} rows of {unpacked} bytes; allowed: 1 to {MOST_ROWS} rows of "
            f"{MOST_BYTES} bytes in all"
        )
    checked = read_checked([path], operation, whole=True)
    table = checked.table.drop_columns([ROW])
    keys = [*problem_columns(operation), "device", "family", "config", "source_digest"]
    times = table.filter(pc.field("status") == "ok").select([*keys, "time_ms", "run_id"])
    known = [read(file, operation) for file in controls if operation_in(file) == operation.name]
    reference = pa.concat_tables([table.schema.empty_table(), *known])
    _check_controls(times, reference.filter(pc.field("status") == "ok"), keys)
    for name in pc.unique(table["device"]).to_pylist():
        data = measured_on(name, checked, operation)
        if data.skipped:
            raise DataError(f"{data.skipped} rows are of configs that are not legal on {name}")
        _check_bounds(data)
        if (model := models.get(name)) is not None and model.operation is operation:
            _check_expected(data, model)
    _check_kernels(times, operation)
    others = rows_beyond(table, [reference], keys)
    return Shard(
        table.take(others),
        table.take(np.setdiff1d(np.arange(table.num_rows), others)),
        tuple(pc.unique(table["run_id"]).to_pylist()),
    )


def _check_controls(times: pa.Table, reference: pa.Table, keys: Sequence[str]) -> None:
    known = reference.group_by(keys).aggregate([("time_ms", "mean")])
    both = times.join(known, keys, join_type="inner", use_threads=False)
    off = np.abs(np.log(both["time_ms"].to_numpy() / both["time_ms_mean"].to_numpy()))
    if (off > np.log1p(CONTROL)).any():
        wrong = both.take(np.flatnonzero(off > np.log1p(CONTROL)))
        first = wrong.slice(0, 1).to_pylist()[0]
        here, usual = (f"{first[name]:.4g} ms" for name in ("time_ms", "time_ms_mean"))
        raise Distrusted(
            f"control config {first['config']} of {first['family']} takes {here} in run "
            f"{first['run_id']}, and {usual} elsewhere",
            pc.unique(wrong["run_id"]).to_pylist(),
        )


def _check_kernels(times: pa.Table, operation: Operation) -> None:
    """Refuse rows of kernels that this version does not have, by the first row of each."""
    numbered = times.append_column(ROW, pa.array(np.arange(times.num_rows)))
    firsts = numbered.group_by(["family", "source_digest"]).aggregate([(ROW, "min")])
    for number in firsts[f"{ROW}_min"].to_pylist():
        (row,) = times.slice(number, 1).to_pylist()
        family, digests = row["family"], {"", identity_of(EPILOGUE)}
        if family != PYTORCH:
            problem = problem_of_row(row, operation.problem)
            launch = all_families()[family].launch(problem, config_ids(family)[row["config"]])
            digests = {identity_of(launch.source)}
        if row["source_digest"] not in digests:
            raise DataError(
                f"rows of {family} are of kernel {row['source_digest']!r}, which this version does "
                f"not have; allowed: {' or '.join(sorted(digests))}"
            )


def _check_bounds(data: Dataset) -> None:
    """Refuse times that the device cannot reach, and times too noisy to learn from."""
    fastest = [(t.problem, float(t.time_ms.min())) for t in data.timings]
    for problem, ms in (*fastest, *data.pytorch_ms.items()):
        least_ms = 1e3 * max(
            LEAST_MEMORY * data.device.memory_s(problem),
            LEAST_ARITHMETIC * problem.flops / data.device.tensor_flops,
        )
        if ms < least_ms:
            raise DataError(
                f"{ms:.4g} ms for {problem}; allowed: at least {least_ms:.4g} ms, which "
                f"{data.device.key} takes for its memory and arithmetic"
            )
    spreads = [t.spread_ms / t.time_ms for t in data.timings]
    spread = float(np.nanmedian(np.concatenate(spreads))) if spreads else 0.0
    if not 0 <= spread <= MOST_SPREAD:
        raise DataError(
            f"times spread by {spread:.3g} of themselves; allowed: 0 to {MOST_SPREAD} in the median"
        )


def _check_expected(data: Dataset, model: Model) -> None:
    """Refuse a file whose times, as a whole, are not those that the model in use expects."""
    problems = [*dict.fromkeys(t.problem for t in data.timings)]
    order = np.random.default_rng(len(problems)).permutation(len(problems))
    some = data.restricted({problems[i] for i in order[:_LOOKED_AT]})
    found, of_pytorch = _over_expected(some, model)
    logs: dict[str, list[NDArray[np.float64]]] = {}
    for t, of_configs in zip(some.timings, found, strict=True):
        if of_configs is not None:
            logs.setdefault(t.family, []).append(of_configs)
    theirs = [np.array([log]) for log in of_pytorch.values()]
    for family, parts in {**logs, PYTORCH: theirs}.items():
        if sum(map(len, parts)) < _LEAST:
            continue
        median = float(np.median([np.median(part) for part in parts]))
        if abs(median) > np.log(FACTOR):
            raise DataError(
                f"times of {family} are {np.exp(median):.2f} of what model {model.version} "
                f"expects in the median; allowed: {1 / FACTOR:.2f} to {FACTOR}"
            )
    off = [each - np.median(each) < FAST for parts in logs.values() for each in parts]
    share = float(np.concatenate(off).mean()) if off else 0.0
    if share > MOST_OFF and sum(map(len, off)) >= _LEAST:
        raise DataError(
            f"{share:.1%} of the times are far below what model {model.version} expects beside "
            f"their neighbours; allowed: {MOST_OFF:.0%}"
        )


def _over_expected(
    data: Dataset, model: Model
) -> tuple[list[NDArray[np.float64] | None], dict[Record, float]]:
    """Return the logarithms of time over expected time: an array for each of the timings, None
    where the model has no such family; and those of PyTorch's operator, where it was measured
    beside confpred's kernels."""
    logs: list[NDArray[np.float64] | None] = []
    best_s: dict[Record, float] = {}
    for t in data.timings:
        learned = model.families.get(t.family)
        if learned is None or not learned.serves(t.problem):
            logs.append(None)
            continue
        rows, seconds = learned.rank(t.problem, t.device, t.rows, len(t.rows))
        expected = np.empty(len(rows))
        expected[np.searchsorted(t.rows, rows)] = seconds
        logs.append(np.log(t.time_ms * 1e-3 / expected))
        if t.problem in data.pytorch_ms:
            best_s[t.problem] = min(best_s.get(t.problem, np.inf), float(seconds[0]))
    if model.pytorch is None or not best_s:
        return logs, {}
    ratios = model.pytorch.log_ratios([*best_s], data.device).tolist()
    return logs, {
        problem: float(np.log(data.pytorch_ms[problem] * 1e-3 / seconds) - ratio)
        for (problem, seconds), ratio in zip(best_s.items(), ratios, strict=True)
    }


def unbelieved(data: Dataset, model: Model) -> dict[tuple[Record, str], Rows]:
    """Return, of each problem and provider, the configs whose times are so far below what `model`
    expects that they are not believed to be the best."""
    found = {}
    of_timings, of_pytorch = _over_expected(data, model)
    for t, logs in zip(data.timings, of_timings, strict=True):
        if logs is not None:
            found[t.problem, t.family] = t.rows[logs - np.median(logs) < BEST]
    for problem, log in of_pytorch.items():
        found[problem, PYTORCH] = np.flatnonzero([log < BEST_PYTORCHS])  # its only config is 0
    return found


def _far_off(logs: NDArray[np.float64]) -> NDArray[np.bool_]:
    beside = logs - np.median(logs)
    found: NDArray[np.bool_] = (beside < FAST) | (beside > SLOW)
    return found


def trusted(data: Dataset, model: Model) -> tuple[Dataset, int]:
    """Return what a model may learn from and be judged by, and how many times are left out: those
    far from what the model in use expects, and all of a problem that has PyTorch's operator or a
    family as a whole among them. Times of other devices, and of families that the model does not
    know, are all kept."""
    kept, left_out = [], 0
    of_timings, of_pytorch = _over_expected(data, model)
    # Without one of its providers a problem would have another best config.
    doubted = {problem for problem, log in of_pytorch.items() if log < PYTORCHS}
    for t, logs in zip(data.timings, of_timings, strict=True):
        if logs is None:
            kept.append(t)
            continue
        if abs(np.median(logs)) > PROBLEM:
            doubted.add(t.problem)
        keep = ~_far_off(logs)
        left_out += int((~keep).sum())
        kept.append(
            replace(
                t,
                rows=t.rows[keep],
                time_ms=t.time_ms[keep],
                spread_ms=t.spread_ms[keep],
                registers=None if t.registers is None else t.registers[keep],
            )
        )
    left_out += sum(len(t.rows) for t in kept if t.problem in doubted)
    timings = tuple(t for t in kept if t.problem not in doubted)
    pytorch_ms = {p: ms for p, ms in data.pytorch_ms.items() if p not in doubted}
    return replace(data, timings=timings, pytorch_ms=pytorch_ms), left_out
