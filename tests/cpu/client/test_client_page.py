"""docs/client.md: its blocks run against a real service, and its tables tell all settings."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from served import Server

from confpred.client import AsyncClient, Client, served

FENCED = re.compile(r"(?:^<!-- (run.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = (Path(__file__).parents[3] / "docs" / "client.md").read_text(encoding="utf-8")
BLOCKS = [(mark, text) for mark, language, text in FENCED.findall(PAGE) if language == "python"]
ROWS = [
    [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


@pytest.mark.parametrize(("mark", "text"), BLOCKS, ids=range(len(BLOCKS)))
def test_the_blocks_run(
    mark: str, text: str, plain_server: Server, model_folder: Path, tmp_path: Path
) -> None:
    assert mark.startswith("run")
    assert "http://127.0.0.1:8000" in text
    text = text.replace("http://127.0.0.1:8000", plain_server.url)
    done = subprocess.run(
        [sys.executable, "-c", text.replace("load()", f"load({str(model_folder)!r})")],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("CONFPRED")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or (tmp_path / "plan.json").exists()


def test_every_setting_is_in_the_table_with_its_default() -> None:
    documented = {row[0]: row[1] for row in ROWS if not row[0].startswith("CONFPRED")}
    for kind in (Client, AsyncClient):
        told = inspect.signature(kind).parameters
        assert list(documented) == list(told)
        for name, parameter in told.items():
            default = parameter.default
            assert documented[name] == ("" if default is parameter.empty else str(default))


def test_every_variable_is_in_the_table_with_its_default() -> None:
    documented = {row[0]: row[1] for row in ROWS if row[0].startswith("CONFPRED")}
    assert documented == {
        "CONFPRED_URL": "",
        served.TOKEN: "",
        served.PATIENCE: str(served.DEFAULT_PATIENCE_MS),
    }
