"""Measurements to write and to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from confpred.data.measurements import Measurement, Run
from confpred.families.protocol import Candidate
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.sampler.run import open_store

LAYER = Problem(2, 64, 14, 14, 64, 3, 3, padding=(1, 2), groups=8, bias=True, activation="relu")
RUN = Run("0a1b", "h100", "NVIDIA H100 80GB HBM3", "580.1", "13.4", "0.1.0")
ROW = Measurement(
    problem=LAYER,
    networks=("a", "b"),
    candidate=Candidate("grouped_fprop", 3),
    source_digest="f" * 16,
    cudnn="",
    cudnn_mode="",
    run=RUN,
    status="ok",
    time_ms=0.25,
    spread_ms=0.01,
    samples=7,
    registers=128,
    local_bytes=0,
    smem_bytes=40_000,
    error=1e-4,
    sm_clock_mhz=1980,
    message="",
    time="2026-01-02T03:04:05+00:00",
)


def other(n: int, config_id: int = 3, **changes) -> Measurement:
    candidate = replace(ROW.candidate, config_id=config_id)
    return replace(ROW, problem=replace(LAYER, n=n), candidate=candidate, **changes)


def fill(folder: Path, *groups: list[Measurement]) -> None:
    """One shard a group of rows."""
    with open_store(folder, "r", CONVOLUTION) as store:
        for group in groups:
            store.add(group)
            store.flush()
