"""The README: its figures are the recorded ones, and what it tells a newcomer to run runs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

_RUNNABLE = re.compile(r"<!-- run -->\n```(\w+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def tables(repository: Path) -> ModuleType:
    path = repository / "benchmarks" / "readme_tables.py"
    spec = importlib.util.spec_from_file_location("readme_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_results(repository: Path) -> None:
    command = [sys.executable, repository / "benchmarks" / "readme_tables.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_marked_table_is_made_from_its_result(tables: ModuleType, tmp_path: Path) -> None:
    trip = {"p50_ms": 0.251, "p99_ms": 0.5, "requests_per_s": 4321}
    recorded = {"latency": {"a repeated problem": trip}}
    (tmp_path / "service_latency.json").write_text(json.dumps(recorded))
    text = "before\n<!-- table:service -->\nstale\n<!-- /table -->\nafter\n"
    made = tables.filled(text, tmp_path)
    assert "| a repeated problem | 0.25 | 0.50 | 4,321 |\n<!-- /table -->\nafter\n" in made
    assert "stale" not in made
    assert tables.filled(made, tmp_path) == made


def test_a_marked_table_without_its_result_is_an_error(tables: ModuleType, tmp_path: Path) -> None:
    for name, error in (("h100-cudnn", FileNotFoundError), ("no-such-table", KeyError)):
        with pytest.raises(error):
            tables.filled(f"<!-- table:{name} -->\n<!-- /table -->", tmp_path)


def test_its_links_lead_somewhere(repository: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (repository / "README.md").read_text())
    local = [target for target in targets if "://" not in target]
    assert len(local) >= 4
    assert [target for target in local if not (repository / target).exists()] == []


@pytest.fixture(scope="module")
def served_port() -> Iterator[str]:
    """The port of a running `confpred serve`."""
    command = [Path(sys.executable).with_name("confpred"), "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ports = (re.search(r"running on http://.*:(\d+)", line) for line in process.stderr)
        found = next(filter(None, ports), None)
        assert found, "the service did not start"
        yield found[1]
        process.terminate()


def runnable() -> list[tuple[str, str]]:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    return _RUNNABLE.findall(text)


def test_the_library_the_command_and_the_service_are_shown() -> None:
    shown = "".join(block for _, block in runnable())
    assert all(word in shown for word in ("Predictor.load()", "confpred predict", "/v1/predict"))


@pytest.mark.parametrize(("language", "block"), runnable())
def test_a_block_marked_runnable_runs(
    language: str, block: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if "127.0.0.1:8000" in block:  # the default port may be taken on a machine that runs tests
        block = block.replace(":8000", f":{request.getfixturevalue('served_port')}")
    command = {"python": [sys.executable, "-c"], "sh": ["sh", "-ec"]}[language]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*command, block],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "grouped_fprop" in result.stdout
