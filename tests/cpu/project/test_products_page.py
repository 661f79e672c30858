"""docs/products.md: its program runs, and its figures are those of the code."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from test_readme import FENCED, Block, run, said

from confpred.families.protocol import Family
from confpred.problem.conv2d import Problem
from confpred.products import epilogue, im2col, strassen

PAGE = (Path(__file__).parents[3] / "docs" / "products.md").read_text(encoding="utf-8")
BLOCKS = [Block(*found) for found in FENCED.findall(PAGE)]


def test_the_program_runs(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if block.mark == "run: chain")
    assert said(run(block.text, tmp_path, "python")) == "64 10\n"


def test_the_families_are_those_that_it_names(repository: Path) -> None:
    (line,) = re.findall(r"^export CONFPRED_FAMILIES=(.*)$", PAGE, re.MULTILINE)
    assert line.split(",") == [module.__name__ for module in (im2col, epilogue, strassen)]
    for family in (epilogue.FAMILY, strassen.FAMILY):
        assert isinstance(family, Family)
        assert f"`{family.name}`" in PAGE
    for path in re.findall(r"`((?:confpred|kernels|benchmarks|datasets)/[^`]+)`", PAGE):
        assert (repository / path).exists(), path


def test_workspaces_are_the_familys() -> None:
    lines = re.findall(
        r"^\| C=(\d+) (\d+)x\d+, batch (\d+) \| [\d.]+x \| ([\d.]+) MiB \| ([\d.]+) MiB \|$",
        PAGE,
        re.MULTILINE,
    )
    assert len(lines) == 7
    for line in lines:
        channels, side, batch = map(int, line[:3])
        problem = Problem(batch, channels, side, side, channels, 3, 3, padding=1, dtype="float32")
        sizes = im2col.FAMILY.workspace_bytes(problem)
        samples = im2col.FAMILY.configs["samples"]
        for told, which in zip(line[3:], (1, im2col.ALL), strict=True):
            (size, *_) = islice(sizes[samples == which], 1)
            assert f"{size / 2**20:.2f}" == told


def test_stated_errors_are_the_familys() -> None:
    rows = re.findall(r"^\| (float32|TF32|float16|bfloat16) \|.*\| ([\d.e-]+) \|$", PAGE, re.M)
    assert len(rows) == 4
    for name, told in rows:
        assert float(told) == strassen._ERROR["tf32" if name == "TF32" else name]
