"""Dense layers that one operator of PyTorch's computes: which ones, and how a graph calls them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from network_blocks import CONV, LAST, PLAIN, Around, made
from torch import nn

from confpred.problem.conv2d import Problem
from confpred.pytorch.backend import confpred as backend
from confpred.pytorch.run.library import FusedOperator, is_one_operator, takes_pixels

PRODUCT = Problem(2, 16, 9, 9, 32, 1, 1, bias=True)
RELU = Problem(2, 16, 9, 9, 32, 3, 3, padding=(1, 1), bias=True, activation="relu")


@pytest.mark.parametrize(
    ("problem", "is_one"),
    [
        (PRODUCT, True),
        (replace(PRODUCT, dtype="bfloat16"), True),
        (replace(PRODUCT, dtype="float32"), False),
        (replace(PRODUCT, k=31), False),
        (replace(PRODUCT, c=12), False),
        (replace(PRODUCT, residual=True), False),
        (replace(PRODUCT, bias=False), False),
        (replace(PRODUCT, stride=(2, 2)), False),
        (replace(PRODUCT, padding=(1, 1)), False),
        (replace(PRODUCT, activation="silu"), False),
        (RELU, True),
        (replace(RELU, residual=True), True),
        (replace(RELU, k=31, stride=(2, 2)), True),
        (replace(RELU, activation="relu6"), False),
        (replace(RELU, activation="none"), False),
        (replace(RELU, groups=2), False),
        (replace(RELU, bias=False), False),
        (replace(RELU, direction="dgrad", bias=False, activation="none"), False),
    ],
)
def test_which_layers_are_one_operator(problem: Problem, is_one: bool) -> None:
    assert is_one_operator(problem) is is_one
    assert (FusedOperator.of(problem) is not None) is is_one


def test_switches_are_followed() -> None:
    pixels = torch.zeros(2, 8, 1, 1).half(), torch.zeros(4, 8, 1, 1).half(), (0, 0), 1
    assert takes_pixels(*pixels)
    with torch.backends.cudnn.flags(enabled=False):
        assert FusedOperator.of(RELU) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert FusedOperator.of(PRODUCT) is None  # PyTorch would refuse cuBLAS
        assert not takes_pixels(*pixels)
        assert FusedOperator.of(RELU) is not None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["product", "relu", "silu"])
def test_a_norm_is_folded_where_one_operator_follows(captured, kind: str) -> None:
    captured.wins = lambda problem: False
    size = 1 if kind == "product" else 3
    layers = [nn.Conv2d(16, 32, size, bias=False), nn.BatchNorm2d(32)]
    layers += {"product": [], "relu": [nn.ReLU()], "silu": [nn.SiLU()]}[kind]
    model = nn.Sequential(*layers).eval().bfloat16().to(memory_format=LAST)
    x = torch.randn(2, 16, 9, 9, dtype=torch.bfloat16).to(memory_format=LAST)
    with torch.no_grad():
        found = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(found, model(x), rtol=0.02, atol=0.02)
    (call,) = captured.of("inference").calls(CONV)
    scale = call.args[2]
    assert (scale is None) is (kind != "silu")


def gate(norm: bool, activation: nn.Module) -> nn.Module:
    """Return squeeze-and-excite: two layers of one pixel an image."""
    down = nn.Conv2d(16, 6, 1, bias=not norm)
    norms = [nn.BatchNorm2d(6)] if norm else []
    layers = nn.Sequential(down, *norms, activation, nn.Conv2d(6, 16, 1), nn.Sigmoid())
    return made(Around(lambda m, x: x * m.layers(x.mean((2, 3), keepdim=True)), layers=layers))


@pytest.mark.parametrize(
    ("activation", "norm", "layout", "dtype"),
    [
        (nn.ReLU(), False, LAST, torch.float16),
        (nn.ReLU(), True, LAST, torch.bfloat16),
        (nn.SiLU(), False, torch.contiguous_format, torch.bfloat16),
        (nn.SiLU(), True, LAST, torch.float16),
        (nn.Tanh(), False, LAST, torch.bfloat16),
        (nn.Tanh(), True, torch.contiguous_format, torch.float16),
        (nn.ReLU(), True, LAST, torch.float32),
    ],
)
def test_one_pixel_an_image_is_a_product(captured, activation, norm, layout, dtype) -> None:
    model = gate(norm, activation).to(dtype=dtype, memory_format=layout)
    x = torch.randn(3, 16, 5, 4).to(dtype=dtype, memory_format=layout)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is not torch.float32 else {}
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for batch in (x, torch.cat([x, x])):
            torch.testing.assert_close(compiled(batch), model(batch), **close)
        torch.use_deterministic_algorithms(True)
        try:
            torch.testing.assert_close(compiled(x), model(x), **close)
        finally:
            torch.use_deterministic_algorithms(False)
    first = captured.passes[0]
    assert (first.count(PLAIN) == 0) is (dtype is not torch.float32)
