"""Measured times of single candidates, as the sampler wrote them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from confpred.data.measurements import problem_of_row
from confpred.data.parquet import problem_columns, read_shards
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import config_ids
from confpred.problem.operation import Operation
from confpred.problem.record import Record


def times_in(folder: Path, operation: Operation) -> dict[tuple[Record, Candidate], float]:
    """Milliseconds of what was timed into the shards of `folder`; what failed has none.

    Raises:
        DataError: a shard is damaged or foreign.
    """
    columns = [*problem_columns(operation), "family", "config", "status", "time_ms"]
    found: dict[tuple[Record, Candidate], list[float]] = defaultdict(list)
    for row in read_shards(folder, operation, columns).to_pylist():
        if row["status"] != "ok":
            continue
        if row["family"] == PYTORCH_OPERATOR.provider:
            candidate = PYTORCH_OPERATOR
        else:
            candidate = Candidate(row["family"], config_ids(row["family"])[row["config"]])
        found[problem_of_row(row, operation.problem), candidate].append(row["time_ms"])
    return {key: median(times) for key, times in found.items()}
