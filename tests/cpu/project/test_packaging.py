"""The package as a user gets it: a wheel, installed without extras."""

from __future__ import annotations

import email
import json
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from cpu.project.conftest import copy_sources

#: Files of a checkout without which a source distribution is made in seconds: trees and rows.
LARGE = re.compile(r"models/.*\.txt|datasets/h.*\.parquet|benchmarks/results/.*")
LAYER = "n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8"


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output; standard error becomes part of the failure."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Return a checkout, the folder with the distributions that setuptools built in it, and what it
    said."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    named = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    for name in run(*named, cwd=repository).splitlines():
        if LARGE.fullmatch(name) or not (repository / name).exists():
            continue
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).symlink_to(repository / name)
    program = f"import setuptools.build_meta as b; b.build_sdist({str(out)!r})"
    program += f"; b.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True,
                          text=True, check=True)  # fmt: skip
    return checkout, out, done.stdout + done.stderr


def test_a_build_warns_of_nothing_and_leaves_nothing(built: tuple[Path, Path, str]) -> None:
    checkout, _, said = built
    assert "Package would be ignored" not in said
    assert "absent from the `packages`" not in said
    assert not (checkout / "build").exists()


def test_a_source_distribution_is_whole(built: tuple[Path, Path, str]) -> None:
    checkout, out, _ = built
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = (path.relative_to(checkout) for path in checkout.rglob("*.*") if path.is_file())
    tracked = {
        path.as_posix() for path in files if not path.parts[0].startswith((".", "confpred."))
    }
    assert tracked - names == set()
    assert {"CHANGELOG.md", "docs/pytorch.md", "tests/README.md", "Makefile"} <= names


def test_the_page_of_an_index_has_no_link_that_leads_nowhere(
    built: tuple[Path, Path, str], repository: Path
) -> None:
    _, out, _ = built
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
        found = email.message_from_bytes(archive.read(name))
    assert found["Description-Content-Type"] == "text/markdown"
    page = found.get_payload()
    assert page.startswith("# confpred")
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert re.findall(r"\]\((?!https)", (repository / "README.md").read_text())


def test_an_image_takes_what_a_wheel_is_built_from(repository: Path) -> None:
    first, *others = [
        line for line in (repository / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]  # fmt: skip
    taken = {line[1:] for line in others if line.startswith("!")}
    assert first == "*"
    needed = {"confpred", "service", "kernels", "models", "datasets/suites"}
    assert taken == needed | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_sources(repository, tmp_path_factory.mktemp("source"))
    out = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(repository: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ``bin`` folder of an environment that holds the wheel and what it requires, no
    more."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "install", "--constraint", repository / "constraints-dev.txt", wheel, cwd=folder)
    return folder / "bin"


@pytest.mark.slow(reason="pip builds a wheel")
def test_the_wheel_holds_sources_and_models_and_nothing_else(wheel: Path, repository: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (("confpred", "confpred"), ("service", "confpred/service")):
        for module in (repository / folder).rglob("*.py"):
            assert f"{package}/{module.relative_to(repository / folder).as_posix()}" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"confpred"}
    assert {"confpred/py.typed", "confpred/kernels/common.cuh"} <= names
    models = (path for path in repository.glob("models/**/*") if path.is_file())
    for source in (*repository.glob("kernels/*.cu*"), *models):
        if "__pycache__" in source.parts:
            continue
        assert f"confpred/{source.relative_to(repository).as_posix()}" in names
    suites = {f"confpred/suites/{file.name}" for file in repository.glob("datasets/suites/*.json")}
    assert {"confpred/problem/devices.json", *suites} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow(reason="it installs the wheel and what that requires")
@pytest.mark.timeout(600)
def test_a_bare_installation_predicts(bare: Path, tmp_path: Path) -> None:
    """No GPU, torch, scikit-learn, pandas or web stack: the base dependencies are enough."""
    installed = json.loads(run(bare / "python", "-m", "pip", "list", "--format=json", cwd=tmp_path))
    names = {package["name"].lower() for package in installed}
    assert names.isdisjoint({"torch", "scikit-learn", "pandas", "pyarrow", "cuda-core"})
    assert names.isdisjoint({"fastapi", "starlette", "pydantic", "uvicorn", "prometheus-client"})
    run(bare / "python", "-c", "import confpred.service, confpred.kernels", cwd=tmp_path)
    choice = run(
        bare / "confpred", "predict", "--layer", LAYER, "--device", "h100", "--json", cwd=tmp_path
    )
    assert json.loads(choice)
    assert "serve" in run(bare / "confpred", "--help", cwd=tmp_path)
    assert "--port" in run(bare / "confpred", "serve", "--help", cwd=tmp_path)
    token = ("token", "--tokens", tmp_path / "tokens.json", "mine")
    assert run(bare / "confpred", *token, cwd=tmp_path).startswith("confpred_")


@pytest.mark.slow(reason="it installs the wheel and what that requires")
@pytest.mark.timeout(600)
def test_serving_names_its_extra_in_one_line(bare: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bare / "confpred", "serve"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("confpred: this needs fastapi and uvicorn and ")
    assert "[serve]" in done.stderr


@pytest.mark.slow(reason="it installs the wheel and what that requires")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "program",
    [
        "from confpred.cuda.compiler import nvrtc_version; nvrtc_version()",
        "import confpred; confpred.conv2d",
    ],
)
def test_the_hint_for_what_is_missing_is_a_command_that_works(
    bare: Path, wheel: Path, tmp_path: Path, program: str
) -> None:
    """The wheel is known to pip by its place, as no index has it."""
    result = subprocess.run(
        [bare / "python", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "MissingExtra" in result.stderr
    hint = re.search(r"pip install .*", result.stderr)
    assert hint is not None
    _, _, what = shlex.split(hint[0])
    assert what == f"{wheel}[gpu]"
    dry = ("--dry-run", "--no-deps", "--no-index", "--ignore-installed")
    said = run(bare / "python", "-m", "pip", "install", *dry, what, cwd=tmp_path)
    assert "Would install confpred-" in said
