"""The demo from its first line to its last."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

#: Seconds: of processor time in all, and without a line where nothing else uses the processors,
#: which is as long as a fold takes that grows 900 trees a family.
BUDGET, SILENCE = 75.0, 10.0
#: Processor seconds of `IMPORTS` on the machine of these limits: a slower one may take longer.
IMPORTS, IMPORTS_S = "import lightgbm, pyarrow.parquet, sklearn.model_selection", 1.1
#: How many times as long both may be beside another test: two hardware threads share a core.
BESIDE = 1.75 if "PYTEST_XDIST_WORKER" in os.environ else 1.0

#: The demo as on a machine without a GPU.
PROGRAM = """
import sys
sys.path.insert(0, "examples")
import demo
demo.device_count = lambda: 0
demo.FAMILIES = {families}
demo.main()
"""


@dataclass(frozen=True)
class Told:
    """A run of the demo.

    Attributes:
        lines: in order, of both streams.
        silence: the longest time without a line.
        wall, processor: of the whole.
    """

    lines: Sequence[str]
    silence: float
    wall: float
    processor: float


def run(repository: Path, families: Sequence[str]) -> Told:
    """Run the demo with some of its families; it has to succeed."""
    program = PROGRAM.format(families=tuple(families))
    before, began = _processor_s(), time.monotonic()
    lines, times = [], [began]
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip("\n"))
            times.append(time.monotonic())
    times.append(time.monotonic())
    assert process.returncode == 0, "\n".join(lines)
    silence = max(after - earlier for earlier, after in pairwise(times))
    return Told(lines, silence, times[-1] - began, _processor_s() - before)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def slowness() -> float:
    """Return how many times as slow this machine is as that of the limits, 1 at least."""
    used = []
    for _ in range(3):
        before = _processor_s()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        used.append(_processor_s() - before)
    return max(1.0, min(used) / IMPORTS_S)


def summary_of(told: Told) -> list[str]:
    """Return the lines from the summary's heading on."""
    (at,) = (i for i, line in enumerate(told.lines) if line.startswith("Summary: "))
    return list(told.lines[at:])


def check(told: Told) -> None:
    """Every part has shown what it says, and the summary ends it all."""
    said = "\n".join(told.lines)
    for part in (
        "regret on held-out networks",
        "cross-validating by network",
        "judging by fewer configs",
        "time of the answer / time of the fastest",
        "measured, ms",
        "200 OK",
        "No CUDA device here",
        "$ python: confpred.status(model)",
    ):
        assert part in said
    summary = summary_of(told)
    assert len(summary) <= 10
    assert max(map(len, summary[1:])) <= 100
    first = [line.split()[0] for line in summary[1:8]]
    assert first == ["Retrained", "Judged", "Predicted", "Asked", "GPU", "Status", "Next:"]
    assert "not on a GPU, so confpred changes nothing" in summary[6]
    assert "confpred benchmark" in summary[-1]


@pytest.mark.timeout(600)
@pytest.mark.slow(
    reason="trains, judges and serves on the real measurements: a minute of processor time"
)
def test_the_demo_on_the_committed_measurements(repository: Path) -> None:
    """It shows figures worth showing, in its time, and is never silent for long."""
    allowed = BESIDE * slowness()
    told = run(repository, ["grouped_fprop", "depthwise_fprop"])
    check(told)
    assert told.processor <= allowed * BUDGET
    busy = max(1.0, told.wall / told.processor)  # others use the processors too
    assert told.silence <= allowed * SILENCE * busy
    for line in summary_of(told)[1:4]:
        regret = re.search(r"regret.*? (\d\.\d{3})\b", line)
        assert regret is not None, line
        assert 1.0 <= float(regret[1]) < 1.1
