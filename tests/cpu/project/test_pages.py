"""Pages of docs/: their blocks run, without a GPU too, and what they name is in the code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch
from test_readme import FENCED, Block, run, said

import confpred
from confpred.families.registry import family_named
from confpred.predict import explain
from confpred.predict.plan import read_plan
from confpred.problem.conv2d import Problem
from confpred.products import epilogue, im2col, strassen
from confpred.pytorch import status
from confpred.pytorch.backend import Options
from confpred.pytorch.eager import LEAST_MS
from confpred.pytorch.run.graphs import MOST_GRAPHS

DOCS = Path(__file__).parents[3] / "docs"
#: The blocks of each page by their marks, all of which a test here runs.
MARKS = {
    "explaining": {"run", "run: report"},
    "plans": {"run", "run: gpu", "run: kernels", "file: mine.json"},
    "products": {"", "run: chain"},
    "programs": {"run: three"},
    "pytorch": {"run: optimize", "run: enabled", "run: gpu"},
}
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in MARKS}
MOST_WORDS = 930  # of docs/pytorch.md


def blocks(page: str) -> dict[str, Block]:
    return {block.mark: block for block in (Block(*found) for found in FENCED.findall(PAGES[page]))}


def spans(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGES[page]))


def output(page: str, mark: str, folder: Path) -> str:
    """Return what a block of commands says."""
    block = blocks(page)[mark]
    return said(run(block.text, folder, block.language))


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return what runs a block of Python in this process, with a program behind it: on the CPU,
    and with fewer images."""
    monkeypatch.chdir(tmp_path)

    def run_here(page: str, mark: str, more: str = "") -> str:
        block = blocks(page)[mark]
        assert block.language == "python"
        text = block.text.replace("torch.cuda.is_available()", "False")
        text = text.replace('device="cuda"', 'device="cpu"').replace("randn(32, ", "randn(2, ")
        exec(text + more, {"__name__": "block"})  # noqa: S102 -- the page's
        return capsys.readouterr().out

    return run_here


