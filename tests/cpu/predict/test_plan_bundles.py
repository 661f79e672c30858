"""A plan and its kernels in one folder: a start in another process asks neither a model nor a
compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from confpred.cuda import bundles
from confpred.cuda.epilogue import epilogue_kernel
from confpred.errors import CompileError, DataError, InvalidInput, StorageError
from confpred.families.candidate import Candidate
from confpred.families.registry import all_families
from confpred.predict.bundles import open_bundle, write_bundle
from confpred.predict.choice import Choice
from confpred.predict.plans import Plan, plan_of, read_plan
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.operation import KernelSpec

DEPTHWISE = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 groups=64 padding=1")
DENSE = Problem.parse("n=8 c=64 h=28 w=28 k=64 r=3 s=3 bias=true activation=relu")
EXTRA = epilogue_kernel(64, "float16", bias=True, residual=False, activation="relu")
START = """
import sys
from pathlib import Path

from confpred.cuda import compiler
from confpred.predict.bundles import open_bundle
from confpred.problem.conv2d import Problem

def refuse(*_):
    sys.exit("the compiler is asked")

compiler._compile = compiler.nvrtc_version = refuse
predictor = open_bundle(Path(sys.argv[1]), "h100")
import confpred.model.folder
confpred.model.folder.load_model = lambda folder: sys.exit(f"{folder} is loaded")
choice = predictor.choose(Problem.parse(sys.argv[2]), "h100")
from confpred.families.registry import all_families
launch = all_families()[choice.provider].launch(choice.problem, choice.config_id)
assert all(compiler.compile_kernel(step.kernel, "sm_90a").cached for step in launch.steps)
print(choice.source, choice.provider, choice.config_id)
"""


def plan() -> Plan:
    row = int(
        np.flatnonzero(all_families()["depthwise_fprop"].legal(DEPTHWISE, get_device("h100")))[0]
    )
    return plan_of(
        [
            Choice(DEPTHWISE, "h100", "predicted", Candidate("depthwise_fprop", row), 0.01),
            Choice(DENSE, "h100", "fallback"),
        ]
    )


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for bundle in bundles._opened:
        bundles.close_kernels(bundle)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "made"
    write_bundle(plan(), folder, [EXTRA, EXTRA])
    return folder


def test_the_folder_is_whole_and_small(made: Path) -> None:
    files = sorted(path.name for path in made.iterdir())
    assert files == ["kernels", "manifest.json", "plan.json"]
    assert len(list(made.rglob("*.cubin"))) == 2
    assert read_plan(made / "plan.json") == plan()
    assert str(made) not in (made / "manifest.json").read_text()


def test_another_process_starts_without_a_compiler_or_a_model(made: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(made, tmp_path / "elsewhere")
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", START, str(moved), str(DEPTHWISE)],
        env=os.environ | {"CONFPRED_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = plan().choices[0].config_id
    assert done.stdout == f"pinned depthwise_fprop {row}\n"
    assert done.stderr == ""
    assert not cache.exists()


def test_a_bundle_for_something_else_is_refused_and_not_opened(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"plan\.json: device='h100' is not allowed.* h200"):
        open_bundle(made, "h200")
    with pytest.raises(DataError, match="cannot read"):
        open_bundle(tmp_path / "none", "h100")
    moved = shutil.copytree(made, tmp_path / "moved")
    for name in ("manifest.json", "plan.json"):
        text = (moved / name).read_text()
        digest = bundles.source_digest("depthwise.cu")
        assert digest in text
        (moved / name).write_text(text.replace(digest, "0" * 16))
        with pytest.raises(
            DataError, match=rf"{name} .*of other kernels|{name} was made for other"
        ):
            open_bundle(moved, "h100")
        (moved / name).write_text(text)
    (moved / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_bundle(moved, "h100")
    assert bundles._opened == ()


def test_nothing_is_left_of_what_fails(made: Path, tmp_path: Path) -> None:
    broken = KernelSpec("epilogue.cu", "epilogue", (("DTYPE", "DTYPE_FLOAT16"),))
    with pytest.raises(CompileError):
        write_bundle(plan(), tmp_path / "made", [broken])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="made"):
        write_bundle(plan(), made)
