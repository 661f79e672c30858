"""Made-up measurements for tests of the trainer: plausible, smooth in the features, a little noisy.

A config's time is the family's own estimate, bent by a fixed random function of the features; so
the estimate alone ranks badly, and there is something to learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from layers import first_kernel
from numpy.typing import NDArray

from confpred.data.measurements import Measurement, Run, problem_of_row
from confpred.data.parquet import schema
from confpred.families.kernel_text import source_digest
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import all_families
from confpred.measure.timing import Outcome
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import get_device
from confpred.training.fit import Hyperparameters

DEVICE = get_device("h100")
FAMILY = all_families()["grouped_fprop"]
SOURCE = first_kernel(FAMILY).file
_RUN = Run("test", DEVICE.key, DEVICE.product, "0", "13.0", "test")
_NOISE = 0.01

#: Enough for a few thousand rows.
SMALL = Hyperparameters(
    trees=120,
    num_leaves=15,
    min_data_in_leaf=20,
    rank_trees=40,
    time_trees=60,
    time_leaves=15,
    pytorch_trees=100,
)


def problems(networks: int, seed: int = 0) -> list[tuple[Problem, tuple[str, ...]]]:
    """Problems of made-up networks that share some layers, and coverage problems of none."""
    rng = np.random.default_rng(seed)
    found: dict[Problem, set[str]] = {}
    for i in range(networks):
        width = int(rng.choice([8, 16, 32]))
        base = int(rng.choice([64, 96, 128])) // width * width
        for stage in range(4):
            size = (56, 28, 14, 7)[stage]
            c = base << stage
            for n in rng.choice([1, 8, 32, 128], 2, replace=False):
                layer = Problem(
                    int(n), c, size, size, c, 3, 3, padding=1, groups=c // width,
                    bias=bool(rng.random() < 0.3),
                )  # fmt: skip
                found.setdefault(layer, set()).add(f"net{i}")
    for _ in range(networks):
        width = int(rng.choice([8, 16, 32]))
        c = width * int(rng.integers(1, 40))
        r = int(rng.integers(1, 6))
        size = int(rng.integers(8, 60))
        layer = Problem(
            int(rng.integers(1, 100)), c, size, size, c, r, r, padding=r // 2, groups=c // width
        )
        found.setdefault(layer, set())
    return [(problem, tuple(sorted(names))) for problem, names in found.items()]


def rows(networks: int = 6, configs: int = 80, seed: int = 0) -> Iterator[dict[str, object]]:
    """Measurements of `problems`: the first `configs` legal ones in one shuffled order, PyTorch's
    own operator, which wins at group width 32, and a failure for each problem."""
    rng = np.random.default_rng(seed)
    order = np.random.default_rng(1).permutation(len(FAMILY.configs))
    for problem, names in problems(networks, seed):
        legal = order[FAMILY.legal(problem, DEVICE)[order]][: configs + 1]
        *chosen, failed = (int(row) for row in legal)
        ids = np.array(chosen, np.intp)
        ms = true_ms(problem, ids) * np.exp(rng.normal(scale=_NOISE, size=len(ids)))
        for row, time_ms in zip(chosen, ms, strict=True):
            yield row_of(problem, names, Candidate(FAMILY.name, row), float(time_ms))
        yield row_of(problem, names, Candidate(FAMILY.name, failed), None)
        ratio = 0.6 if problem.group_width == 32 else 3.0
        yield row_of(problem, names, PYTORCH_OPERATOR, float(ms.min() * ratio))


def true_ms(problem: Problem, ids: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the times of configs without noise."""
    weights = np.random.default_rng(2).normal(size=(len(FAMILY.feature_names), 24))
    features = FAMILY.features(problem, DEVICE, ids).astype(np.float64)
    squashed = np.sign(features) * np.log1p(np.abs(features)) / 4
    bend = np.tanh(squashed @ weights / 3).mean(axis=1) * 4
    return FAMILY.estimate_s(problem, DEVICE, ids) * np.exp(bend) * 1e3


def row_of(
    problem: Problem,
    networks: tuple[str, ...],
    candidate: Candidate,
    ms: float | None,
    source: str = source_digest(SOURCE),
) -> dict[str, object]:
    """Return a measurement of one config, or of PyTorch's operator; a failure where `ms` is
    None."""
    by_pytorch = candidate == PYTORCH_OPERATOR
    outcome = Outcome(
        candidate.config_id, "ok" if ms is not None else "wrong_result",
        time_ms=ms if ms is not None else float("nan"),
        spread_ms=ms * _NOISE if ms is not None else float("nan"), samples=20, registers=64,
        error=1e-3, sm_clock_mhz=1980, cudnn="9.19.0" if by_pytorch else "",
        cudnn_mode="benchmark" if by_pytorch else "",
    )  # fmt: skip
    digest = "" if by_pytorch else source
    when = "2025-01-01T00:00:00Z"
    return Measurement(problem, networks, candidate.provider, digest, _RUN, outcome, when).to_row()


def write(path: Path, networks: int = 6, configs: int = 80, seed: int = 0) -> Path:
    """Write such measurements to the Parquet file `path`."""
    table = pa.Table.from_pylist(list(rows(networks, configs, seed)), schema(CONVOLUTION))
    pq.write_table(table, path)
    return path


def write_holdout(path: Path, network: str, networks: int = 8) -> Path:
    """Write all that `rows` has of the layers of `network`, under its name alone: cuDNN's
    heuristics were timed in a run of their own, and are half as fast as its benchmark mode."""
    held_out = {p.layer() for p, names in problems(networks) if network in names}
    kept = []
    for row in rows(networks):
        if problem_of_row(row, Problem).layer() in held_out:
            row |= {"networks": network, "run_id": "first"}
            kept.append(row)
            if row["family"] == PYTORCH_OPERATOR.provider:
                slower = {"time_ms": 2 * float(str(row["time_ms"])), "run_id": "second"}
                kept.append(row | slower | {"cudnn_mode": "heuristics"})
    pq.write_table(pa.Table.from_pylist(kept, schema(CONVOLUTION)), path)
    return path


def write_anchors(path: Path, measured: Path) -> Path:
    """Write the first two rows of `measured` as three runs might time them; one is 2 % slower."""
    kept = [
        row | {"run_id": run, "time_ms": row["time_ms"] * factor}
        for row in pq.read_table(measured).slice(0, 2).to_pylist()
        for run, factor in (("x", 1.0), ("y", 1.0), ("z", 1.02))
    ]
    pq.write_table(pa.Table.from_pylist(kept, schema(CONVOLUTION)), path)
    return path
