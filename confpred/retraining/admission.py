"""Measurements of other hosts: which files are taken, and which of their rows a model learns from.

The hosts are the operator's: they may be broken, but they are known, and what they sent can be
revoked. A file is refused as a whole where it cannot be of this version and its device, where its
times as a whole are not those of the device, or where its control configs (anchors) take other
times than the operator's. Whether a model gains by the rows is decided by a hold-out, not here.
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

#: A file may have so many rows, so many bytes when it is unpacked, and texts of so many bytes;
#: committed measurements have 563.
MOST_ROWS, MOST_BYTES, MOST_TEXT = 400_000, 2**28, 2_000
#: Configs that another version allowed, and that are passed over; most of a GPU's are 0.002.
MOST_ILLEGAL = 0.01
#: No time is below this share of what device memory takes for the problem, nor of its arithmetic on
#: tensor cores, which the transforms of some algorithms cut to less than half.
LEAST_MEMORY, LEAST_ARITHMETIC = 0.9, 0.4
#: The median of a file's spreads, over the time; committed measurements have 0.005.
MOST_SPREAD = 0.2
#: Control configs take the time that they take elsewhere, within this share: three times what they
#: differ by between committed runs.
CONTROL = 0.06
#: The model's choices among a file's configs take, in the median over many problems, what the model
#: expects within FACTOR, and of n problems within ``FACTOR * FEW ** n ** -0.5``. Its order of a
#: problem's configs and that of their times have at least this rank correlation. Neither depends on
#: how many configs were measured: measurements of layers that no model has seen have 0.95 to 1.02,
#: and 0.84.
FACTOR, FEW, CORRELATION = 1.3, 1.6, 0.5
#: Logarithms of time over expected time, beside the problem's other configs, of times that are far
#: off. Among configs that are expected to take less than CLOSE times the best, this share of a
#: file's times may be far below, and some more; committed measurements have 0.006.
FAST, SLOW = -0.4, 0.9
CLOSE, MOST_OFF, SOME = 1.5, 0.02, 3
#: Fewer times or problems say nothing of a file, and so many of a file's problems are looked at.
_LEAST, _FEW, _LOOKED_AT = 20, 4, 150
#: Key of a part's metadata: the name of the token that it was sent with. The operator's own have
#: none.
TOKEN = b"token"
#: Rows of a family from one token, and those of one of its runs, over the base's rows of the family
#: or, where they are more, over the mean of all families.
OF_TOKEN, OF_RUN = 1.0, 0.5


class Refused(DataError):
    """Something is wrong with the file itself; `run_ids` are the runs whose control configs take
    other times than the operator's."""

    run_ids: Sequence[str] = ()


class Shard(NamedTuple):
    """The rows of a file that passed, without those of control configs; how many it has in all, and
    the runs in it."""

    operation: Operation
    rows: pa.Table
    sent: int
    run_ids: tuple[str, ...]


@contextmanager
def _blaming() -> Iterator[None]:
    """Blame the file for what is wrong in the block, save for a model or a disk that fails."""
    try:
        yield
    except ModelError:
        raise
    except (DataError, InvalidInput) as error:
        if getattr(error.__cause__, "errno", None) is not None:  # the disk; Arrow sets none
            raise
        refused = Refused(str(error))
        refused.run_ids = getattr(error, "run_ids", ())
        raise refused from error


def check_shard(path: Path, models: Mapping[str, Model], controls: Sequence[Path]) -> Shard:
    """Return the rows of a file if all of it is plausible.

    Args:
        path: the file.
        models: those in use, by device.
        controls: files of the times that control configs took on the operator's own hosts.

    Raises:
        Refused: the reason for which it is refused.
        ConfpredError: a model, another file or the disk fails, which says nothing of the file.
    """
    with _blaming():
        operation = parquet.operation_of_file(path)
        parquet.check_size(path, operation, rows=MOST_ROWS, size=MOST_BYTES, text=MOST_TEXT)
    own = (file for file in controls if operation_in(file) == operation.name)
    known = [parquet.read(file, operation) for file in own]
    reference = pa.concat_tables([parquet.schema(operation).empty_table(), *known])
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
    known = reference.group_by(keys).aggregate([("time_ms", "mean")])
    both = times.join(known, keys, join_type="inner", use_threads=False)
    off = np.abs(np.log(both["time_ms"].to_numpy() / both["time_ms_mean"].to_numpy()))
    if (off > np.log1p(CONTROL)).any():
        wrong = both.take(np.flatnonzero(off > np.log1p(CONTROL)))
        first = wrong.slice(0, 1).to_pylist()[0]
        here, usual = (f"{first[name]:.4g} ms" for name in ("time_ms", "time_ms_mean"))
        refused = Refused(
            f"control config {first['config']} of {first['family']} takes {here} in run "
            f"{first['run_id']}, and {usual} elsewhere"
        )
        refused.run_ids = pc.unique(wrong["run_id"]).to_pylist()
        raise refused


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
    count, off = sum(map(len, close)), sum(int((each < FAST).sum()) for each in close)
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
    """Return the times that are not far off what a model expects beside the problem's others."""
    beside = _compare(t, learned).beside
    keep = (beside >= FAST) & (beside <= SLOW)
    parts = {name: getattr(t, name)[keep] for name in ("rows", "time_ms", "spread_ms")}
    return replace(t, **parts, registers=None)


def token_of(file: Path) -> str:
    """Return the name of the token that a part was sent with; none for the operator's own."""
    return ((pq.read_schema(file).metadata or {}).get(TOKEN) or b"").decode(errors="replace")


def uploaded(
    files: Sequence[Path], base: Dataset, old: Model, layers: set[Any], say: Callable[[str], None]
) -> dict[str, list[Timings]]:
    """Return the uploads' times of each family of the old model, as far as a token may send them
    and they are believed: without those of held-out `layers` and of configs that the base has."""
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
    known = {(t.problem, t.family): t.rows for t in base.timings}
    found: dict[str, list[Timings]] = defaultdict(list)
    for t in measured_on(old.device.key, rows, CONVOLUTION).timings:
        new = ~np.isin(t.rows, known.get((t.problem, t.family), ()))
        learned = old.families[t.family]
        if t.problem.layer() in layers or not learned.serves(t.problem) or not new.any():
            continue
        parts = {name: getattr(t, name)[new] for name in ("rows", "time_ms", "spread_ms")}
        kept = believed(replace(t, **parts, registers=None), learned)
        if len(kept.rows):
            found[t.family].append(kept)
    return found
