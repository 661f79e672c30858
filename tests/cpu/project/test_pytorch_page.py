"""docs/pytorch.md: its programs run, on the CPU where there is no GPU, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_readme import FENCED, Block, run, said

import confpred

PAGE = (Path(__file__).parents[3] / "docs" / "pytorch.md").read_text(encoding="utf-8")
BLOCKS = {block.mark: block for block in (Block(*found) for found in FENCED.findall(PAGE))}
SPANS = re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGE))


def output(mark: str, folder: Path, *, more: str = "") -> str:
    block = BLOCKS[mark]
    return said(run(block.text.replace('device="cuda"', 'device="cpu"') + more, folder, "python"))


def test_every_block_is_run() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert set(BLOCKS) == {"run: enabled", "run: optimized", "run: gpu"}
    assert {block.language for block in BLOCKS.values()} == {"python"}


def test_a_layer_trains_while_enabled_and_pytorch_is_whole_again(tmp_path: Path) -> None:
    more = "print(torch.nn.functional.conv2d.__module__)"
    told = output("run: enabled", tmp_path, more=more).splitlines()
    assert told[0] == "torch.float32 64 1 7 7"
    assert told[1:] == [str(torch.nn.functional.conv2d.__module__)]


def test_a_network_is_explained_and_optimized(tmp_path: Path) -> None:
    *table, last = output("run: optimized", tmp_path).splitlines()
    assert last == "8 128 56 56"
    rows = [line.split() for line in table[1:-1]]
    assert [row[0] for row in rows] == ["0", "3"]
    assert "bias=true activation=silu" in table[1]
    assert table[2].endswith("dense layers were never sampled")
    assert table[-1].startswith("sum of 1 on h100: ")


def test_a_call_has_its_epilogue(tmp_path: Path) -> None:
    """On tensors of the CPU; tests/gpu runs the block as shown."""
    assert BLOCKS["run: gpu"].text.count('device="cuda"') == 2
    told = output("run: gpu", tmp_path, more="print(y.dtype, *y.shape, bool((y >= 0).all()))")
    assert told == "torch.float16 32 128 56 56 True\n"


def test_what_it_names_exists(repository: Path) -> None:
    names = {span.partition(".")[2].partition("(")[0] for span in SPANS if "confpred." in span[:9]}
    assert names >= {"enable", "optimize", "conv2d", "explain", "load_bundle"}
    assert names <= set(confpred.__all__)
    paths = [span for span in SPANS if span.startswith("confpred/")]
    assert len(paths) == 4
    assert [path for path in paths if not (repository / path).exists()] == []


@pytest.mark.parametrize("setting", ["wait=True", "verify=3", 'plan="mine.json"'])
def test_its_settings_are_those_of_enable(setting: str) -> None:
    from inspect import signature

    assert any(f"enable({setting})" in span for span in SPANS)
    assert setting.partition("=")[0] in signature(confpred.enable).parameters
