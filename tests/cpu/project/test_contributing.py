"""CONTRIBUTING.md: its recipes are walked in copies of the repository, its other commands exist.

A comment before each block of code says how it is run: `MARKS`. A block of language ``diff`` is
applied by the test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from test_readme import FENCED, Block, run, said

from confpred.cli import cli

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = [Block(*found) for found in FENCED.findall(PAGE)]
_RECIPE = re.compile(r"^## Recipe \d: (.*?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
#: The sections of the recipes by their titles.
RECIPES = dict(_RECIPE.findall(PAGE))
#: Parts of the repository that a walk needs; models are not written to, and are large.
COPIED = (
    "confpred", "service", "kernels", "tests", "docs", "examples/softmax",
    "datasets/README.md", "pyproject.toml",
)  # fmt: skip
INSTALLED_INSIDE = ("service", "kernels", "models")
MADE = {"runs", "cache", "__pycache__", ".pytest_cache", ".hypothesis"}
PATH_ON_PAGE = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?|[\w-]+\.(?:md|toml)")


def recipe(title: str) -> tuple[str, list[Block]]:
    """Return the text of a recipe without its blocks, and these."""
    section = RECIPES[title]
    return FENCED.sub("", section), [Block(*found) for found in FENCED.findall(section)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that someone wrote, by its path in `folder`."""
    found = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in MADE]
        for path in (Path(parent) / name for name in files):
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of `COPIED`, laid out both as in the repository and as installed."""
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (tmp_path / "models").symlink_to(ROOT / "models")
    for name in INSTALLED_INSIDE:
        (tmp_path / "confpred" / name).symlink_to(tmp_path / name)
    (tmp_path / "runs").mkdir()
    return tmp_path


def run_in(copy: Path, program: str, language: str = "python") -> subprocess.CompletedProcess[str]:
    """Run `program` with the package and the helpers of the tests that are in `copy`."""
    paths = os.pathsep.join((str(copy), str(copy / "tests")))
    return run(program, copy, language, PYTHONPATH=paths, CONFPRED_CACHE_DIR=str(copy / "cache"))


def apply(diff: str, copy: Path) -> None:
    """Apply `diff`. Lines may have moved since it was written, but a hunk has to find its own."""
    done = subprocess.run(
        ["git", "apply", "-"],
        input=diff,
        cwd=copy,
        # The copy is no checkout, and git is not to take it for a part of one around it.
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stderr}\n{diff}"


def walk(title: str, copy: Path) -> list[str]:
    """Do what a recipe says, block by block; it touches the files that it lists.

    Returns:
        Standard output of each block that ran; of one that was to be refused, standard error.
    """
    before, outputs = contents(copy), []
    for block in recipe(title)[1]:
        if block.language == "diff":
            apply(block.text, copy)
        elif block.mark == "run":
            outputs.append(said(run_in(copy, block.text, block.language)))
        elif block.mark == "run: refused":
            done = run_in(copy, block.text, block.language)
            assert done.returncode == 2, done.stdout
            outputs.append(done.stderr)
    check_files(
        recipe(title)[0], copy, {path for path, _ in before.items() ^ contents(copy).items()}
    )
    return outputs


def check_files(text: str, copy: Path, touched: set[str]) -> None:
    """A recipe lists the files that it touches, and what else it names exists."""
    (listed,) = re.findall(r"^Files to touch:\n\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    items = re.split(r"^- ", listed, flags=re.MULTILINE)[1:]
    named = {path for item in items for path in paths_of(item.partition(": ")[0])}
    assert named == touched
    for path in paths_of(text):
        assert (copy / path).exists() or (ROOT / path).exists(), path


def paths_of(text: str) -> set[str]:
    spans = re.findall(r"`([^`\n]+)`", text)
    return {span for span in spans if PATH_ON_PAGE.fullmatch(span)}


# The recipes

#: The identity of each measured kernel.
DIGESTS = """
from pathlib import Path
from confpred.families.kernel_text import source_digest
for file in sorted(Path("kernels").glob("*.cu")):
    if not file.name.startswith("reference"):
        print(file.name, source_digest(file.name))
