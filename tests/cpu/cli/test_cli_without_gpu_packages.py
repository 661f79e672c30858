"""Only `sample` needs the packages of the GPU extra."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import confpred
from sampler_rows import ROW, fill

from confpred.errors import install_command

LAYER = "n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1"
#: Packages of the extra `gpu` alone, made impossible to import.
PRELUDE = """
from importlib.machinery import PathFinder
find, absent = PathFinder.find_spec, {"cuda", "torch", "filelock", *%r}
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in absent else find(name, path, target)
PathFinder.find_spec = find_spec
"""


def without(*words: object, also: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return confpred(*words, prelude=PRELUDE % (also,))


def test_merge_needs_pyarrow_alone(tmp_path: Path) -> None:
    fill(tmp_path / "a", [ROW])
    others = ("rich", "joblib", "lightgbm", "matplotlib", "fastapi", "uvicorn")
    done = without("merge", tmp_path / "a", tmp_path / "all.parquet", also=others)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"1 rows in {tmp_path / 'all.parquet'}\n"
    done = without("merge", tmp_path / "a", tmp_path / "b.parquet", also=("pyarrow",))
    assert (done.returncode, done.stderr) == (
        1,
        f"confpred: this needs pyarrow: {install_command('data')}\n",
    )


@pytest.mark.slow(reason="every command runs in a fresh process")
@pytest.mark.parametrize(
    "command", ["predict", "explain", "plan", "train", "evaluate", "report", "serve"]
)
def test_other_commands_need_no_gpu_package(
    command: str, few_measurements: Path, tmp_path: Path
) -> None:
    words: dict[str, tuple[object, ...]] = {
        "predict": ("--device", "h100", "--layer", LAYER),
        "plan": ("export", "--device", "h100", "--layer", LAYER, "--out", tmp_path / "plan.json"),
        "train": (few_measurements, "--out", tmp_path / "model"),
        "evaluate": (few_measurements, "--json", tmp_path / "evaluation.json"),
        "explain": ("--device", "h100", "--layer", LAYER, "--plot", tmp_path / "why.png"),
        "report": (few_measurements, "--out", tmp_path / "report.html"),
        "serve": ("--help",),
    }
    done = without(command, *words[command])
    assert done.returncode == 0, done.stderr
    progress = [line.startswith("[") for line in done.stderr.splitlines()]
    assert all(progress)
    assert bool(progress) == (command in ("train", "evaluate", "report"))


def test_sample_names_its_extra(repository: Path, tmp_path: Path) -> None:
    suite = repository / "datasets" / "suites" / "smoke.json"
    done = without("sample", "--suite", suite, "--out", tmp_path / "out", "--no-pytorch")
    assert done.returncode == 1
    assert install_command("gpu") in done.stderr
    assert done.stderr.count("\n") == 1
