"""Imports point one way, and the predicting path loads little."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shared import python_says

import confpred

HEAVY = (
    "torch", "pandas", "sklearn", "scipy", "pyarrow", "lightgbm", "xgboost", "matplotlib",
    "cuda", "fastapi", "uvicorn", "pydantic", "rich", "httpx",
)  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        "import confpred; confpred.Predictor; confpred.Problem; confpred.get_device",
        "import confpred; confpred.Predictor.load().choose(confpred.Problem.parse("
        "'n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8'), 'h100')",
        "import sys; sys.argv = ['confpred', 'predict', '--device', 'h100', '--layer', "
        "'n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8']\n"
        "from confpred.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code",
    ],
    ids=["import", "choose", "command"],
)
def test_predicting_loads_none_of_the_heavy_packages(program: str) -> None:
    listing = "import sys; print('\\n' + ' '.join({m.partition('.')[0] for m in sys.modules}))"
    loaded = python_says("-c", f"{program}\n{listing}").splitlines()[-1].split()
    assert "confpred" in loaded
    assert sorted(set(HEAVY) & set(loaded)) == []


def test_predicting_needs_none_of_the_heavy_packages() -> None:
    """LightGBM's library is enough; what its Python part and the service need may be missing."""
    missing = sorted({*HEAVY, "starlette", "prometheus_client", "narwhals"} - {"lightgbm"})
    told = python_says(
        "-c",
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "from confpred import Predictor, Problem\n"
        "layer = Problem.parse('n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8')\n"
        "print(Predictor.load().choose(layer, 'h100').source)",
    )
    assert told == "predicted\n"


def test_every_public_name_is_there() -> None:
    missing = [name for name in confpred.__all__ if not hasattr(confpred, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'conv3d'"):
        confpred.conv3d  # noqa: B018 -- the access is the test


def test_importing_makes_no_files_and_starts_no_threads(tmp_path: Path) -> None:
    program = (
        "import os, threading\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "os.environ.update(HOME='.', XDG_CACHE_HOME='.', CONFPRED_CACHE_DIR='kernels')\n"
        "import confpred, confpred.service\n"
        "confpred.Predictor, confpred.Problem\n"
        "print(threading.active_count(), os.listdir())"
    )
    assert python_says("-c", program).strip() == "1 []"


@pytest.fixture
def installed(repository: Path, tmp_path: Path) -> Path:
    """Return a copy of the sources, laid out as they are installed."""
    target = tmp_path / "confpred"
    shutil.copytree(repository / "confpred", target)
    for folder in ("service", "kernels", "models", "datasets/suites"):
        shutil.copytree(repository / folder, target / Path(folder).name)
    return target


#: Imports that no module may have; `make lint` sees that none has.
FORBIDDEN = (
    ("problem.conv2d", "confpred.predict"), ("predict.predictor", "confpred.service"),
    ("predict.predictor", "confpred.client.clients"), ("retraining.late", "confpred.service"),
    ("service.late", "confpred.training"), ("predict.predictor", "cuda.core"),
    ("predict.predictor", "torch"), ("cli.learn", "confpred.sampler.run"),
    ("data.measurements", "confpred.cuda.driver"), ("predict.predictor", "lightgbm"),
    ("families.late", "pandas"), ("predict.predictor", "fastapi"), ("predict.predictor", "httpx"),
    ("pytorch.run.choosing", "confpred.pytorch.rewrite"), ("predict.predictor", "triton"),
)  # fmt: skip


def test_import_contracts_catch(installed: Path, repository: Path) -> None:
    for module, name in (*FORBIDDEN, ("problem.record", "confpred.problem.conv2d")):  # a circle
        with (installed / f"{module.replace('.', '/')}.py").open("a") as file:
            file.write(f"\nimport {name}\n")
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config",
         repository / "pyproject.toml"],
        cwd=installed.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode != 0
    kept = [line for line in result.stdout.splitlines() if " KEPT" in line]
    assert [line.partition(" KEPT")[0] for line in kept] == ["Only the fleet needs Ray"]
    for module, name in FORBIDDEN:
        outside = name if name.startswith("confpred.") else name.partition(".")[0]
        assert f"confpred.{module} -> {outside} (l." in result.stdout
    assert "- .record -> .conv2d (1 import)" in result.stdout
