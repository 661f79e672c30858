"""Schemathesis asks a served confpred whatever its description allows, and forbids.

A request that is allowed has to be answered, and what is not refused, each in the described form.
Seconds in `make test`; `make fuzz` does the same for many minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from served import Server

EXAMPLES = os.environ.get("CONFPRED_FUZZ_EXAMPLES", "60")


@pytest.fixture
def address(plain_server: Server) -> str:
    return plain_server.url


def schemathesis(address: str, folder: Path, mode: str, **environment: str) -> Counter[int]:
    """Let it test the server; returns the statuses of the predictions that it asked for."""
    har = folder / "requests.har"
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    command += ["run", f"{address}/openapi.json", "--mode", mode, "--max-examples", EXAMPLES]
    command += ["--generation-deterministic", "--no-color", "--report-har-path", str(har)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads(har.read_text())["log"]["entries"]
    asked = [e for e in entries if e["request"]["url"].endswith("/v1/predict")]
    return Counter(entry["response"]["status"] for entry in asked)


@pytest.mark.slow(reason="schemathesis asks hundreds of times")
@pytest.mark.timeout(7200)
def test_what_is_allowed_is_answered(address: str, tmp_path: Path, repository: Path) -> None:
    hooks = {"SCHEMATHESIS_HOOKS": "sensible_requests", "PYTHONPATH": str(repository / "tests")}
    statuses = schemathesis(address, tmp_path, "positive", **hooks)
    assert statuses[200] > 0.9 * statuses.total() > 10, statuses


@pytest.mark.slow(reason="schemathesis asks hundreds of times")
@pytest.mark.timeout(7200)
def test_what_is_not_allowed_is_refused(address: str, tmp_path: Path, repository: Path) -> None:
    hooks = {"SCHEMATHESIS_HOOKS": "parquet_bodies", "PYTHONPATH": str(repository / "tests")}
    statuses = schemathesis(address, tmp_path, "negative", **hooks)
    assert statuses[422] > 10, statuses
    assert not [status for status in statuses if status >= 500]
