"""The walk of docs/adding-a-kernel.md on a real GPU: sampled, trained, chosen and launched."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import walk
from softmax import FAMILY, SoftmaxProblem

from confpred.measure.kernels import check
from confpred.problem.device import Device

#: Largest relative difference to PyTorch's result, in the 2-norm: a few roundings to the dtype.
_LARGEST = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}


@pytest.mark.parametrize(
    "words",
    [
        "rows=1 columns=8 dtype=float32",
        "rows=37 columns=333",
        "rows=67 columns=96 log=true",
        "rows=130 columns=1000 dtype=bfloat16",
        "rows=5 columns=5120",
        "rows=3 columns=65536 dtype=float32 log=true",
    ],
)
def test_every_legal_config_is_correct(words: str, device: Device) -> None:
    problem = SoftmaxProblem.parse(words)
    rows = np.flatnonzero(FAMILY.legal(problem, device)).tolist()
    outcomes = check(problem, FAMILY, rows, ordinal=0)
    assert [outcome for outcome in outcomes if outcome.status != "ok"] == []


@pytest.mark.timeout(600)
def test_from_a_suite_to_a_launch(repository: Path, tmp_path: Path) -> None:
    """Every command of the walk, with a sixth of the suite."""
    example = tmp_path / "examples" / "softmax"
    example.mkdir(parents=True)
    for name in ("softmax.py", "softmax.cu", "launch.py"):
        shutil.copy(repository / "examples" / "softmax" / name, example)
    suite = json.loads((repository / "examples" / "softmax" / "suite.json").read_text())
    suite["problems"] = suite["problems"][::6]
    (example / "suite.json").write_text(json.dumps(suite))

    commands = [
        b for b in walk.blocks(repository) if b.mark.startswith("run") and b.language == "sh"
    ]
    checked, sampled, trained, *_, launched = [
        walk.run(block, repository, tmp_path) for block in commands
    ]
    assert checked.startswith("softmax: ok; 8 problems, ")
    assert "failures: none" in sampled
    assert "regret on held-out networks" in trained
    compared = re.findall(r"torch\.(\w+): relative difference (\S+)", launched)
    assert {dtype for dtype, _ in compared} == set(_LARGEST)
    for dtype, difference in compared:
        assert float(difference) < _LARGEST[dtype]
