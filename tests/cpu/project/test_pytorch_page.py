"""docs/pytorch.md: its programs run, on the CPU where there is no GPU, and what it names exists."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

import torch
from test_readme import FENCED, Block, run, said

import confpred
from confpred.pytorch.backend import Options
from confpred.pytorch.eager import LEAST_MS
from confpred.pytorch.graphs import MOST_GRAPHS

PAGE = (Path(__file__).parents[3] / "docs" / "pytorch.md").read_text(encoding="utf-8")
BLOCKS = {block.mark: block for block in (Block(*found) for found in FENCED.findall(PAGE))}
SPANS = re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGE))
MOST_WORDS = 800


def output(mark: str, folder: Path, *, more: str = "") -> str:
    block = BLOCKS[mark]
    return said(run(block.text.replace('device="cuda"', 'device="cpu"') + more, folder, "python"))


def test_it_is_short() -> None:
    assert len(PAGE.split()) <= MOST_WORDS


def test_every_block_is_run() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert set(BLOCKS) == {"run: optimize", "run: enabled", "run: gpu"}
    assert {block.language for block in BLOCKS.values()} == {"python"}


def test_a_network_is_explained_and_optimized(tmp_path: Path) -> None:
    more = "print(model[0].weight.grad.norm() > 0, model._compiled_call_impl)"
    *table, shape, last = output("run: optimize", tmp_path, more=more).splitlines()
    assert last == "tensor(True) None"
    assert shape == "8 128 56 56"
    assert table[0].startswith("One step on h100, captured in 1 part: ")
    assert all(len(line) <= 120 for line in table)
    grouped, dense = table[-2:]
    assert "grouped_fprop" in grouped
    assert "1x1 -> 128" in dense


def test_a_layer_trains_while_enabled_and_pytorch_is_whole_again(tmp_path: Path) -> None:
    more = "print(torch.nn.Conv2d._conv_forward.__module__)"
    told = output("run: enabled", tmp_path, more=more).splitlines()
    assert told == ["torch.float32 64 1 7 7", torch.nn.Conv2d._conv_forward.__module__]


def test_a_call_has_its_epilogue(tmp_path: Path) -> None:
    """On tensors of the CPU; tests/gpu runs the block as shown."""
    assert BLOCKS["run: gpu"].text.count('device="cuda"') == 2
    told = output("run: gpu", tmp_path, more="print(y.dtype, *y.shape, bool((y >= 0).all()))")
    assert told == "torch.float16 32 128 56 56 True\n"


def test_what_it_names_exists(repository: Path) -> None:
    names = {re.sub(r"\(.*", "", s.partition(".")[2]) for s in SPANS if s.startswith("confpred.")}
    assert names >= {"enable", "optimize", "conv2d", "explain", "inductor_options", "Limits"}
    assert names <= set(confpred.__all__)
    paths = [span for span in SPANS if span.startswith("confpred/")]
    assert len(paths) == 6
    assert [path for path in paths if not (repository / path).exists()] == []


def test_its_options_are_those_of_the_backend() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w.]+) \|", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in fields(Options)]
    defaults = {field.name: field.default for field in fields(Options)}
    assert {n: d for n, d in rows if n != "limits"} == {
        name: str(default) for name, default in defaults.items() if name != "limits"
    }


def test_its_settings_are_those_of_enable() -> None:
    assert 'enable(plan="plan.json")' in SPANS
    assert {"plan", "max_regret", "limits"} == set(signature(confpred.enable).parameters)


def test_its_constants_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"up to {MOST_GRAPHS} sets of open sizes" in text
    assert f"more than {1e3 * LEAST_MS:.0f} us of the GPU's time" in text
