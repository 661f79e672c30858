"""docs/explaining.md: its commands run, and what it names exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import confpred
from confpred.predict import explain

FENCED = re.compile(r"(?:^<!-- (run.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = (Path(__file__).parents[3] / "docs" / "explaining.md").read_text(encoding="utf-8")
BLOCKS = {mark: text for mark, _, text in FENCED.findall(PAGE)}


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """A folder with what the commands read."""
    for name in ("datasets", "models", "benchmarks"):
        (tmp_path / name).symlink_to(repository / name)
    return tmp_path


def run(mark: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", BLOCKS[mark]],
        cwd=folder,
        env=os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_is_run() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert set(BLOCKS) == {"run", "run: report"}


def test_explanations_are_as_the_page_says(folder: Path) -> None:
    said = run("run", folder)
    for part in ("chosen ", "bound ", "roofline ", "PyTorch ", "rank ", "Why not ", "Nearest "):
        assert f"\n{part}" in said or f"\n{part.rjust(5)}" in said
    assert (folder / "why.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "why.json").read_text())["explanations"]


@pytest.mark.slow(reason="all measurements of both devices are read and judged")
def test_a_report_of_what_ships_is_written(folder: Path) -> None:
    assert run("run: report", folder).startswith("report.html: 7 files, ")
    text = (folder / "report.html").read_text()
    assert text.count("<summary>") >= 20
    assert "h200-2026.11.24" in text


def test_what_it_names_exists(repository: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGE))
    names = [s.partition("(")[0] for s in spans if re.match(r"confpred\.\w", s)]
    assert {name.partition(".")[2] for name in names} <= set(confpred.__all__)
    assert all((repository / s).exists() for s in spans if s.startswith("confpred/"))


def test_the_groups_of_features_are_those_of_the_code() -> None:
    table = PAGE.partition("| Group |")[2].partition("\n\n")[0]
    groups = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert groups == [explain.CONFIG, *explain.THEMES, explain.OTHER]
