"""Helpers of the sampler's tests, and ``confpred sample`` below the search for GPUs, as a program
that tests can interrupt and kill: ``sampler_run.py SUITE FOLDER``.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pyarrow as pa
import sampler_jobs

from confpred.cli.sample import sample_and_report
from confpred.data.measurements import Run
from confpred.data.parquet import read
from confpred.data.suites import Entry, Suite, read_suite
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.sampler.run import Here, Sampling, Tally, sample


def suite_of(count: int) -> Suite:
    """A suite of grouped layers that differ in their batch."""
    layers = [Problem(n, 64, 14, 14, 64, 3, 3, padding=1, groups=8) for n in range(2, 2 + count)]
    return Suite("many", tuple(map(Entry, layers)))


def run(suite: Suite, folder: Path, *devices: str, **settings) -> Tally:
    """Sample on GPUs that are not there."""
    chosen = {"pytorch": False, "compile": sampler_jobs.COMPILE} | settings
    found = runs(secrets.token_hex(4), *(devices or ["h100"]))  # named as by `find_gpus`
    return sample(suite, folder, Here(found, Sampling(**chosen)), Sampling(**chosen))


def rows(folder: Path, kind: str = "rows") -> list[dict]:
    tables = [read(path, CONVOLUTION) for path in sorted(folder.glob(f"{kind}-*.parquet"))]
    return pa.concat_tables(tables).to_pylist() if tables else []


def runs(run_id: str, *devices: str) -> dict[int, Run]:
    """Facts in rows about GPUs that are not there."""
    return {i: Run(f"{run_id}-{i}", d, d.upper(), "0", "13", "test") for i, d in enumerate(devices)}


if __name__ == "__main__":
    suite, folder = read_suite(Path(sys.argv[1])), Path(sys.argv[2])
    functions = {"compile": sampler_jobs.COMPILE, "measure": sampler_jobs.SLOWLY}
    settings = Sampling(configs=3, processes=2, pytorch=False, **functions)
    engine = Here(runs("slow", "h100"), settings)
    sys.exit(sample_and_report(suite, folder, engine, settings))
