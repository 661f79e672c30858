"""Commands that install an optional part are right for how confpred was installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path

import pytest
import torch_versions
from torch_versions import uv

from benchmarks import tables

EXTRAS = metadata("confpred").get_all("Provides-Extra") or []
_METADATA = """Metadata-Version: 2.1
Name: confpred
Version: 1
Requires-Dist: numpy>=1.26
Provides-Extra: data
Requires-Dist: pyarrow>=15; extra == "data"
Provides-Extra: train
Requires-Dist: confpred[data]; extra == 'train'
Requires-Dist: rich[a]>=13; extra == "train"
Requires-Dist: tomli>=2; python_version < "3.11" and extra == "train"
"""


def command_in(folder: Path, extra: str) -> str:
    """Return the answer of `install_command` where only `folder` has confpred."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from confpred.errors import install_command; print(install_command(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, folder, extra],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return done.stdout.strip()


@pytest.fixture
def installed(repository: Path, tmp_path: Path) -> Path:
    """Return a folder with the modules that tell of extras, as a wheel leaves them, and their
    metadata."""
    (tmp_path / "confpred").mkdir()
    for name in ("__init__.py", "_version.py", "errors.py"):
        shutil.copy(repository / "confpred" / name, tmp_path / "confpred")
    told = tmp_path / "confpred-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(_METADATA)
    return tmp_path


@pytest.mark.slow(reason="pip builds the metadata of a copy of the repository")
def test_in_a_clone_the_clone_is_installed_again(sources: Path) -> None:
    """Dry."""
    command = command_in(sources, "train")
    assert command == f"pip install --editable {shlex.quote(f'{sources}[train]')}"
    dry = ("--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    words = [sys.executable, "-m", *shlex.split(command), *dry]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install confpred-" in done.stdout


@pytest.mark.parametrize("kind", ["confpred-1-py3-none-any.whl", "a clone"])
def test_a_source_that_is_still_there_is_installed_again(
    installed: Path, tmp_path: Path, kind: str
) -> None:
    source = tmp_path / kind
    url = f'{{"url": "{source.as_uri()}"}}'
    (installed / "confpred-1.dist-info" / "direct_url.json").write_text(url)
    assert "pyarrow" in command_in(installed, "train")  # the source is not there
    source.touch()
    assert command_in(installed, "train") == f"pip install {shlex.quote(f'{source}[train]')}"


def test_without_a_source_the_packages_are_named(installed: Path) -> None:
    said = command_in(installed, "train")
    assert shlex.split(said)[2:] == ["pyarrow>=15", "rich[a]>=13", "tomli>=2"]
    assert shlex.split(command_in(installed, "data"))[2:] == ["pyarrow>=15"]


def test_no_text_installs_confpred_by_its_name_alone(repository: Path) -> None:
    """Which no index has; and each extra that a text names is one."""
    files = [
        *(f for room in ("confpred", "service", "docs", "benchmarks", "datasets", "examples")
          for kind in ("py", "md", "toml") for f in (repository / room).rglob(f"*.{kind}")),
        *repository.glob("*.md"),
    ]  # fmt: skip
    texts = {file: file.read_text() for file in files}
    hints = [
        (file.name, hint)
        for file, text in texts.items()
        for hint in re.findall(r"pip install[^\n`]*", text)
    ]
    assert {name for name, _ in hints} >= {"README.md", "client.md", "sampling.md"}
    assert [hint for hint in hints if re.search(r"install '?confpred\b", hint[1])] == []
    named = {extra for _, hint in hints for extra in re.findall(r"'\.\[([a-z,]+)\]'", hint)}
    assert named <= set(EXTRAS)
    raised = {
        extra
        for text in texts.values()
        for extra in re.findall(r'(?:MissingExtra\(.+, |require_packages\(|needing\()"(\w+)"', text)
    }
    assert {"gpu", "train", "client", "data"} <= raised <= set(EXTRAS)


def resolved(python: str, *words: str | Path) -> dict[str, str]:
    """Return the packages that the resolver chooses; it reads metadata, and downloads no wheel."""
    where = ("--python-version", python, "--python-platform", "x86_64-manylinux_2_28")
    done = uv("pip", "compile", "--no-annotate", "--no-header", *where, *words)
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.splitlines())


@pytest.mark.slow(reason="the package index is asked for metadata of many packages")
@pytest.mark.parametrize("python", ["3.10", "3.13"])
def test_the_newest_pytorch_comes_with_one_cuda(tmp_path: Path, python: str) -> None:
    (tmp_path / "alone.in").write_text("torch")
    alone = resolved(python, tmp_path / "alone.in")
    packages = resolved(python, "--extra", "gpu", "pyproject.toml")
    assert packages["torch"] == alone["torch"]
    core = ("nvidia-cuda-nvrtc", "cuda-bindings", "cuda-toolkit")
    (cuda,) = {packages[name].partition(".")[0] for name in core}
    ends = {match[1] for name in packages if (match := re.search(r"-cu(\d+)$", name))}
    assert ends == {cuda}


@pytest.mark.slow(reason="the package index is asked for metadata of many packages")
@pytest.mark.parametrize("python", ["3.10", "3.12", "3.13"])
def test_development_is_set_up_with_any_python(python: str) -> None:
    """Tools that have left a Python behind are of the last version that knows it."""
    extras = ("--extra", "dev", "--extra", "triton", "pyproject.toml")
    packages = resolved(python, "--constraint", "constraints-dev.txt", *extras)
    assert packages["torch"].partition("+")[0] == "2.13.0"
    assert packages.keys() >= {"import-linter", "mypy", "pytest", "ruff", "schemathesis"}


@pytest.mark.slow(reason="pytest runs beside PyTorch")
def test_what_passes_with_a_pytorch_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_a(): ...\ndef test_b(): assert 0\ndef test_c(): pytest.skip('c')\n"
        "@pytest.fixture\ndef broken(): assert 0\ndef test_d(broken): pass\n"
    )
    assert torch_versions.main(["--here", "--out", str(tmp_path), str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert path.stem.removesuffix("-gpu") == version("torch").partition("+")[0]
    assert [record[name] for name in ("passed", "failed", "skipped")] == [1, 2, 1]
    assert record["failed_tests"] == ["test_some::test_b", "test_some::test_d"]
    row = f"| {record['torch']} | {record['device']} | 1 | 2 | 1 |"
    assert row in tables.TABLES["torch"][1](record)
