"""Measurements of other hosts: which files are admitted, and which of their rows a model is trained
on.

The hosts are the operator's: they may be broken, but they are known, and what they sent can be
revoked. A file is refused as a whole if it cannot be of this version and its device, if its times
as a whole are not those of the device, or if its control configs (anchors) take other times than
the operator's. A hold-out decides whether the rows improve a model, not this module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from confpred.cuda.epilogue import FILE as EPILOGUE
from confpred.data import parquet
from confpred.data.measurements import problem_of_row
from confpred.data.parquet import ROW, operation_in, problem_columns, rows_beyond
from confpred.errors import DataError, InvalidInput, ModelError
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH
from confpred.families.registry import all_families, config_ids
from confpred.model.folder import Model
from confpred.model.rank import FamilyModel
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.operation import Operation
from confpred.training.dataset import Dataset, Timings, capped, measured_on

#: Most rows of a file, most bytes when it is unpacked, and most bytes of a text; committed
#: measurements have 563.
MOST_ROWS, MOST_BYTES, MOST_TEXT = 400_000, 2**28, 2_000
#: Largest share of rows with configs that are not legal in this version, which are left out; at
#: most 0.002 in a GPU's measurements.
MOST_ILLEGAL = 0.01
#: Least time, as a share of the time of device memory for the problem, and of its arithmetic on
#: tensor cores, which some algorithms' transforms cut to less than half.
LEAST_MEMORY, LEAST_ARITHMETIC = 0.9, 0.4
#: Largest median of a file's spreads over their times; committed measurements have 0.005.
MOST_SPREAD = 0.2
#: Largest deviation of a control config's time from that of other runs, as a share: three times the
#: deviation between committed runs.
CONTROL = 0.06
#: Limits of the median ratio of measured to expected time of the model's choices: FACTOR for many
#: problems, ``FACTOR * FEW ** n ** -0.5`` for n; and the least rank correlation of measured and
#: expected times of a problem's configs. Neither depends on how many configs were measured:
#: measurements of layers that no model was trained on have 0.95 to 1.02, and 0.84.
FACTOR, FEW, CORRELATION = 1.3, 1.6, 0.5
#: Logarithms of time over expected time, relative to the problem's other configs, beyond which a
#: time is far off. Among configs expected to take less than CLOSE times the best, this share of a
#: file's times may be far below, plus a few; committed measurements have 0.006.
FAST, SLOW = -0.4, 0.9
CLOSE, MOST_OFF, SOME = 1.5, 0.02, 3
#: Times and problems that a check needs, and most problems of a file that are checked.
_LEAST, _FEW, _LOOKED_AT = 20, 4, 150
#: Key in a part's metadata of the name of the token that it was sent with; the operator's own parts
#: have none.
TOKEN = b"token"
#: Most rows of a family from one token, and from one of its runs, over the base's rows of the
#: family or, if that is more, over their mean over all families.
OF_TOKEN, OF_RUN = 1.0, 0.5


class RefusedShard(DataError):
    """Error for a file with wrong rows; `run_ids` are the runs whose control configs take other
    times than the operator's."""

    run_ids: Sequence[str] = ()


class Shard(NamedTuple):
    """The rows of an admitted file, without those of control configs; the number of all its rows;
    and the runs in it."""

    operation: Operation
    rows: pa.Table
    sent: int
    run_ids: tuple[str, ...]


@contextmanager
def _blaming() -> Iterator[None]:
    """Raise errors in the ``with`` block as errors of the file, except those of a model or the
    disk."""
    try:
        yield
    except ModelError:
        raise
    except (DataError, InvalidInput) as error:
        if getattr(error.__cause__, "errno", None) is not None:  # the disk; Arrow sets none
            raise
        refused = RefusedShard(str(error))
        refused.run_ids = getattr(error, "run_ids", ())
        raise refused from error


