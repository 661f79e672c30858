"""Slow tests say why, CI runs each test once, and a missing Chromium is told or a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slow import reasons, which_are_slow


def test_every_slow_test_has_its_reason(repository: Path) -> None:
    files = sorted((repository / "tests").rglob("test_*.py"))
    found = [(file.name, reason) for file in files for reason in reasons(file)]
    assert found
    assert [name for name, reason in found if reason is None] == []


def test_a_marker_without_a_reason_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "@pytest.mark.slow\ndef test_a(): ...\n@pytest.mark.slow()\ndef test_b(): ...\n"
        "@pytest.mark.slow(reason='a reason')\ndef test_c(): ...\ndef test_d(): ...\n"
    )
    assert sorted(map(str, reasons(file))) == ["None", "None", "a reason"]
    assert which_are_slow(file) == {"test_a": True, "test_b": True, "test_c": True, "test_d": False}
    file.write_text(f"pytestmark = [pytest.mark.slow(reason='all')]\n{file.read_text()}")
    assert all(which_are_slow(file).values())


def test_ci_runs_each_test_once(repository: Path) -> None:
    """`make test` takes what the marker is not on, `make test-slow` what it is on."""
    assert (repository / ".ci" / "run").read_text().splitlines()[-2:] == [
        "make test",
        "make test-slow",
    ]
    kinds = {"test": ' -m "not slow"', "test-slow": " -m slow", "test-all": ""}
    for target, kind in kinds.items():
        command = ["make", "--dry-run", target]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
        lines = [line.replace(" --durations 30", "") for line in done.stdout.splitlines()]
        (cpu,) = (line for line in lines if line.endswith(" tests/cpu tests/browser"))
        assert cpu.endswith(f"--dist worksteal{kind} tests/cpu tests/browser")
        assert any(f"-m pytest{kind} tests/gpu" in line for line in lines)
        assert any("ruff check" in line for line in lines) == (target != "test-slow")


@pytest.mark.slow(reason="it starts pytest twice")
def test_without_chromium_and_nginx_their_tests_skip_and_in_ci_fail(
    repository: Path, tmp_path: Path
) -> None:
    assert "CONFPRED_TEST_BROWSER=required" in (repository / ".ci" / "run").read_text()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/browser"]
    for required, told in (("", "26 skipped"), ("required", "26 errors")):
        environment = os.environ | {"PATH": str(tmp_path), "CONFPRED_TEST_BROWSER": required}
        done = subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert told in done.stdout
        assert "left out: none of chromium, " in done.stdout
        assert done.returncode == (1 if required else 0)
