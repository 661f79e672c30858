"""``confpred sample`` below the search for GPUs, as a program that tests can interrupt and kill.

Usage: sampler_run.py SUITE FOLDER [DEVICE...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import sampler_jobs

from confpred.cli.sample import sample_and_report
from confpred.data.measurements import Run
from confpred.data.suites import read_suite
from confpred.sampler.run import Settings


def runs(run_id: str, *devices: str) -> dict[int, Run]:
    """Facts in rows about GPUs that are not there."""
    return {i: Run(run_id, d, d.upper(), "0", "13", "test") for i, d in enumerate(devices)}


if __name__ == "__main__":
    suite, folder = read_suite(Path(sys.argv[1])), Path(sys.argv[2])
    settings = Settings(
        configs=3,
        processes=2,
        pytorch=False,
        compile=sampler_jobs.COMPILE,
        measure=sampler_jobs.SLOWLY,
    )
    sys.exit(sample_and_report(suite, folder, runs("slow", "h100"), settings))