def check_shard(path: Path, models: Mapping[str, Model], controls: Sequence[Path]) -> Shard:
    """Return the rows of a file if all of them are plausible.

    Args:
        path: the file.
        models: models in use, by device.
        controls: files with the times of control configs on the operator's own hosts.

    Raises:
        RefusedShard: the file is refused, with the reason.
        ConfpredError: a model, another file or the disk fails; the file is not to blame.
    """
    with _blaming():
        operation = parquet.operation_of_file(path)
        parquet.check_size(path, operation, rows=MOST_ROWS, size=MOST_BYTES, text=MOST_TEXT)
    own = (file for file in controls if operation_in(file) == operation.name)
    tables = [parquet.read(file, operation) for file in own]
    reference = pa.concat_tables([parquet.schema(operation).empty_table(), *tables])
    with _blaming():
        checked = parquet.read_checked([path], operation, whole=True)
        table = checked.table.drop_columns([ROW])
        keys = [*problem_columns(operation), "device", "family", "config", "source_digest"]
        times = table.filter(pc.field("status") == "ok").select([*keys, "time_ms", "run_id"])
        _check_controls(times, reference.filter(pc.field("status") == "ok"), keys)
        for name in pc.unique(table["device"]).to_pylist():
            data = measured_on(name, checked, operation)
            if data.skipped > MOST_ILLEGAL * table.num_rows:
                raise DataError(f"{data.skipped} rows are of configs that are not legal on {name}")
            _check_bounds(data)
            if (model := models.get(name)) is not None and model.operation is operation:
                _check_expected(data, model)
        _check_kernels(times, operation)
    return Shard(
        operation,
        table.take(rows_beyond(table, [reference], keys)),
        table.num_rows,
        tuple(pc.unique(table["run_id"]).to_pylist()),
    )


def _check_controls(times: pa.Table, reference: pa.Table, keys: Sequence[str]) -> None:
    means = reference.group_by(keys).aggregate([("time_ms", "mean")])
    both = times.join(means, keys, join_type="inner", use_threads=False)
    off = np.abs(np.log(both["time_ms"].to_numpy() / both["time_ms_mean"].to_numpy()))
    if (off > np.log1p(CONTROL)).any():
        wrong = both.take(np.flatnonzero(off > np.log1p(CONTROL)))
        first = wrong.slice(0, 1).to_pylist()[0]
        here, usual = (f"{first[name]:.4g} ms" for name in ("time_ms", "time_ms_mean"))
        refused = RefusedShard(
            f"control config {first['config']} of {first['family']} takes {here} in run "
            f"{first['run_id']}, and {usual} elsewhere"
        )
        refused.run_ids = pc.unique(wrong["run_id"]).to_pylist()
        raise refused


def _check_kernels(times: pa.Table, operation: Operation) -> None:
    """Refuse rows of kernels that this version does not have, naming the first row of each."""
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
    """Refuse times that the device cannot reach, and times that are too noisy to train on."""
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
    compared: dict[str, list[_Compared]] = {}
    for t in some.timings:
        if (learned := model.families.get(t.family)) is not None and learned.serves(t.problem):
            compared.setdefault(t.family, []).append(_compare(t, learned))
    for family, parts in compared.items():
        if len(parts) < _FEW or sum(len(part.beside) for part in parts) < _LEAST:
            continue
        median = float(np.exp(np.median([part.of_choice for part in parts])))
        most = FACTOR * FEW ** len(parts) ** -0.5
        if not 1 / most <= median <= most:
            raise DataError(
                f"times of {family} are {median:.2f} of what model {model.version} expects in the "
                f"median; allowed: {1 / most:.2f} to {most:.2f}"
            )
        ranks = [part.ranks for part in parts if len(part.beside) >= _LEAST]
        if ranks and np.median(ranks) < CORRELATION:
            raise DataError(
                f"times of {family} are in another order than model {model.version} expects: a "
                f"rank correlation of {np.median(ranks):.2f}; allowed: at least {CORRELATION}"
            )
    close = [part.close for parts in compared.values() for part in parts]
    count, off = sum(map(len, close)), sum(int((logs < FAST).sum()) for logs in close)
    if off > SOME + MOST_OFF * count:
        raise DataError(
            f"{off} of {count} times are far below what model {model.version} expects beside their "
            f"neighbours; allowed: {MOST_OFF:.0%}"
        )


