"""The kernel of docs/adding-a-kernel.md, interpreted on the CPU, against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layers import H100
from ptx.launch import interpret
from references import random_inputs
from slow import slow_but
from softmax import FAMILY, SoftmaxProblem

#: Largest relative difference of a row, in the 2-norm: a few roundings to the dtype.
LARGEST = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}


@pytest.mark.parametrize(
    "words",
    slow_but(
        ("rows=1 columns=8 dtype=float32", "rows=37 columns=333"),
        (
            "rows=1 columns=8 dtype=float32",
            "rows=37 columns=333",
            "rows=67 columns=96 log=true",
            "rows=33 columns=1000 dtype=bfloat16",
            "rows=2 columns=12300 dtype=float32 log=true",
        ),
        "the interpreter takes its time",
    ),
)
def test_every_legal_config_is_correct(words: str) -> None:
    problem = SoftmaxProblem.parse(words)
    x = random_inputs(FAMILY, problem, seed=0)["in"]
    x[0] *= 100  # exp of it is infinite
    x[-1, : 0 if problem.log else 5] = -torch.inf  # masked, as scores of attention are
    expected = (F.log_softmax if problem.log else F.softmax)(x.double(), -1)
    rows = np.flatnonzero(FAMILY.legal(problem, H100)).tolist()
    assert rows
    for row in rows:
        result = interpret(FAMILY, problem, row, {"in": x}, H100.arch)["out"].double()
        differences = (result - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(differences.max()) < LARGEST[problem.dtype], f"config {row}"  # false for NaN
        assert torch.isfinite(result).all()
