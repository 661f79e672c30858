"""The README: its figures are the recorded ones, and every command in it is run.

A comment before each block of code says how it is run: `HANDLERS`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

import click
import pytest

import confpred
from benchmarks import tables
from confpred.cli import cli

MOST_LINES = 130
FENCED = re.compile(
    r"(?:^<!-- ((?:run|file).*?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_PIP = """
pip() { python -m pip "$@" --dry-run --no-deps --no-index --no-build-isolation 2>&1; }
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code.

    Attributes:
        mark: the comment before it, which says how it is run; empty if there is none.
        language: such as ``sh``.
        text: whole lines.
    """

    mark: str
    language: str
    text: str


README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
BLOCKS = [Block(*found) for found in FENCED.findall(README)]
_TABLES = re.compile(r"<!-- table:.*?<!-- /table -->", re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", _TABLES.sub("", FENCED.sub("", README)))


def run(
    block: str, folder: Path, language: str = "sh", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `block` in `folder` as someone who has installed confpred, and who has no GPU."""
    command = {"python": [sys.executable, "-c"], "sh": ["sh", "-ec"]}[language]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [*command, block],
        cwd=folder,
        env=os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""} | variables,
        capture_output=True,
        text=True,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Standard output of a program that was to succeed."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# The figures


def test_the_tables_are_those_of_the_results(repository: Path) -> None:
    texts = {page: (repository / page).read_text(encoding="utf-8") for page in tables.PAGES}
    assert [page for page, text in texts.items() if tables.filled(text) != text] == []


def test_every_table_of_a_page_with_results_is_made(repository: Path) -> None:
    pages = {"README.md", "docs/results.md"}
    assert pages <= set(tables.PAGES)
    for page in pages:  # other pages have tables of options too
        rest = _TABLES.sub("", (repository / page).read_text(encoding="utf-8"))
        typed = [
            line for line in rest.splitlines() if line.startswith("|") and re.search(r"\d", line)
        ]
        assert typed == [], f"{page}: a table with figures that is typed by hand"


def test_a_marked_table_is_made_from_its_result(tmp_path: Path) -> None:
    trip = {"p50_ms": 0.251, "p99_ms": 0.5, "requests_per_s": 4321}
    recorded = {"latency": {"a repeated problem": trip}}
    (tmp_path / "service_latency.json").write_text(json.dumps(recorded))
    text = "before\n<!-- table:service -->\nstale\n<!-- /table -->\nafter\n"
    made = tables.filled(text, tmp_path)
    assert "| a repeated problem | 0.25 | 0.50 | 4,321 |\n<!-- /table -->\nafter\n" in made
    assert "stale" not in made
    assert tables.filled(made, tmp_path) == made


def test_a_marked_table_without_its_result_is_an_error(tmp_path: Path) -> None:
    for name, error in (("kernels", FileNotFoundError), ("no-such-table", KeyError)):
        with pytest.raises(error):
            tables.filled(f"<!-- table:{name} -->\n<!-- /table -->", tmp_path)


# The commands


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def as_shown(block: Block, request: pytest.FixtureRequest, folder: Path) -> None:
    assert "grouped_fprop" in said(run(block.text, folder, block.language))


def with_a_server(block: Block, request: pytest.FixtureRequest, folder: Path) -> None:
    assert block.text.count("127.0.0.1:8000") == 1
    # The default port may be taken on a machine that runs tests.
    text = block.text.replace(":8000", f":{request.getfixturevalue('plain_server').port}")
    choice = json.loads(said(run(text, folder)))["choices"][0][0]
    assert choice["family"] == "grouped_fprop"


def targets_of_make(block: Block, request: pytest.FixtureRequest, folder: Path) -> None:
    """Check what the commands would do; the second runs the tests, and test_demo.py the demo."""
    repository = request.getfixturevalue("repository")
    commands = [line.partition("#")[0].split() for line in block.text.splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]
    demo, test = (said(run(f"make --dry-run {name}", repository)) for _, name in commands)
    assert "python examples/demo.py" in demo
    assert re.search("pytest .*tests/gpu", test)
    assert re.search("pytest .*tests/cpu", test)
    assert "ruff check" in test


