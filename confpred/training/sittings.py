"""How times of the same config differ from one run to the next, and from one GPU to another of its
kind: what the spread within a run does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from confpred.data.parquet import problem_columns, read
from confpred.errors import DataError
from confpred.problem.operation import Operation


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise across runs.

    Attributes:
        runs: that timed a config which another run timed too.
        repeated: those configs.
        deviation: standard deviation of the logarithm of a config's time over the runs, pooled over
            the configs; 0.01 is about one percent.
        largest: most that one run's time of a config is off the mean of all runs, likewise.
    """

    runs: int
    repeated: int
    deviation: float
    largest: float


def across_sittings(files: Sequence[Path], operation: Operation, device: str) -> Noise:
    """The noise across the runs in `files` on the device with this key.

    The median counts where a run timed a config several times.

    Raises:
        DataError: a file cannot be read, or no config was timed in two runs.
    """
    keys = [*problem_columns(operation), "family", "config", "source_digest", "cudnn_mode"]
    wanted = [*keys, "run_id", "device", "status", "time_ms"]
    table = pa.concat_tables(read(file, operation, wanted) for file in files)
    table = table.filter((pc.field("device") == device) & (pc.field("status") == "ok"))
    times: dict[tuple[object, ...], dict[str, list[float]]] = {}
    for row in table.to_pylist():
        of_config = times.setdefault(tuple(row[key] for key in keys), {})
        of_config.setdefault(row["run_id"], []).append(row["time_ms"])
    repeated = [runs for runs in times.values() if len(runs) > 1]
    if not repeated:
        raise DataError(f"no config of {device} was timed in two runs: there is no noise to tell")
    residuals, freedom = [], 0
    for runs in repeated:
        logs = np.log([np.median(ms) for ms in runs.values()])
        residuals.append(logs - logs.mean())
        freedom += len(logs) - 1
    off = np.concatenate(residuals)
    return Noise(
        runs=len({run for runs in repeated for run in runs}),
        repeated=len(repeated),
        deviation=float(np.sqrt((off**2).sum() / freedom)),
        largest=float(np.abs(off).max()),
    )
