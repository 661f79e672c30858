"""The walk of docs/adding-a-kernel.md, step by step, as far as it needs no GPU."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import walk
from hypothesis import given
from hypothesis import strategies as st
from softmax import DTYPES, FAMILY, SoftmaxProblem

from confpred.cuda.compiler import compile_kernel, supported_archs
from confpred.errors import InvalidProblem
from confpred.families.kernel_text import file_text
from confpred.families.protocol import Family
from confpred.problem.device import KNOWN, Device
from confpred.problem.operation import Operation

EXAMPLE = Path(__file__).parents[3] / "examples" / "softmax"
MODEL = "examples/softmax/*-1"  # of the device that was measured
problems = st.builds(
    SoftmaxProblem,
    rows=st.integers(1, 2**24),
    columns=st.integers(8, 2**18) | st.integers(1, 512).map(lambda n: 8 * n),
    dtype=st.sampled_from(DTYPES),
    log=st.booleans(),
)
devices = st.sampled_from(list(KNOWN.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder to take the walk in, with the committed measurements where sampling puts
    them."""
    root = tmp_path_factory.mktemp("walk")
    (root / "examples").symlink_to(EXAMPLE.parent)
    (root / "runs").mkdir()
    shutil.copy(next(EXAMPLE.glob("*.parquet")), root / "runs" / "softmax.parquet")
    return root


@pytest.mark.parametrize("name", ["softmax.py", "softmax.cu", "launch.py"])
def test_the_blocks_are_parts_of_the_file(name: str, repository: Path) -> None:
    shown = [block.text for block in walk.blocks(repository) if block.mark == name]
    assert shown
    whole = "".join((EXAMPLE / name).read_text().split())  # a part is indented less on the page
    assert [text for text in shown if "".join(text.split()) not in whole] == []


def test_the_suite_begins_as_shown(repository: Path) -> None:
    (shown,) = (block for block in walk.blocks(repository) if block.mark == "suite.json")
    assert (EXAMPLE / "suite.json").read_text().startswith(shown.text)


def test_the_figures_are_those_of_the_files(repository: Path, folder: Path) -> None:
    page = " ".join((repository / "docs" / "adding-a-kernel.md").read_text().split())
    entries = json.loads((EXAMPLE / "suite.json").read_text())["problems"]
    of_networks = sum(bool(entry["networks"]) for entry in entries)
    assert f"{of_networks} of real networks, {len(entries) - of_networks} between" in page
    rows = pq.read_table(folder / "runs" / "softmax.parquet")
    assert f"{len(rows):,} rows" in page
    ok = [row for row in rows.to_pylist() if row["status"] == "ok" and row["family"] == FAMILY.name]
    fastest: dict[tuple[object, ...], str] = {}
    for row in sorted(ok, key=lambda row: row["time_ms"]):
        key = tuple(row[name] for name in ("rows", "columns", "dtype", "log"))
        fastest.setdefault(key, row["config"])
    best = len(set(fastest.values()))
    assert f"{len(FAMILY.configs)} configs, and {best} of them are the fastest" in page


def test_the_example_keeps_the_protocols() -> None:
    assert isinstance(FAMILY, Family)
    assert isinstance(FAMILY.operation, Operation)
    assert len(np.unique(FAMILY.configs)) == len(FAMILY.configs)
    assert not FAMILY.configs.flags.writeable


@given(problem=problems)
def test_a_problem_survives_its_text_forms(problem: SoftmaxProblem) -> None:
    assert SoftmaxProblem.parse(str(problem)) == problem
    assert SoftmaxProblem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_a_problem_without_its_sizes_is_refused() -> None:
    with pytest.raises(InvalidProblem, match="columns is missing; allowed: an integer"):
        SoftmaxProblem.parse("rows=8")


@given(problem=problems, device=devices)
def test_some_config_is_legal_and_all_such_are_described(
    problem: SoftmaxProblem, device: Device
) -> None:
    rows = np.flatnonzero(FAMILY.legal(problem, device))
    assert len(rows)
    features = FAMILY.features(problem, device, rows)
    assert features.shape == (len(rows), len(FAMILY.feature_names))
    assert np.isfinite(features).all()
    assert (FAMILY.estimate_s(problem, device, rows) >= device.roofline_s(problem)).all()
    for row in rows:
        (step,) = FAMILY.launch(problem, int(row)).steps
        assert step.grid[0] < 2**31
        threads = int(np.prod(step.block))
        assert threads % 32 == 0
        assert threads <= 1024  # the kernel's launch bounds
        config = FAMILY.configs[row]
        if config["pieces"]:
            held = config["row_threads"] * config["vector"] * config["pieces"]
            assert held >= problem.columns