class _Compared(NamedTuple):
    """Times of one problem's configs, and what a model expects.

    Attributes:
        of_choice: log(time / expected time) of the config that the model puts first.
        ranks: rank correlation of times and expected times.
        beside: log(time / expected time) of each config, less their median.
        close: the same of the configs that are expected to be nearly the best.
    """

    of_choice: float
    ranks: float
    beside: NDArray[np.float64]
    close: NDArray[np.float64]


def _compare(t: Timings, learned: FamilyModel) -> _Compared:
    rows, seconds = learned.rank(t.problem, t.device, t.rows, len(t.rows))
    expected, at = np.empty(len(rows)), np.searchsorted(t.rows, rows)
    expected[at] = seconds
    logs = np.log(t.time_ms * 1e-3 / expected)
    apart = np.argsort(np.argsort(t.time_ms)) - np.argsort(np.argsort(expected))
    ranks = 1 - 6 * float((apart**2).sum()) / max(1, len(apart) ** 3 - len(apart))
    close = logs[expected < CLOSE * seconds[0]]
    beside, nearly = logs - np.median(logs), close - np.median(close)
    return _Compared(float(logs[at[0]]), ranks, beside, nearly)


def believed(t: Timings, learned: FamilyModel) -> Timings:
    """Return the times without those that are far off the model's expectation, relative to the
    problem's other configs."""
    beside = _compare(t, learned).beside
    keep = (beside >= FAST) & (beside <= SLOW)
    parts = {name: getattr(t, name)[keep] for name in ("rows", "time_ms", "spread_ms")}
    return replace(t, **parts, registers=None)


def token_of(file: Path) -> str:
    """Return the name of the token that a part was sent with; empty for the operator's own
    parts."""
    return ((pq.read_schema(file).metadata or {}).get(TOKEN) or b"").decode(errors="replace")


def uploaded(
    files: Sequence[Path], base: Dataset, old: Model, layers: set[Any], say: Callable[[str], None]
) -> dict[str, list[Timings]]:
    """Return the uploads' times of each family of the old model, without held-out `layers` and the
    base's configs, within a token's limit of rows, and only those that are `believed`."""
    tables, tokens = [], []
    for file in files:
        try:
            table = parquet.read_checked([file], CONVOLUTION, whole=True).table
        except DataError as error:
            say(f"left out: {error}")
            continue
        tables.append(table)
        tokens += [token_of(file)] * table.num_rows
    if not tables:
        return {}
    table = pa.concat_tables(tables).drop_columns([ROW]).append_column("token", pa.array(tokens))
    wanted = (pc.field("device") == base.device.key) & (pc.field("status") == "ok")
    table = table.filter(wanted & pc.field("family").isin([*old.families]))
    counts = Counter(dict.fromkeys(old.families, 0))
    for t in base.timings:
        counts[t.family] += len(t.rows)
    mean = base.rows / max(1, sum(count > 0 for count in counts.values()))
    for columns, share in ((("token", "run_id"), OF_RUN), (("token",), OF_TOKEN)):
        most = {name: share * max(count, mean) for name, count in counts.items()}
        table = table.take(capped(table, CONVOLUTION, ("family", *columns), most))
    table = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
    rows = parquet.CheckedRows(table, (*files,), (table.num_rows,))
    base_rows = {(t.problem, t.family): t.rows for t in base.timings}
    uploads: dict[str, list[Timings]] = defaultdict(list)
    for t in measured_on(old.device.key, rows, CONVOLUTION).timings:
        new = ~np.isin(t.rows, base_rows.get((t.problem, t.family), ()))
        learned = old.families[t.family]
        if t.problem.layer() in layers or not learned.serves(t.problem) or not new.any():
            continue
        parts = {name: getattr(t, name)[new] for name in ("rows", "time_ms", "spread_ms")}
        kept = believed(replace(t, **parts, registers=None), learned)
        if len(kept.rows):
            uploads[t.family].append(kept)
    return uploads
