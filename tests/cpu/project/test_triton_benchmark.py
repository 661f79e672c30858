"""The benchmark of six Triton kernels, but for the GPU and the packages."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from shared import python_says

from benchmarks.triton.six_kernels import KERNELS, RIVALS, overall


def test_the_mean_of_all_kernels_is_geometric() -> None:
    def kernel(model: float, rival: float) -> dict:
        rivals = {name: {"geomean": rival} for name in RIVALS}
        return {"methods": {"model": {"geomean": model, "first three": 1.0}, **rivals}}

    found = overall({"one": kernel(1.0, 1.0), "two": kernel(1.21, 1.44)})
    assert found["geomean"] == pytest.approx(1.1)
    assert found["over nearest measured shape"] == pytest.approx(1.2 / 1.1, abs=1e-4)


def test_a_remembered_launch_costs_as_much_as_tritons() -> None:
    """Processor time, without a GPU; a benchmark of its own has more turns."""
    program = """
from benchmarks.host import triton_launch
triton_launch.TURNS, triton_launch.LAUNCHES = 5, 300
print(triton_launch.measure()["ratio"])
"""
    assert float(python_says("-c", program)) < 1.3


def test_each_kernel_has_its_ranges() -> None:
    tree = ast.parse(KERNELS.read_text(encoding="utf-8"))
    (ranges,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RANGES"
    )
    names = {ast.unparse(n.targets[0]) for n in tree.body if isinstance(n, ast.Assign)}
    names |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert len(ranges) == 6
    assert ranges.keys() <= names


@pytest.mark.slow(reason="models of two made-up kernels are cross-validated")
def test_measurements_become_a_table(repository: Path, tmp_path: Path) -> None:
    tests = str(repository / "tests")
    known = {"CONFPRED_FAMILIES": "made_up_kernel"}
    known["PYTHONPATH"] = os.pathsep.join((str(repository), tests))
    (tmp_path / "runs" / "product").mkdir(parents=True)
    write = "import sys, made_up_kernel; made_up_kernel.write_measurements(sys.argv[1], 12)"
    python_says("-c", write, tmp_path / "runs" / "product" / "rows-a-0.parquet", **known)
    words = ("-m", "benchmarks.triton.six_kernels", "--judge", tmp_path / "runs", "--out", tmp_path)
    assert python_says(*words, **known).startswith("product {")
    assert '"over ten configs, all tried"' in (tmp_path / "triton.json").read_text()
