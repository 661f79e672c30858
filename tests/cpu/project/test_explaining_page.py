"""docs/explaining.md: its commands run, and what it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_readme import FENCED, Block, run, said

import confpred
from confpred.predict import explain

PAGE = (Path(__file__).parents[3] / "docs" / "explaining.md").read_text(encoding="utf-8")
BLOCKS = {block.mark: block for block in (Block(*found) for found in FENCED.findall(PAGE))}


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """Return a folder with what the commands read."""
    for name in ("datasets", "models", "benchmarks"):
        (tmp_path / name).symlink_to(repository / name)
    return tmp_path


def test_every_block_is_run() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert set(BLOCKS) == {"run", "run: report"}


def test_explanations_are_as_the_page_says(folder: Path) -> None:
    output = said(run(BLOCKS["run"].text, folder))
    for part in ("chosen ", "bound ", "roofline ", "PyTorch ", "rank ", "Why not ", "Nearest "):
        assert f"\n{part}" in output or f"\n{part.rjust(5)}" in output
    assert (folder / "why.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "why.json").read_text())["explanations"]


@pytest.mark.slow(reason="all measurements of both devices are read and judged")
def test_a_report_of_what_ships_is_written(folder: Path) -> None:
    assert said(run(BLOCKS["run: report"].text, folder)).startswith("report.html: 7 files, ")
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
