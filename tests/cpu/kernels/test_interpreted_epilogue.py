"""The kernel that follows PyTorch's own convolution: compiled for every target, and interpreted on
the CPU against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from layers import H100
from ptx.launch import run_step
from ptx.memory import DeviceMemory, Operand
from ptx.text import PtxError
from ptxas import ARCHS, resources
from references import ABSOLUTE, ROUNDING
from slow import slow_but

from confpred.cuda.epilogue import epilogue_kernel, epilogue_launch
from confpred.problem.conv2d import ACTIVATIONS, DTYPES
from confpred.problem.operation import Launch

#: N, P, Q, K: a whole number of vectors and not, fewer and more than the threads of a small device
#: take at once, and numbers of channels whose steps take many blocks.
SIZES = (
    (1, 1, 1, 8),
    (2, 3, 5, 24),
    (1, 7, 3, 33),
    (3, 9, 11, 40),
    (2, 5, 7, 1),
    (1, 3, 3, 8 * 67),
)
SMALL = 2  # multiprocessors: a thread makes many rounds


def tensors(size: tuple[int, ...], dtype: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(prod(size))

    def some(*shape: int) -> torch.Tensor:
        return ((torch.rand(shape, generator=generator) * 2 - 1) * 4).to(getattr(torch, dtype))

    return {"out": some(*size), "bias": some(size[-1]), "residual": some(*size)}


def launch_of(
    size: tuple[int, ...], dtype: str, bias: bool, residual: bool, activation: str, sm_count: int
) -> Launch:
    kernel = epilogue_kernel(size[-1], dtype, bias=bias, residual=residual, activation=activation)
    return epilogue_launch(kernel, prod(size[:-1]), size[-1], sm_count)


def interpret(launch: Launch, inputs: dict[str, torch.Tensor], arch: str) -> torch.Tensor:
    """Return `out` after the kernel; the interpreter refuses any access beyond an operand."""
    operands = [
        Operand(name, x.view(torch.uint8).numpy().ravel(), written=True, once=name == "out")
        for name, x in inputs.items()
    ]
    (step,) = launch.steps
    run_step(step, DeviceMemory(operands), arch)
    out = inputs["out"]
    return torch.from_numpy(operands[0].content.copy()).view(out.dtype).view(out.shape)


def expected(inputs: dict[str, torch.Tensor], activation: str) -> torch.Tensor:
    total = sum(x.double() for x in inputs.values())
    return total if activation == "none" else getattr(F, activation)(total)


def wrong(found: torch.Tensor, right: torch.Tensor, dtype: str) -> int:
    bound = ROUNDING[dtype] * right.abs() + ABSOLUTE
    return int((~((found.double() - right).abs() <= bound)).sum())  # NaN is wrong too


@pytest.mark.parametrize("dtype", slow_but(DTYPES[:1], DTYPES, "the interpreter takes its time"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_pytorch_in_float64(dtype: str, activation: str) -> None:
    for number, (size, bias, residual) in enumerate(product(SIZES, (True, False), (True, False))):
        given = tensors(size, dtype)
        inputs = {k: v for k, v in given.items() if {"bias": bias, "residual": residual}.get(k, 1)}
        launch = launch_of(size, dtype, bias, residual, activation, (SMALL, 132)[number % 2])
        found = interpret(launch, inputs, ("sm_80", H100.arch)[number // 2 % 2])
        assert not wrong(found, expected(inputs, activation), dtype), (size, bias, residual)


def test_a_tensor_of_many_rounds() -> None:
    """A thread's loop ends in each of its places, and takes more than one turn."""
    for rows in (2 * 4 * 256, 2 * 4 * 256 * 4 + 77, 2 * 4 * 256 * 9 + 1):
        size = (1, 1, rows, 8)
        inputs = tensors(size, "float16")
        launch = launch_of(size, "float16", True, True, "relu", 2)
        assert launch.steps[0].grid == (8, 1, 1)
        found = interpret(launch, inputs, H100.arch)
        assert not wrong(found, expected(inputs, "relu"), "float16")


def test_a_wrong_result_is_seen() -> None:
    size = (2, 3, 5, 24)
    inputs = tensors(size, "float16")
    launch = launch_of(size, "float16", True, True, "silu", SMALL)
    found = interpret(launch, inputs, H100.arch)
    assert not wrong(found, expected(inputs, "silu"), "float16")
    for name, x in inputs.items():
        others = inputs | {name: x.flip(*range(x.dim()))}
        assert wrong(found, expected(others, "silu"), "float16"), name
    (step,) = launch.steps
    beyond = replace(step, scalars=dict(step.scalars) | {"rows": 31})
    with pytest.raises(PtxError, match=r"byte .* of"):
        interpret(Launch((beyond,)), inputs, H100.arch)


def test_nothing_that_is_absent_is_read() -> None:
    inputs = tensors((1, 2, 2, 8), "float32")
    launch = launch_of((1, 2, 2, 8), "float32", True, False, "none", SMALL)
    with pytest.raises(PtxError, match="is in no operand"):
        interpret(launch, {"out": inputs["out"]}, H100.arch)
    launch = launch_of((1, 2, 2, 8), "float32", False, False, "none", SMALL)
    assert torch.equal(interpret(launch, {"out": inputs["out"]}, H100.arch), inputs["out"])


@pytest.mark.parametrize("channels", [1, 3, 8, 24, 320, 333, 1000, 8 * 1009, 65_535, 65_536])
@pytest.mark.parametrize("rows", [1, 49, 128 * 56 * 56, 2**31 - 1])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_step_of_the_grid_is_whole_rows(channels: int, rows: int, dtype: str) -> None:
    (step,) = launch_of((rows, channels), dtype, True, True, "none", H100.sm_count).steps
    columns = channels // dict(step.kernel.defines)["VECTOR"]
    threads = step.grid[0] * step.block[0]
    assert threads % columns == 0
    assert threads < 2**31
    assert step.grid[0] <= max(4 * H100.sm_count, columns)
    if columns <= 4 * H100.sm_count and rows > 10**5:
        assert step.grid[0] > 2 * H100.sm_count, "the device is not filled"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_without_a_spill_for_every_target(arch: str, dtype: str) -> None:
    for channels, activation in ((64, "gelu"), (33, "hardswish"), (64, "none")):
        kernel = epilogue_kernel(channels, dtype, bias=True, residual=True, activation=activation)
        registers, stack_bytes = resources(kernel, arch)
        assert registers <= 64  # four blocks of 256 threads fit a multiprocessor
        assert stack_bytes == 0
