"""Measurements that tuning leaves in the user's cache (`confpred.pytorch.run.tuning`), and the
answers in them.

    tuned/<device>/<driver>_<cuDNN>/<operation>/rows-*.parquet

A folder is one of the sampler's, so that it is joined, sent and learned from as any other. Under
another driver or cuDNN, or where cuDNN's front end came or went, its times say which candidates to
measure first, and no more.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from confpred.cuda.epilogue import epilogue_source
from confpred.data.measurements import problem_of_row
from confpred.errors import ConfpredError
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate, within
from confpred.families.registry import config_ids, families_of
from confpred.files import cache_folder
from confpred.predict.choice import Choice
from confpred.problem.device import Device
from confpred.problem.limits import Limits
from confpred.problem.operation import Operation
from confpred.problem.record import Record

log = logging.getLogger(__name__)
#: A kernel has to take less than this share of the time of PyTorch's operator: two measurements of
#: the same differ by less.
GAIN = 0.98
_SHARDS = "rows-*.parquet"
#: How often each file or folder could not be read; whoever keeps answers reads again after each.
unread: Counter[Path] = Counter()
_COLUMNS = ("family", "config", "source_digest", "status", "time_ms")


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate that was measured: median milliseconds, infinite where it has failed, and the
    digest of its kernel."""

    candidate: Candidate
    ms: float
    digest: str


#: Candidates of each problem, the fastest first.
Times = Mapping[Record, tuple[Timed, ...]]


def folder_of(device: str, operation: Operation, driver: str, cudnn: str) -> Path:
    """Return the folder of what was measured on a device (by its key) under these versions."""
    return cache_folder("tuned") / device / f"{driver}_{cudnn or 'none'}" / operation.name


def shards_of(device: str, operation: Operation, driver: str = "*") -> list[Path]:
    """Return the files of measurements that exist; ``*`` stands for all devices or drivers."""
    return _matching(cache_folder("tuned"), f"{device}/{driver}_*/{operation.name}/{_SHARDS}")


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match; none where the system refuses to show it."""
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        note_unread(folder, f"cannot list {folder}: {error.strerror}")
        return []


def note_unread(path: Path, why: str) -> None:
    """Count that `path` cannot be read now, and say so the first time."""
    unread[path] += 1
    if unread[path] == 1:
        log.warning("%s; done without it meanwhile", why)


def folders_of(device: str, operation: Operation, driver: str = "*") -> list[Path]:
    """Return the folders of `shards_of`, the last one written to first."""
    folders = {shard.parent for shard in shards_of(device, operation, driver)}
    return sorted(folders, key=_changed_s, reverse=True)


def _changed_s(folder: Path) -> float:
    with contextlib.suppress(OSError):  # removed since it was listed
        return folder.stat().st_mtime
    return 0.0


def times_in(folder: Path, operation: Operation) -> Times:
    """Return what was measured into `folder`; a damaged shard is set aside with a warning, one that
    cannot be read now counts as `unread` and stays."""
    times_ms: dict[tuple[Record, Candidate, str], list[float]] = defaultdict(list)
    wrong = set()
    for shard in _matching(folder, _SHARDS):
        from confpred.data.parquet import problem_columns, read  # imports pyarrow

        try:
            rows = read(shard, operation, [*problem_columns(operation), *_COLUMNS]).to_pylist()
            keyed = [(problem_of_row(row, operation.problem), row) for row in rows]
        except ConfpredError as error:
            if getattr(error.__cause__, "errno", None):  # the system's; Arrow's errors have none
                note_unread(shard, str(error))
                continue
            log.warning("ignoring measurements: %s", error)
            with contextlib.suppress(OSError):  # else no sampler would write here
                shard.rename(shard.with_suffix(".damaged"))
            continue
        for problem, row in keyed:
            try:
                candidate = Candidate(row["family"], config_ids(row["family"])[row["config"]])
            except KeyError:  # of another version
                continue
            key = problem, candidate, row["source_digest"]
            times_ms[key].append(row["time_ms"])
            wrong |= {key} if row["status"] != "ok" else set()
    times: dict[Record, list[Timed]] = defaultdict(list)
    for key, values in times_ms.items():
        problem, candidate, digest = key
        ms = math.inf if key in wrong else median(values)
        times[problem].append(Timed(candidate, ms, digest))
    return {problem: tuple(sorted(some, key=_ms)) for problem, some in times.items()}


def _ms(timed: Timed) -> float:
    return timed.ms


def answer(
    problem: Record, device: Device, timed: Iterable[Timed], limits: Limits
) -> Choice | None:
    """Return the fastest of the candidates `timed`, fastest first, that is legal, keeps within
    `limits` and is of today's kernels; PyTorch's operator where that is not faster by `GAIN`. None
    where one of the two was not measured, as before an upgrade or a budget's end."""
    every = list(timed)
    best = next((t for t in every if _is_current(problem, device, t, limits)), None)
    digest = epilogue_source(problem)  # of what follows PyTorch's operator
    pytorch = [t.ms for t in every if (t.candidate, t.digest) == (PYTORCH_OPERATOR, digest)]
    if best is None or not pytorch or pytorch[0] == math.inf:
        return None
    is_faster = best.ms < GAIN * pytorch[0]
    candidate, ms = (best.candidate, best.ms) if is_faster else (PYTORCH_OPERATOR, pytorch[0])
    return Choice(problem, device.key, "measured", candidate, ms, pytorch_ms=pytorch[0])


def _is_current(problem: Record, device: Device, timed: Timed, limits: Limits) -> bool:
    """Return whether a candidate can be launched as it was measured: it is legal, of today's
    kernel, and within `limits`."""
    family, row = families_of(problem).get(timed.candidate.provider), timed.candidate.config_id
    if family is None or not family.legal(problem, device)[row]:
        return False
    if timed.digest != identity_of(family.launch(problem, row).source):
        return False
    return len(within(family, problem, np.array([row], np.intp), limits)) == 1


def answers(device: Device, operation: Operation, limits: Limits) -> list[Choice]:
    """Return the answers in the folder that was written to last."""
    for folder in folders_of(device.key, operation)[:1]:
        pairs = times_in(folder, operation).items()
        choices = (answer(problem, device, timed, limits) for problem, timed in pairs)
        return [choice for choice in choices if choice is not None]
    return []
