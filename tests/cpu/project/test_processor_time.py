"""Folders that outgrow their budget of processor time fail a run of the whole folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processor_time import BUDGETS, OVER_BUDGET

CONFTEST = """
from pathlib import Path
import processor_time
processor_time.ROOT = Path(__file__).parent
processor_time.BUDGETS = {"heavy": (1, 0), "light": (1000, 0), "part": (1, 0)}
def pytest_configure(config): config.pluginmanager.register(processor_time.Watch(config))
"""
HEAVY = """
import subprocess, sys
WORK = "from processor_time import turn_s; [turn_s() for _ in range(3)]"
def test_in_a_process(): subprocess.run([sys.executable, "-c", WORK], check=True)
"""


@pytest.mark.slow(reason="pytest runs four folders in a process of its own")
def test_a_whole_folder_over_its_budget_fails_the_run(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("heavy", "light", "part", "other"):
        (tmp_path / name).mkdir()
        text = "def test_it(): pass" if name == "light" else HEAVY
        (tmp_path / name / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:schemathesis"]
    command += ["-m", "not slow", "-o", f"pythonpath={repository / 'tests'}"]
    done = subprocess.run(
        [*command, "heavy", "light", "part/test_part.py", "other"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(repository / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == OVER_BUDGET, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    told = [line for line in done.stdout.splitlines() if " turns of processor time" in line]
    assert [line.split()[0] for line in told] == ["heavy", "light", "other"]
    assert [line.endswith(": over the budget") for line in told] == [True, False, False]
    assert told[-1].endswith(", of no budget")


def test_every_folder_with_a_budget_is_there(repository: Path) -> None:
    assert [name for name in BUDGETS if not (repository / "tests" / name).is_dir()] == []
