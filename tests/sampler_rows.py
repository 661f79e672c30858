"""Measurements to write and to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from confpred.data.measurements import Measurement, Run
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.sampler.store import open_store

LAYER = Problem(2, 64, 14, 14, 64, 3, 3, padding=(1, 2), groups=8, bias=True, activation="relu")
RUN = Run("0a1b", "h100", "NVIDIA H100 80GB HBM3", "580.1", "13.4", "0.1.0")
ROW = Measurement(
    *(LAYER, ("a", "b"), "grouped_fprop", "block_n=2 bands=1", "f" * 16, RUN, "ok"),
    *(0.25, 0.01, 7, 128, 0, 40_000, 1e-4, 1980, "", "2026-01-02T03:04:05+00:00"),
)


def other(n: int, config: str = "block_n=2 bands=1", **changes) -> Measurement:
    return replace(ROW, problem=replace(LAYER, n=n), config=config, **changes)


def fill(folder: Path, *groups: list[Measurement]) -> None:
    """One shard a group of rows."""
    with open_store(folder, "r", CONVOLUTION) as store:
        for group in groups:
            store.add(group)
            store.flush()