#: Before and after the first block.
_NETWORK = """
import torch, confpred
torch.manual_seed(0)
layers = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
model = torch.nn.Sequential(*layers).eval()
images = torch.randn(2, 8, 9, 9)
with torch.no_grad():
    expected = model(images)
"""
_COMPARED = """
with torch.no_grad():
    torch.testing.assert_close(model(images), expected)
print(model._compiled_call_impl is not None)
"""


def in_a_network(block: Block, request: pytest.FixtureRequest, folder: Path) -> None:
    """Run it on the CPU, where PyTorch's operators serve; tests/gpu runs it on a GPU."""
    assert said(run(_NETWORK + block.text + _COMPARED, folder, block.language)) == "True\n"


def on_made_up_data(block: Block, request: pytest.FixtureRequest, folder: Path) -> None:
    """Run it in a folder whose measurements are few and made up; sampling ends without a GPU."""
    data = folder / "datasets"
    (data / "h100").mkdir(parents=True)
    shutil.copy(request.getfixturevalue("few_measurements"), data / "h100" / "part-1.parquet")
    (data / "suites").symlink_to(request.getfixturevalue("repository") / "datasets" / "suites")
    sample, *others = block.text.splitlines()
    assert sample.startswith("confpred sample ")
    assert sample.endswith("# needs a GPU")
    done = run(sample, folder)
    assert done.returncode == 1
    assert done.stderr.startswith("confpred: measuring needs an NVIDIA GPU")
    assert not (folder / "runs").exists()
    told = said(run("\n".join(others), folder))
    assert "regret on held-out networks" in told
    assert "time of the choice / time of the best config" in told
    assert "predicted" in told


HANDLERS = {
    "run": as_shown,
    "run: make": targets_of_make,
    "run: optimize": in_a_network,
    "run: service": with_a_server,
    "run: retrain": on_made_up_data,
}


def test_every_block_of_code_is_handled() -> None:
    """No block is left out: each is run by a handler, or is text that nobody would run."""
    assert README.count("```") == 2 * len(BLOCKS)
    assert not re.search(r"^(?: {4}|\t)[^ -]", FENCED.sub("", README), re.MULTILINE), "indented"
    assert {block.mark for block in BLOCKS if block.language != "text"} == set(HANDLERS)
    assert [block for block in BLOCKS if block.language == "text" and block.mark] == []


LONG = [pytest.mark.slow(reason="models are trained and judged")]


@pytest.mark.parametrize("block", [
    pytest.param(block, id=block.mark, marks=LONG if block.mark == "run: retrain" else ())
    for block in BLOCKS if block.mark
])  # fmt: skip
def test_a_block_of_code_runs(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    HANDLERS[block.mark](block, request, tmp_path)


def test_it_installs_as_it_says(sources: Path) -> None:
    """Dry: test_packaging.py installs the package for real, without extras."""
    commands = [span for span in SPANS if span.startswith("pip ")]
    extras_named = [f"pip install '.[{extra}]'" for extra in ("serve", "gpu", "train")]
    assert commands == ["pip install .", *extras_named]
    assert "Would install confpred-" in said(run(_PIP + commands[-1], sources))
    extras = {extra for command in commands for extra in re.findall(r"\[(\w+)\]", command)}
    assert extras <= set(metadata("confpred").get_all("Provides-Extra"))


def test_what_the_text_names_exists(repository: Path) -> None:
    """Commands and names outside of blocks."""
    rest = [span for span in SPANS if not span.startswith("pip ")]
    for span in rest:
        program, *words = span.split()
        if program == "confpred":
            assert words[0] in cli.list_commands(click.Context(cli)), span
        elif program.startswith("confpred."):
            assert program.partition(".")[2] in confpred.__all__, span
        else:
            assert program in {"make", "pip", "--json", "torch.compile"}, span
            assert words == [], span
