"""The kernel of docs/adding-a-kernel.md, interpreted on the CPU, against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layer_norm import FAMILY, LayerNormProblem
from layers import H100
from ptx.launch import interpret
from references import random_inputs
from slow import slow_but

#: Largest relative difference, in the 2-norm: a few roundings to the dtype.
LARGEST = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}


@pytest.mark.parametrize(
    "words",
    slow_but(
        ("rows=1 columns=8 dtype=float32", "rows=37 columns=333"),
        (
            "rows=1 columns=8 dtype=float32",
            "rows=37 columns=333",
            "rows=67 columns=96 affine=false",
            "rows=33 columns=1000 dtype=bfloat16",
        ),
        "the interpreter takes its time",
    ),
)
def test_every_legal_config_is_correct(words: str) -> None:
    problem = LayerNormProblem.parse(words)
    inputs = random_inputs(FAMILY, problem, seed=0)
    doubles = {name: x.double() for name, x in inputs.items()}
    expected = F.layer_norm(
        doubles["in"], (problem.columns,), doubles.get("weight"), doubles.get("bias")
    )
    rows = np.flatnonzero(FAMILY.legal(problem, H100)).tolist()
    assert rows
    for row in rows:
        result = interpret(FAMILY, problem, row, inputs, H100.arch)["out"].double()
        difference = float((result - expected).norm() / expected.norm())
        assert difference < LARGEST[problem.dtype], f"config {row}"  # false for NaN
        assert torch.isfinite(result).all()
