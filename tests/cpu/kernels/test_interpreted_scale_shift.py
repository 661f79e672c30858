"""The kernel of a batch norm by known statistics: compiled for every target, and interpreted on the
CPU against PyTorch in float64."""

from __future__ import annotations

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
from torch import Tensor

from confpred.cuda.epilogue import epilogue_launch
from confpred.problem.conv2d import ACTIVATIONS, DTYPES
from confpred.problem.operation import Launch
from confpred.pytorch.pointwise import scale_shift_kernel

#: N, P, Q, K: a whole number of vectors and not, fewer and more than the threads of a small device
#: take at once.
SIZES = ((1, 1, 1, 8), (2, 3, 5, 24), (1, 7, 3, 33), (3, 9, 11, 40), (2, 5, 7, 1), (1, 3, 3, 536))
SMALL = 2  # multiprocessors: a thread makes many rounds
NAMES = ("out", "x", "scale", "shift", "residual")


def tensors(size: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(prod(size))

    def some(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) * 2 - 1) * 4

    low = getattr(torch, dtype)
    return {
        "x": some(*size).to(low), "scale": some(size[-1]), "shift": some(size[-1]),
        "residual": some(*size).to(low),
    }  # fmt: skip


def launch_of(
    size: tuple[int, ...], dtype: str, residual: bool, activation: str, sm_count: int
) -> Launch:
    kernel = scale_shift_kernel(size[-1], dtype, residual=residual, activation=activation)
    return epilogue_launch(kernel, prod(size[:-1]), size[-1], sm_count, NAMES)


def interpret(launch: Launch, inputs: dict[str, Tensor], arch: str, *, in_place: bool) -> Tensor:
    x = inputs["x"]
    operands = [
        Operand(
            "out" if in_place and name == "x" else name, t.view(torch.uint8).numpy().ravel(),
            written=True, once=in_place and name == "x",
        )
        for name, t in inputs.items()
    ]  # fmt: skip
    if not in_place:
        nothing = torch.empty_like(x).view(torch.uint8).numpy().ravel()
        operands.append(Operand("out", nothing, written=False, once=True))
    memory = _Aliased(operands) if in_place else DeviceMemory(operands)
    (step,) = launch.steps
    run_step(step, memory, arch)
    (out,) = (operand for operand in operands if operand.name == "out")
    return torch.from_numpy(out.content.copy()).view(x.dtype).view(x.shape)


class _Aliased(DeviceMemory):
    """`x` is where `out` is."""

    def address(self, name: str) -> int:
        return super().address("out" if name == "x" else name)


def wrong(found: Tensor, inputs: dict[str, Tensor], activation: str) -> int:
    t = {name: value.double() for name, value in inputs.items()}
    right = t["x"] * t["scale"] + t["shift"] + t.get("residual", 0)
    right = right if activation == "none" else getattr(F, activation)(right)
    name = str(found.dtype).removeprefix("torch.")
    bound = ROUNDING[name] * right.abs() + ABSOLUTE
    return int((~((found.double() - right).abs() <= bound)).sum())  # NaN is wrong too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_pytorch_in_float64(dtype: str, activation: str) -> None:
    for number, (size, residual) in enumerate(product(SIZES, (True, False))):
        inputs = tensors(size, dtype)
        if not residual:
            del inputs["residual"]
        launch = launch_of(size, dtype, residual, activation, (SMALL, 132)[number % 2])
        arch, in_place = ("sm_80", H100.arch)[number // 2 % 2], number % 3 == 0
        found = interpret(launch, inputs, arch, in_place=in_place)
        assert not wrong(found, inputs, activation), (size, residual)


def test_a_tensor_of_many_rounds() -> None:
    """A thread's loop ends in each of its places, and takes more than one turn."""
    for rows in (2 * 4 * 256, 2 * 4 * 256 * 4 + 77, 2 * 4 * 256 * 9 + 1):
        inputs = tensors((1, 1, rows, 8), "float16")
        launch = launch_of((1, 1, rows, 8), "float16", True, "relu", 2)
        found = interpret(launch, inputs, H100.arch, in_place=False)
        assert not wrong(found, inputs, "relu")


def test_a_wrong_result_is_seen() -> None:
    inputs = tensors((2, 3, 5, 24), "float16")
    launch = launch_of((2, 3, 5, 24), "float16", True, "silu", SMALL)
    found = interpret(launch, inputs, H100.arch, in_place=False)
    for name, x in inputs.items():
        assert wrong(found, inputs | {name: x.flip(*range(x.dim()))}, "silu"), name


def test_a_residual_that_is_absent_is_not_read() -> None:
    inputs = tensors((1, 2, 2, 8), "float32")
    del inputs["residual"]
    launch = launch_of((1, 2, 2, 8), "float32", True, "none", SMALL)
    with pytest.raises(PtxError, match="is in no operand"):
        interpret(launch, inputs, H100.arch, in_place=False)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_for_every_target(arch: str, dtype: str) -> None:
    for channels, activation in ((64, "gelu"), (33, "hardswish"), (64, "none")):
        kernel = scale_shift_kernel(channels, dtype, residual=True, activation=activation)
        registers, stack_bytes = resources(kernel, arch)
        assert registers <= 64  # four blocks of 256 threads fit a multiprocessor
        assert stack_bytes <= 32  # eight registers are spilled where a GELU follows a residual
