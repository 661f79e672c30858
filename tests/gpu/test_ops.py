"""`confpred.conv2d` as its users call it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import confpred

SHAPE = {"padding": 1, "groups": 8}


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 28, 28, device="cuda", dtype=torch.float16)
    weight = torch.randn(64, 8, 3, 3, device="cuda", dtype=torch.float16)
    bias = torch.randn(64, device="cuda", dtype=torch.float16)
    return (*(t.to(memory_format=torch.channels_last) for t in (x, weight)), bias)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_equals_pytorch(layer, activation) -> None:
    x, weight, bias = layer
    expected = F.conv2d(x.float(), weight.float(), bias.float(), **SHAPE)
    if activation:
        expected = getattr(F, activation)(expected)
    out = confpred.conv2d(x, weight, bias, activation=activation, **SHAPE)
    close(out.float(), expected)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_uses_our_kernel_and_says_so(layer, caplog) -> None:
    x, weight, _ = layer
    confpred.use_predictor(confpred.Predictor.load())
    with caplog.at_level(logging.DEBUG, logger="confpred.ops"):
        confpred.conv2d(x, weight, **SHAPE)
    assert "grouped_fprop" in caplog.text


@pytest.mark.parametrize(
    ("x_change", "kwargs"),
    [
        (lambda x: x.contiguous(), {}),  # NCHW
        (lambda x: x.float(), {}),  # a dtype without a kernel
        (lambda x: x, {"stride": 2}),  # a stride without a kernel
        (lambda x: x[:, :, 1:], {}),  # a view with gaps
    ],
    ids=["nchw", "float32", "stride", "view"],
)
def test_everything_else_goes_to_pytorch(layer, x_change, kwargs) -> None:
    x, weight, bias = layer
    x = x_change(x)
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    out = confpred.conv2d(x, weight, bias, **SHAPE, **kwargs)
    close(out, F.conv2d(x, weight, bias, **SHAPE, **kwargs))


def test_a_misaligned_input_goes_to_pytorch(layer) -> None:
    x, weight, _ = layer
    storage = torch.randn(x.numel() + 1, device="cuda", dtype=torch.float16)
    shifted = storage[1:].view(4, 28, 28, 64).permute(0, 3, 1, 2)
    close(confpred.conv2d(shifted, weight, **SHAPE), F.conv2d(shifted, weight, **SHAPE))


def test_a_filter_in_pytorchs_default_layout_is_taken(layer) -> None:
    x, weight, _ = layer
    out = confpred.conv2d(x, weight.contiguous(), **SHAPE)
    close(out, confpred.conv2d(x, weight, **SHAPE))


def test_runs_on_the_current_stream(layer) -> None:
    x, weight, _ = layer
    expected = confpred.conv2d(x, weight, **SHAPE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would overtake this
        doubled = x * 2
        out = confpred.conv2d(doubled, weight, **SHAPE)
    stream.synchronize()
    close(out, 2 * expected)


def test_many_threads_may_launch_one_kernel(layer) -> None:
    x, weight, _ = layer
    inputs = [torch.randn_like(x) for _ in range(8)]
    expected = [F.conv2d(t, weight, **SHAPE) for t in inputs]

    def launch(index: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [confpred.conv2d(inputs[index], weight, **SHAPE) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return outs

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(inputs)) as threads:
        for outs, right in zip(threads.map(launch, range(len(inputs))), expected, strict=True):
            for out in outs:
                close(out, right)


def test_is_captured_by_a_cuda_graph(layer) -> None:
    x, weight, _ = layer
    confpred.conv2d(x, weight, **SHAPE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = confpred.conv2d(x, weight, **SHAPE)
    x.copy_(torch.randn_like(x))
    graph.replay()
    close(out, F.conv2d(x, weight, **SHAPE))


def test_gradients_equal_pytorchs(layer) -> None:
    x, weight, bias = (t.float().half().requires_grad_() for t in layer)
    confpred.conv2d(x, weight, bias, activation="silu", **SHAPE).square().sum().backward()
    ours = [t.grad.clone() for t in (x, weight, bias)]
    for t in (x, weight, bias):
        t.grad = None
    F.silu(F.conv2d(x, weight, bias, **SHAPE)).square().sum().backward()
    for mine, theirs in zip(ours, (x.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


def test_compiles_without_a_graph_break(layer) -> None:
    x, weight, bias = layer

    def block(x: torch.Tensor) -> torch.Tensor:
        return confpred.conv2d(x, weight, bias, activation="relu", **SHAPE) + x

    close(torch.compile(block, fullgraph=True)(x), block(x))


def test_passes_pytorchs_checks_of_a_custom_operator(layer) -> None:
    x, weight, bias = layer
    arguments = (x, weight, bias, [1, 1], [1, 1], 8, "none")
    assert confpred.conv2d  # loads the module that registers the operator
    torch.library.opcheck(torch.ops.confpred.conv2d, arguments)


def test_under_autocast(layer) -> None:
    x, weight, bias = layer
    with torch.autocast("cuda", dtype=torch.float16):
        out = confpred.conv2d(x.float(), weight.float(), bias.float(), **SHAPE)
    assert out.dtype is torch.float16
    close(out, confpred.conv2d(x, weight, bias, **SHAPE))


_FIRST_LAUNCH = """
import torch, confpred
from confpred.cuda import compiler
compiled = []
compile_ = compiler._compile
compiler._compile = lambda *a: compiled.append(a) or compile_(*a)
x = torch.randn(4, 64, 28, 28, device="cuda", dtype=torch.float16)
x = x.to(memory_format=torch.channels_last)
w = torch.randn(64, 8, 3, 3, device="cuda", dtype=torch.float16)
confpred.conv2d(x, w, padding=1, groups=8)
torch.cuda.synchronize()
print(len(compiled))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"CONFPRED_CACHE_DIR": str(tmp_path)}
    compiles = [
        subprocess.run(
            [sys.executable, "-c", _FIRST_LAUNCH],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert compiles == ["1", "0"]
