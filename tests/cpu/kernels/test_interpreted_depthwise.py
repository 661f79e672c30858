"""Kernels for large depthwise filters and for channel multipliers, interpreted on the CPU, against
PyTorch in float64, at the sizes of networks' layers and at the edges."""

from __future__ import annotations

import random

import numpy as np
import pytest
from layers import CONVOLUTIONS, H100
from ptx.launch import interpret
from references import outside, random_inputs, reference
from slow import slow_but

from confpred.families.protocol import config_dict
from confpred.problem.conv2d import DIRECTIONS, Problem

LAYERS = {
    "square": "n=1 h=12 w=20 r=13 s=13 padding=6",
    "31x31": "n=1 h=9 w=17 r=31 s=31 padding=15",
    "tall": "n=2 h=20 w=9 r=51 s=5 padding=25x2 dtype=bfloat16",
    "wide": "n=1 h=9 w=33 r=5 s=51 padding=2x25",
    "line": "n=3 h=3 w=40 r=1 s=51 padding=0x25 dtype=bfloat16",
    "no padding": "n=1 h=20 w=21 r=13 s=17",
    "more padding than filter": "n=1 h=2 w=3 r=13 s=12 padding=20x15",
    "even, one side": "n=2 h=1 w=6 r=14 s=16 padding=7x8",
    "largest": "n=1 h=3 w=4 r=64 s=64 padding=32 dtype=bfloat16",
    "two blocks a side": "n=5 h=19 w=67 r=13 s=3 padding=6x1",
    # With a multiplier, so gradients only: k is such a multiple of c.
    "fastvit": "n=2 h=16 w=14 r=7 s=7 padding=3 stride=2",
    "2x2": "n=3 h=8 w=9 r=2 s=2 stride=2 dtype=bfloat16",
    "three": "n=2 h=5 w=12 r=5 s=3 stride=1x2 padding=2x1 dtype=float32",
    "no row inside": "n=2 h=1 w=2 r=11 s=9 padding=8x7",
}
TIMES = {"fastvit": 2, "2x2": 4, "three": 3, "no row inside": 2}
CASES = [(d, words) for words in LAYERS for d in DIRECTIONS[1 if words in TIMES else 0 :]]
FAST = [
    ("fprop", "square"),
    ("dgrad", "tall"),
    ("wgrad", "31x31"),
    ("wgrad", "line"),
    ("dgrad", "fastvit"),
]


@pytest.mark.parametrize(
    ("direction", "words"), slow_but(FAST, CASES, "the interpreter takes a second a case")
)
def test_layers_of_networks_and_edges_are_right(direction: str, words: str) -> None:
    kind, rng = "multiplied" if words in TIMES else "large", random.Random(words)
    family = CONVOLUTIONS[f"depthwise_{kind}_{direction}"]
    more = {"fprop": "bias=true residual=true activation=silu", "dgrad": "", "wgrad": "bias=true"}
    c = {"tall": 12, "wide": 10, "line": 21}.get(words, 24)  # accesses of each width
    problem = Problem.parse(
        f"c={c} k={c * TIMES.get(words, 1)} groups={c} direction={direction} "
        f"{LAYERS[words]} {more[direction]}"
    )
    inputs = random_inputs(family, problem, 0)
    outputs = [o for o in family.operation.operands(problem) if o.terms]
    expected = reference(problem, inputs)
    rows = np.flatnonzero(family.legal(problem, H100)).tolist()
    for arch, row in zip(("sm_80", H100.arch), rng.sample(rows, 2), strict=True):
        wrong = outside(outputs, interpret(family, problem, row, inputs, arch), expected)
        assert not wrong, f"{wrong}: {problem} {config_dict(family, row)}"
