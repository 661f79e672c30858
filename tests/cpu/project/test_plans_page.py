"""docs/plans.md: its commands run, and what needs a GPU is refused without one, as it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from test_readme import FENCED, Block, run, said

import confpred
from confpred.predict.plan import read_plan

PAGE = (Path(__file__).parents[3] / "docs" / "plans.md").read_text(encoding="utf-8")
BLOCKS = {block.mark: block for block in (Block(*found) for found in FENCED.findall(PAGE))}


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """Return a folder beside whose suites nothing lies."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "suites").symlink_to(repository / "datasets" / "suites")
    return tmp_path


def run_block(mark: str, folder: Path) -> subprocess.CompletedProcess[str]:
    text = BLOCKS[mark].text.replace('device="cuda", ', "")
    return run(text, folder, BLOCKS[mark].language)


def test_every_block_is_run() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert set(BLOCKS) == {"run", "run: gpu", "run: kernels", "file: mine.json"}


def test_the_commands_run(folder: Path) -> None:
    output = said(run_block("run", folder))
    for part in ("plan.json: ", "grouped_fprop", "today's answers", "pinned"):
        assert part in output
    assert read_plan(folder / "plan.json", "h100").choices
    assert list((folder / "prepared" / "kernels").rglob("*.cubin"))


def test_a_plan_is_written_by_hand(folder: Path) -> None:
    path = folder / "mine.json"
    path.write_text(BLOCKS["file: mine.json"].text)
    plan = read_plan(path)
    assert [device.key for device in plan.devices] == ["h100", "h200"]
    assert [choice.provider for choice in plan.choices] == ["grouped_fprop", "pytorch"]


def test_a_network_is_prepared(folder: Path) -> None:
    assert said(run_block("run: kernels", folder)) == "1 layers on h100\n"
    assert [device.key for device in read_plan(folder / "plan").devices] == ["h100"]
    assert (folder / "plan" / "manifest.json").exists()


def test_without_a_gpu_a_recording_has_nothing_to_write(folder: Path) -> None:
    """tests/gpu runs the block as shown."""
    assert BLOCKS["run: gpu"].text.count('device="cuda", ') == 2
    done = run_block("run: gpu", folder)
    assert done.returncode != 0
    assert "plan.json" in done.stderr
    assert "a convolution runs on a CUDA device; none was seen" in done.stderr
    assert not (folder / "plan.json").exists()


def test_what_it_names_exists(repository: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGE))
    names = [s.partition("(")[0] for s in spans if re.match(r"confpred\.\w", s)]
    assert names
    assert {name.partition(".")[2] for name in names} <= set(confpred.__all__)
    paths = [span for span in spans if span.startswith("confpred/")]
    assert len(paths) == 1
    assert [path for path in paths if not (repository / path).exists()] == []