@pytest.mark.slow(reason="it compiles 30 kernels")
def test_the_kernel_compiles(repository: Path, folder: Path) -> None:
    (block,) = (b for b in walk.blocks(repository) if b.mark == "run" and b.language == "python")
    walk.run(block, repository, folder)
    assert len(list(folder.rglob("*.cubin"))) >= 3 * 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_compiles(dtype: str) -> None:
    step = FAMILY.operation.reference(SoftmaxProblem(8, 8, dtype), "out")
    for arch in ("sm_80", "sm_90a", supported_archs()[-1]):
        assert b"reference_softmax" in compile_kernel(step.kernel, arch).cubin


def test_a_source_is_found_beside_its_module() -> None:
    assert (EXAMPLE / "softmax.cu").read_text().splitlines()[-1] in file_text("softmax.cu")
    with pytest.raises(FileNotFoundError, match=r"no CUDA source no_such\.cu"):
        file_text("no_such.cu")


@pytest.mark.slow(reason="folds are trained and judged")
def test_train_judge_and_predict(repository: Path, folder: Path) -> None:
    page = " ".join((repository / "docs" / "adding-a-kernel.md").read_text().split())
    told = re.search(r"it is (\S+) in the geometric mean\. .* to (\S+), .* to (\S+)\. If", page)
    assert told
    blocks = [b for b in walk.blocks(repository) if b.mark == "run" and b.language == "sh"]
    check, train, predict = blocks
    walk.run(check, repository, folder)
    said = walk.run(train, repository, folder)
    for method, figure in zip(("model", "fixed config", "roofline"), told.groups(), strict=True):
        found = re.search(rf"│ {method} +│ +([0-9.]+) │", said)
        assert found
        digits = len(figure.partition(".")[2])
        assert float(found[1]) == pytest.approx(float(figure), abs=0.6 * 10**-digits)
    said = walk.run(predict, repository, folder)
    assert re.search(r"rows=8192 columns=2048 dtype=bfloat16\n1 +predicted +softmax", said)


def test_the_committed_model_answers(repository: Path, folder: Path) -> None:
    (predict,) = (b for b in walk.blocks(repository) if "confpred predict" in b.text)
    text = predict.text.replace("runs/softmax-1", MODEL)
    said = walk.run(walk.Block("run", "sh", text), repository, folder)
    assert re.search(r"model \w+-1: with 95 % confidence", said)


def test_an_operation_that_is_not_installed_is_named() -> None:
    command = [Path(sys.executable).with_name("confpred"), "predict", "--operation", "softmax"]
    result = subprocess.run(
        [*command, "--device", "h100", "--layer", "rows=8 columns=8"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "operation='softmax' is not allowed; allowed: conv2d or batch_norm" in result.stderr


def test_a_plan_is_of_configs_of_the_operation(repository: Path, folder: Path) -> None:
    (predict,) = (b for b in walk.blocks(repository) if "confpred predict" in b.text)
    (device,) = re.findall(r"--device (\w+)", predict.text)
    config = {"row_threads": 128, "block_rows": 1, "vector": 8, "pieces": 2}
    choice = {"device": device, "problem": {"rows": 8192, "columns": 2048, "dtype": "bfloat16"}}
    choice |= {"provider": "softmax", "config": config}
    plan = {"format": "confpred-plan/3", "operation": "softmax", "choices": [choice]}
    (folder / "plan.json").write_text(json.dumps(plan))
    text = predict.text.replace("runs/softmax-1", f"{MODEL} --plan plan.json")
    said = walk.run(walk.Block("run", "sh", text), repository, folder)
    pinned = r"^1 +pinned +softmax .*\n +row_threads=128 block_rows=1 vector=8 pieces=2$"
    assert re.search(pinned, said, re.MULTILINE)
