"""Check whether a model still holds, by timing a few of its measured configs again."""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from confpred.data.measurements import Run, problem_of_row
from confpred.data.parquet import problem_columns, read_shards
from confpred.data.suites import Entry, Suite
from confpred.errors import DataError
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import config_ids, config_words
from confpred.model.card import DRIFT_FORMAT
from confpred.model.folder import Model
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.retraining.offers import tasks_to_judge
from confpred.sampler.run import Here, Sampling, Tally, sample

#: A model holds while the geometric mean of its times is within MEAN of the measured ones, and at
#: most SHARE of them are further than FAR away. A model keeps the best of many noisy times, which
#: is a percent or two slower when it is measured again.
MEAN, FAR, SHARE = 0.07, 0.20, 0.15
LEAST = 8  # times that a verdict needs
State = Literal["ok", "drifted", "kernels changed", "driver or cuDNN changed"]


@dataclass(frozen=True, slots=True)
class Retimed:
    """One config, timed again."""

    problem: str  # the problem, in words
    provider: str
    config: str  # in words
    expected_ms: float  # time in the model's measurements
    measured_ms: float  # time now

    @property
    def ratio(self) -> float:
        """Time now over expected time."""
        return self.measured_ms / self.expected_ms


@dataclass(frozen=True, slots=True)
class Drift:
    """Result of a check."""

    device: str  # key of the device
    model: str  # version of the model
    state: State  # the verdict in a word or two
    why: str  # the verdict in a sentence
    ratio: float  # geometric mean of (time now / expected time)
    far: float  # share of the times that are further than ``FAR`` from the expected ones
    kernels: tuple[str, ...]  # in words, the kernels that changed since they were measured
    versions: tuple[str, ...]  # in words, which of driver and cuDNN changed
    retimed: tuple[Retimed, ...]  # the worst ratio first

    @property
    def holds(self) -> bool:
        """Whether the model can be used as it is: its kernels have not changed, and take the times
        that it expects. Another driver alone does not matter."""
        return self.state in ("ok", "driver or cuDNN changed")

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        rows = [{**asdict(timed), "ratio": timed.ratio} for timed in self.retimed]
        return {"format": DRIFT_FORMAT, "holds": self.holds, **asdict(self), "retimed": rows}


def time_again(
    model: Model,
    runs: Mapping[int, Run],
    settings: Sampling,
    *,
    count: int,
    seed: int,
    cudnn: str,
    interrupts: Callable[[], int] = lambda: 0,
    show: Callable[[Tally], None] = lambda tally: None,
) -> Drift:
    """Time `count` of the model's measured configs, or fewer if it has no more, and judge.

    Args:
        model: model of the device that `runs` are on.
        runs: the GPU's CUDA number, and the columns that its rows share.
        settings: settings of the sampler; their choice of configs does not count.
        count: how many configs to time.
        seed: seed of their draw.
        cudnn: version of cuDNN in use; empty if there is none.
        interrupts, show: see `confpred.sampler.run.sample`.

    Raises:
        DataError: too few could be timed for a verdict.
        ConfpredError: see `confpred.sampler.run.sample`.
    """
    (driver,) = {run.driver for run in runs.values()}
    drawn = draw(model, count, seed, pytorch=settings.pytorch)
    if not drawn:
        raise DataError(f"model {model.version} has no measured config to time again")
    tasks = [t for problem, c, _ in drawn for t in tasks_to_judge(Entry(problem), [c])]
    with tempfile.TemporaryDirectory(prefix="confpred-drift-") as folder:
        suite = Suite("drift", tuple(Entry(problem) for problem, _, _ in drawn))
        how: dict[str, Any] = {"interrupts": interrupts, "show": show}
        here = Here(runs, settings)
        sample(suite, Path(folder), here, settings, chosen=lambda measured: tasks, **how)
        times = times_in(Path(folder), model.operation)
    retimed = [
        Retimed(str(problem), c.provider, config_words(c), expected, times[problem, c])
        for problem, c, expected in drawn
        if (problem, c) in times
    ]
    return judged(model, retimed, model.card.changes(driver=driver, cudnn=cudnn))


def draw(
    model: Model, count: int, seed: int, *, pytorch: bool
) -> list[tuple[Record, Candidate, float]]:
    """Return random problems of the model's measurements, with the best config and its time; about
    as many of each provider."""
    of_provider: dict[str, list[str]] = defaultdict(list)
    for words, best in sorted(model.measured.items()):
        if pytorch or best.candidate != PYTORCH_OPERATOR:
            of_provider[best.candidate.provider].append(words)
    rng = random.Random(seed)
    orders = [order for _, order in sorted(of_provider.items())]
    for order in orders:
        rng.shuffle(order)
    turns = zip_longest(*(reversed(order) for order in orders))
    chosen = [words for turn in turns for words in turn if words is not None]
    parse = model.operation.problem.parse
    return [
        (parse(words), model.measured[words].candidate, model.measured[words].time_ms)
        for words in chosen[:count]
    ]


def judged(model: Model, retimed: Sequence[Retimed], versions: Sequence[str]) -> Drift:
    """Return the verdict on these times.

    Raises:
        DataError: they are too few for a verdict, and no kernel has changed either.
    """
    if len(retimed) < LEAST and not model.stale:
        raise DataError(f"only {len(retimed)} configs could be timed; {LEAST} are needed")
    logs = np.log([timed.ratio for timed in retimed])
    ratio = float(np.exp(logs.mean())) if len(logs) else 1.0
    far = float((np.abs(logs) > np.log1p(FAR)).mean()) if len(logs) else 0.0
    why = (
        f"{len(retimed)} configs take {ratio:.3f} of the times that the model expects, and "
        f"{far:.0%} of them are off by more than {FAR:.0%}"
    )
    state: State = "ok"
    if model.stale:
        state, why = "kernels changed", f"{'; '.join(model.stale)}; {why}"
    elif abs(np.log(ratio)) > np.log1p(MEAN) or far > SHARE:
        state = "drifted"
    elif versions:
        state = "driver or cuDNN changed"
        why = f"{'; '.join(versions)}; but the model holds: {why}"
    worst_first = tuple(sorted(retimed, key=lambda timed: -abs(np.log(timed.ratio))))
    facts = (model.stale, tuple(versions), worst_first)
    return Drift(model.device.key, model.version, state, why, ratio, far, *facts)


def times_in(folder: Path, operation: Operation) -> dict[tuple[Record, Candidate], float]:
    """Return the milliseconds of the configs in the shards of `folder` that were timed.

    Raises:
        DataError: a shard is damaged or foreign.
    """
    columns = [*problem_columns(operation), "family", "config", "status", "time_ms"]
    timed: dict[tuple[Record, Candidate], list[float]] = defaultdict(list)
    for row in read_shards(folder, operation, columns).to_pylist():
        if row["status"] == "ok":
            candidate = Candidate(row["family"], config_ids(row["family"])[row["config"]])
            timed[problem_of_row(row, operation.problem), candidate].append(row["time_ms"])
    return {key: median(times) for key, times in timed.items()}
