"""Slow tests say why, CI runs each test once and failures twice, and a missing Chromium is told."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
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
        assert any(f"--dist worksteal{kind} tests/cpu tests/browser || " in line for line in lines)
        assert any(f"--exitfirst{kind} tests/cpu tests/browser; }}" in line for line in lines)
        assert any(f"-m pytest{kind} tests/gpu" in line for line in lines)
        assert any("ruff check" in line for line in lines) == (target != "test-slow")


@pytest.mark.parametrize(("named", "taken"), [(None, "0120"), ("1,3", "1313"), ("", ["", ""])])
def test_workers_share_the_gpus_that_they_are_given(
    repository: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, taken: Sequence[str]
) -> None:
    listed = "GPU 0\nGPU 1\nGPU 2\n"
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: listed)  # of another machine
    for worker, gpu in enumerate(taken):
        environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment)  # of a worker
            conftest = runpy.run_path(str(repository / "tests" / "gpu" / "conftest.py"))
            conftest["_share_gpus"](f"gw{worker}")
        assert environment == {"CUDA_VISIBLE_DEVICES": gpu}


@pytest.mark.slow(reason="it starts pytest seven times")
def test_a_failure_ends_make_test_where_the_test_fails_alone_too(
    repository: Path, tmp_path: Path
) -> None:
    command = ["make", "--no-print-directory", "--dry-run", "test"]
    command.append(f"BIN={Path(sys.executable).parent}")
    said = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    recipe = said.stdout[said.stdout.rindex("if nvidia-smi") :].partition("\n")[2]
    assert recipe.startswith(str(Path(sys.executable).parent))
    (tmp_path / "tests" / "browser").mkdir(parents=True)
    file = tmp_path / "tests" / "cpu" / "test_some.py"
    file.parent.mkdir()
    file.with_name("conftest.py").write_text(
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'slow: as here')\n"
    )
    # This may itself be one of several processes of a run.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    passes = "def test_it():\n    pass\n"
    turns = "import os\ndef test_this():\n    assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
    fails = "def test_that():\n    assert False\n"
    for tests, status, told in (
        (passes, 0, "1 passed"),
        (passes + turns, 0, "1 failed, 1 passed"),
        (passes + turns + fails, 1, "2 failed, 1 passed"),
        ("import nothing_of_that_name\n", 1, "1 error"),
    ):
        file.write_text(tests)
        command = ["sh", "-c", recipe]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode != 0, told in done.stdout) == (status != 0, True), done.stdout
        assert done.stdout.count("test session starts") == 1 + (tests != passes)


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