def link(folder: Path, repository: Path, *names: str) -> Path:
    """Return `folder`, with links to `names` of the repository."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(repository / name)
    return folder


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """Return a folder with what the commands read; nothing lies beside the suites."""
    return link(tmp_path, repository, "datasets/suites", "models", "benchmarks")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run(page: str) -> None:
    assert set(blocks(page)) == MARKS[page]
    assert "" in MARKS[page] or PAGES[page].count("```") == 2 * len(MARKS[page])


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page: str, repository: Path) -> None:
    named = {re.sub(r"\(.*", "", s) for s in spans(page) if re.match(r"confpred\.\w", s)}
    modules = {name for name in named if name.startswith("confpred.products.")}
    assert {name.partition(".")[2] for name in named - modules} <= set(confpred.__all__)
    paths = [s for s in spans(page) if re.match(r"(confpred|kernels|benchmarks|datasets)/\S+$", s)]
    assert named | set(paths)
    assert [path for path in paths if not (repository / path).exists()] == []


# Explaining


@pytest.mark.slow(reason="three commands run")
def test_explanations_are_as_the_page_says(folder: Path) -> None:
    told = output("explaining", "run", folder)
    for part in ("chosen ", "bound ", "roofline ", "PyTorch ", "rank ", "Why not ", "Nearest "):
        assert f"\n{part}" in told or f"\n{part.rjust(5)}" in told
    assert (folder / "why.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "why.json").read_text())["explanations"]


@pytest.mark.slow(reason="all measurements of both devices are read and judged")
def test_a_report_of_what_ships_is_written(repository: Path, tmp_path: Path) -> None:
    model = "h200-2026.11.29.2"  # one of them: importances take a minute a model
    folder = link(tmp_path, repository, "datasets", "benchmarks", f"models/{model}")
    written = re.search(r"report\.html: (\d+) files, ", output("explaining", "run: report", folder))
    parts = len([*repository.glob("datasets/h?00/*.parquet")])
    assert written is not None
    assert int(written[1]) > parts  # and the evaluations
    text = (folder / "report.html").read_text()
    assert text.count("<summary>") >= 20
    assert model in text


def test_the_groups_of_features_are_those_of_the_code() -> None:
    table = PAGES["explaining"].partition("| Group |")[2].partition("\n\n")[0]
    groups = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert groups == [explain.CONFIG, *explain.THEMES, explain.OTHER]


# Plans


@pytest.mark.slow(reason="commands run, and kernels are compiled")
def test_the_commands_of_plans_run(folder: Path) -> None:
    told = output("plans", "run", folder)
    for part in ("plan.json: ", "grouped_fprop", "today's answers", "pinned"):
        assert part in told
    assert read_plan(folder / "plan.json", "h100").choices
    assert list((folder / "prepared" / "kernels").rglob("*.cubin"))


def test_a_plan_is_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(blocks("plans")["file: mine.json"].text)
    plan = read_plan(tmp_path / "mine.json")
    assert [device.key for device in plan.devices] == ["h100", "h200"]
    assert [choice.provider for choice in plan.choices] == ["grouped_fprop", "pytorch"]


@pytest.mark.slow(reason="kernels are compiled")
def test_a_network_is_prepared(printed: Callable[..., str], folder: Path) -> None:
    assert printed("plans", "run: kernels") == "1 layers on h100\n"
    assert [device.key for device in read_plan(folder / "plan").devices] == ["h100"]
    assert (folder / "plan" / "manifest.json").exists()


@pytest.mark.slow(reason="a program imports PyTorch")
def test_without_a_gpu_a_recording_has_nothing_to_write(folder: Path) -> None:
    """tests/gpu runs the block as shown."""
    block = blocks("plans")["run: gpu"]
    assert block.text.count('device="cuda", ') == 2
    done = run(block.text.replace('device="cuda", ', ""), folder, block.language)
    assert done.returncode != 0
    assert "plan.json" in done.stderr
    assert "a layer runs on a CUDA device; none was seen" in done.stderr
    assert not (folder / "plan.json").exists()


# Products


def test_the_program_of_products_runs(printed: Callable[..., str]) -> None:
    assert printed("products", "run: chain") == "64 10\n"


def test_the_families_are_those_that_it_names() -> None:
    for family in (epilogue.FAMILY, strassen.FAMILY):
        assert family_named(family.name) is family
        assert f"`{family.name}`" in PAGES["products"]


def test_workspaces_are_the_familys() -> None:
    row = r"^\| C=(\d+) (\d+)x\d+, batch (\d+) \| [\d.]+x \| ([\d.]+) MiB \| ([\d.]+) MiB \|$"
    lines = re.findall(row, PAGES["products"], re.MULTILINE)
    assert len(lines) == 7
    for line in lines:
        channels, side, batch = map(int, line[:3])
        problem = Problem(batch, channels, side, side, channels, 3, 3, padding=1, dtype="float32")
        sizes, samples = im2col.FAMILY.workspace_bytes(problem), im2col.FAMILY.configs["samples"]
        found = [sizes[samples == which][0] / 2**20 for which in (1, im2col.ALL)]
        assert [f"{size:.2f}" for size in found] == list(line[3:])


def test_stated_errors_are_the_familys() -> None:
    row = r"^\| (float32|TF32|float16|bfloat16) \|.*\| ([\d.e-]+) \|$"
    rows = re.findall(row, PAGES["products"], re.MULTILINE)
    assert {name.lower(): float(told) for name, told in rows} == strassen._ERROR


# PyTorch


def test_the_page_of_pytorch_is_short() -> None:
    assert len(PAGES["pytorch"].split()) <= MOST_WORDS


@pytest.mark.slow(reason="a network is captured in training")
def test_a_network_is_explained_and_optimized(printed: Callable[..., str]) -> None:
    more = "print(model[0].weight.grad.norm() > 0, model._compiled_call_impl)"
    *table, shape, last = printed("pytorch", "run: optimize", more).splitlines()
    assert (shape, last) == ("8 128 56 56", "tensor(True) None")
    assert table[0].startswith("One step of inference on h100, captured in 1 part: ")
    assert all(len(line) <= 120 for line in table)
    depthwise, dense = (line for line in table if " fprop " in line)
    assert re.search("(depthwise|grouped)_fp", depthwise)
    assert "1x1 -> 128" in dense


def test_three_commands_tell_of_a_network(printed: Callable[..., str]) -> None:
    told = printed("programs", "run: three")
    for words in ("An H100 is assumed", "channels_last", "captured once", status.NO_GPU):
        assert words in told


def test_a_layer_trains_while_enabled_and_pytorch_is_whole_again(
    printed: Callable[..., str],
) -> None:
    more = "print(torch.nn.Conv2d._conv_forward.__module__)"
    told = printed("pytorch", "run: enabled", more).splitlines()
    assert told == ["torch.float32 64 1 7 7", torch.nn.Conv2d._conv_forward.__module__]


def test_a_call_has_its_epilogue(printed: Callable[..., str]) -> None:
    """On tensors of the CPU; tests/gpu runs the block as shown."""
    assert blocks("pytorch")["run: gpu"].text.count('device="cuda"') == 2
    more = "print(y.dtype, *y.shape, bool((y >= 0).all()))"
    assert printed("pytorch", "run: gpu", more) == "torch.float16 2 128 56 56 True\n"


def test_options_and_settings_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w.]+) \|", PAGES["pytorch"], re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in fields(Options)]
    defaults = {field.name: str(field.default) for field in fields(Options)}
    assert dict(rows) | {"limits": ""} == defaults | {"limits": ""}
    assert 'enable(plan="plan.json")' in spans("pytorch")
    assert {"plan", "max_regret", "limits"} == set(signature(confpred.enable).parameters)


def test_its_constants_are_those_of_the_code() -> None:
    text = " ".join(PAGES["pytorch"].split())
    assert f"up to {MOST_GRAPHS} sets of dynamic sizes" in text
    assert f"more than {1e3 * LEAST_MS:.0f} us of the GPU's time" in text