"""
#: The description of a choice.
DESCRIBE = """
import json
from confpred.service.app import create_app
from confpred.service import Settings
print(json.dumps(create_app(Settings()).openapi()["components"]["schemas"]["ChoiceReply"]))
"""


@pytest.mark.slow(reason="a recipe is walked in a copy of the repository")
def test_a_device_is_answered_for_at_once(copy: Path) -> None:
    (tested_and_predicted,) = walk("a device", copy)
    assert re.search(r"\d+ passed", tested_and_predicted)
    assert re.search(r"groups=16\n1 +transferred +(grouped_fprop|pytorch)", tested_and_predicted)


def digests(copy: Path) -> str:
    """Return the identities by which measurements know the kernels of a copy."""
    return said(run_in(copy, DIGESTS))


@pytest.mark.slow(reason="a recipe is walked in a copy of the repository")
def test_an_activation_is_computed_as_pytorch_does(copy: Path) -> None:
    before = digests(copy)
    (tested,) = walk("an activation", copy)
    assert int(re.search(r"(\d+) passed", tested)[1]) > 12
    assert "failed" not in tested
    assert digests(copy) == before


@pytest.mark.slow(reason="a recipe is walked in a copy of the repository")
@pytest.mark.parametrize(
    "forgotten",
    [
        "#define ACTIVATION_HARDSIGMOID 9",
        "static __device__ float value",
        "static __device__ float slope",
        "static __device__ Real value",
        "static __device__ Real slope",
    ],
)
def test_a_part_of_an_activation_that_is_forgotten_is_noticed(copy: Path, forgotten: str) -> None:
    diff, tests = recipe("an activation")[1]
    apply(diff.text, copy)
    added = re.findall(r"^\+(?!\+)(.*\n)", diff.text, re.MULTILINE)
    (line,) = (line for line in added if forgotten in line)
    for name in re.findall(r"^\+\+\+ b/(.*)$", diff.text, re.MULTILINE):
        (copy / name).write_text((copy / name).read_text().replace(line, ""))
    done = run_in(copy, tests.text.replace("pytest ", "pytest -x "), tests.language)
    assert done.returncode == 1, done.stdout


@pytest.mark.slow(reason="a recipe is walked in a copy of the repository")
def test_a_family_is_found(copy: Path) -> None:
    _, tested = walk("a kernel family", copy)
    assert re.search(r"\d+ passed", tested)


@pytest.mark.slow(reason="a recipe is walked in a copy of the repository")
def test_a_field_is_in_the_reply_and_its_description(copy: Path) -> None:
    (answered_and_tested,) = walk("a field of the reply", copy)
    answer, *tests = answered_and_tested.splitlines()
    ((choice,),) = json.loads(answer)["choices"]
    assert choice["operation"] == "conv2d"
    assert len(re.findall(r"\d+ passed", "\n".join(tests))) == 2
    described = said(run_in(copy, DESCRIBE))
    assert json.loads(described)["properties"]["operation"]["type"] == "string"


@pytest.mark.slow(reason="a recipe is walked in a copy of the repository")
def test_a_feature_is_refused_and_then_learned(copy: Path) -> None:
    refused, learned = walk("a feature", copy)
    assert re.search(r"models/h100\S+ was trained on other features: train it again", refused)
    assert learned == "True\n"


# The rest of the page

MARKS = {"run", "run: refused", "run: checked"}


def test_every_block_of_code_is_handled() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert not re.search(r"^(?: {4}|\t)[^ -]", FENCED.sub("", PAGE), re.MULTILINE), "indented"
    for block in BLOCKS:
        assert block.language in {"sh", "python", "diff"}, block
        assert (block.mark in MARKS) == (block.language != "diff"), block
    in_recipes = [block for title in RECIPES for block in recipe(title)[1]]
    assert [b for b in BLOCKS if b not in in_recipes and b.mark != "run: checked"] == []
    assert len(RECIPES) == 5


def commands() -> list[str]:
    """Check the commands that no walk runs: in blocks that say so, and in the text."""
    found = []
    for block in BLOCKS:
        if block.mark == "run: checked":
            found += block.text.replace("\\\n", "").splitlines()
    spans = re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGE))
    return found + [span for span in spans if re.match(r"(make|pytest|ruff|confpred) ", span)]


@pytest.mark.parametrize("command", commands())
def test_a_command_exists(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(command, comments=True)
    paths = [word for word in words if "/" in word]
    if program == "make":
        assert len(words) == 1, command
        done = subprocess.run(["make", "--dry-run", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif program == ".":
        assert words == [".venv/bin/activate"]
        assert "VENV   ?= .venv\n" in Path("Makefile").read_text()
    elif program == "pytest":
        assert paths
        assert [path for path in paths if not Path(path).exists()] == []
    elif program == "python":
        script = Path(words[0]).read_text()
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in script, option
    else:
        assert program == "confpred", command
        name, *rest = words
        found = cli.get_command(click.Context(cli), name)
        assert found is not None, name
        known = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= known
        if "--" not in "".join(rest[-1:]):  # as many words as the command takes, rightly spelled
            try:
                found.make_context(name, rest)
            except click.BadParameter as error:
                if "does not exist" not in error.message:  # the step before makes the file
                    raise


def test_a_walk_runs_the_copy_and_not_the_installation(copy: Path) -> None:
    program = "import confpred, confpred.service as s; print(confpred.__file__, s.__file__)"
    found = said(run_in(copy, program)).split()
    assert found == [f"{copy}/confpred/__init__.py", f"{copy}/confpred/service/__init__.py"]
