"""PyTorch's operators that compute a dense layer with what follows it, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_pointwise import DTYPES, LAST

from confpred.problem.conv2d import Problem
from confpred.pytorch.run.library import FusedOperator

SHAPES = (
    {"n": 1, "c": 8, "h": 1, "w": 2, "k": 8, "r": 1, "s": 1},
    {"n": 3, "c": 24, "h": 13, "w": 7, "k": 40, "r": 1, "s": 1},
    {"n": 16, "c": 512, "h": 14, "w": 14, "k": 128, "r": 1, "s": 1},
    {"n": 2, "c": 3, "h": 31, "w": 29, "k": 17, "r": 7, "s": 7, "stride": (2, 2)},
    {"n": 5, "c": 64, "h": 9, "w": 9, "k": 64, "r": 3, "s": 3, "padding": (1, 1)},
    {"n": 2, "c": 32, "h": 21, "w": 11, "k": 56, "r": 3, "s": 5, "dilation": (2, 2)},
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "none"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape.values())))
def test_equals_pytorch_in_float64(
    shape: dict[str, int], residual: bool, activation: str, dtype: str
) -> None:
    p = Problem(**shape, dtype=dtype, bias=True, activation=activation, residual=residual)
    operator = FusedOperator.of(p)
    if operator is None:
        assert activation == "none"
        return
    torch.manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda").to(DTYPES[dtype])

    x = random(p.n, p.c, p.h, p.w).to(memory_format=LAST)
    weight = (random(p.k, p.c, p.r, p.s) * (p.c * p.r * p.s) ** -0.5).to(memory_format=LAST)
    bias = random(p.k)
    added = random(p.n, p.k, p.p, p.q).to(memory_format=LAST) if residual else None
    given = [t if t is None else t.clone() for t in (x, weight, bias, added)]
    torch.full((1 << 24,), torch.nan, device="cuda")  # what outputs are taken from
    (found,) = operator.run(x, weight, bias, added)
    right = F.conv2d(x.double(), weight.double(), bias.double(), p.stride, p.padding, p.dilation)
    right = right if added is None else right + added.double()
    right = right if activation == "none" else right.relu()
    assert found.shape == right.shape
    assert found.is_contiguous(memory_format=LAST)
    close = {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
    torch.testing.assert_close(found.double(), right, rtol=close, atol=close)
    for before, after in zip(given, (x, weight, bias, added), strict=True):
        assert before is None or torch.equal(before, after)
