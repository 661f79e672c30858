"""The kernels of an epilogue, which follows PyTorch's own convolution in place, and of a scale and
shift: compiled for every target, and interpreted on the CPU against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from math import prod

import pytest
import torch
from activations import activate
from layers import H100
from ptx.launch import run_step
from ptx.memory import DeviceMemory, Operand
from ptx.text import PtxError
from ptxas import ARCHS, resources
from slow import slow_but
from torch import Tensor

from confpred.cuda.epilogue import epilogue_kernel, epilogue_launch
from confpred.measure.kernels import ABSOLUTE, ROUNDING
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.conv2d import DTYPES
from confpred.problem.operation import Launch
from confpred.pytorch.run.pointwise import scale_shift_kernel

#: N, P, Q, K: a whole number of vectors and not, fewer and more than the threads of a small device
#: take at once, and numbers of channels whose steps take many blocks.
SIZES = ((1, 1, 1, 8), (2, 3, 5, 24), (1, 7, 3, 33), (3, 9, 11, 40), (2, 5, 7, 1), (1, 3, 3, 536))
SMALL = 2  # multiprocessors: a thread makes many rounds
KINDS = ("epilogue", "scale and shift")
NAMES = ("out", "x", "scale", "shift", "residual")
Tensors = dict[str, Tensor]


def tensors(kind: str, size: tuple[int, ...], dtype: str, *absent: str) -> Tensors:
    """Return the inputs of a kernel, by name, without those that are absent."""
    generator = torch.Generator().manual_seed(prod(size))

    def some(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) * 2 - 1) * 4

    low = getattr(torch, dtype)
    if kind == "epilogue":
        found = {"out": some(*size).to(low), "bias": some(size[-1]).to(low)}
    else:
        found = {"x": some(*size).to(low), "scale": some(size[-1]), "shift": some(size[-1])}
    found["residual"] = some(*size).to(low)
    return {name: tensor for name, tensor in found.items() if name not in absent}


def launch_of(inputs: Tensors, activation: str, sm_count: int = SMALL) -> Launch:
    """Return the launch of the kernel that takes `inputs`."""
    first = next(iter(inputs.values()))
    (*rows, channels), dtype = first.shape, str(first.dtype).removeprefix("torch.")
    told = {"residual": "residual" in inputs, "activation": activation}
    if "out" in inputs:
        kernel = epilogue_kernel(channels, dtype, bias="bias" in inputs, **told)
        return epilogue_launch(kernel, prod(rows), channels, sm_count)
    kernel = scale_shift_kernel(channels, dtype, **told)
    return epilogue_launch(kernel, prod(rows), channels, sm_count, NAMES)


def interpret(
    launch: Launch, inputs: Tensors, arch: str = H100.arch, *, in_place: bool = False
) -> Tensor:
    """Return `out` after the kernel; the interpreter refuses any access beyond an operand."""
    first = next(iter(inputs.values()))
    operands = []
    for name, t in inputs.items():
        is_out = name == "out" or (in_place and name == "x")
        content = t.view(torch.uint8).numpy().ravel()
        operands.append(Operand("out" if is_out else name, content, written=True, once=is_out))
    if not in_place and "out" not in inputs:
        nothing = torch.empty_like(first).view(torch.uint8).numpy().ravel()
        operands.append(Operand("out", nothing, written=False, once=True))
    memory = _Aliased(operands) if in_place else DeviceMemory(operands)
    (step,) = launch.steps
    run_step(step, memory, arch)
    (out,) = (operand for operand in operands if operand.name == "out")
    return torch.from_numpy(out.content.copy()).view(first.dtype).view(first.shape)


class _Aliased(DeviceMemory):
    """`x` is where `out` is."""

    def address(self, name: str) -> int:
        return super().address("out" if name == "x" else name)


def wrong(found: Tensor, inputs: Tensors, activation: str) -> int:
    t = {name: value.double() for name, value in inputs.items()}
    if "x" in t:
        right = t["x"] * t["scale"] + t["shift"] + t.get("residual", 0)
    else:
        right = t["out"] + t.get("bias", 0) + t.get("residual", 0)
    right = activate(activation, right)
    bound = ROUNDING[str(found.dtype).removeprefix("torch.")] * right.abs() + ABSOLUTE
    return int((~((found.double() - right).abs() <= bound)).sum())  # NaN is wrong too


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_but(list(zip(KINDS, cycle(DTYPES))), product(KINDS, DTYPES), "seconds each"),
)
def test_equals_pytorch_in_float64(kind: str, dtype: str) -> None:
    absences = [(), ("residual",)]
    if kind == "epilogue":
        absences += [("bias",), ("bias", "residual")]
    cases = zip(product(SIZES, absences), cycle(ACTIVATIONS), strict=False)
    for number, ((size, absent), activation) in enumerate(cases):
        inputs = tensors(kind, size, dtype, *absent)
        launch = launch_of(inputs, activation, (SMALL, 132)[number % 2])
        in_place = kind != "epilogue" and number % 3 == 0
        arch = ("sm_80", H100.arch)[number // 2 % 2]
        found = interpret(launch, inputs, arch, in_place=in_place)
        assert not wrong(found, inputs, activation), (size, absent, activation)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_right(activation: str, kind: str) -> None:
    for size in ((2, 3, 5, 24), (1, 7, 3, 33)):
        inputs = tensors(kind, size, "float16")
        assert not wrong(interpret(launch_of(inputs, activation), inputs), inputs, activation)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_many_rounds(kind: str) -> None:
    """A thread's loop ends in each of its places, and takes more than one turn."""
    for rows in (2 * 4 * 256, 2 * 4 * 256 * 4 + 77, 2 * 4 * 256 * 9 + 1):
        inputs = tensors(kind, (1, 1, rows, 8), "float16")
        launch = launch_of(inputs, "relu", 2)
        assert launch.steps[0].grid == (8, 1, 1)
        assert not wrong(interpret(launch, inputs), inputs, "relu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_result_is_seen(kind: str) -> None:
    inputs = tensors(kind, (2, 3, 5, 24), "float16")
    launch = launch_of(inputs, "silu")
    found = interpret(launch, inputs)
    assert not wrong(found, inputs, "silu")
    for name, x in inputs.items():
        assert wrong(found, inputs | {name: x.flip(*range(x.dim()))}, "silu"), name
    (step,) = launch.steps
    beyond = replace(step, scalars=dict(step.scalars) | {"rows": 31})
    with pytest.raises(PtxError, match=r"byte .* of"):
        interpret(Launch((beyond,)), inputs)


def test_nothing_that_is_absent_is_read() -> None:
    for kind, name in (("epilogue", "bias"), ("scale and shift", "residual")):
        inputs = tensors(kind, (1, 2, 2, 8), "float32")
        launch = launch_of(inputs, "none")
        del inputs[name]
        with pytest.raises(PtxError, match="is in no operand"):
            interpret(launch, inputs)
    inputs = tensors("epilogue", (1, 2, 2, 8), "float32", "bias", "residual")
    assert torch.equal(interpret(launch_of(inputs, "none"), inputs), inputs["out"])


@pytest.mark.parametrize("channels", [1, 3, 8, 24, 320, 333, 1000, 8 * 1009, 65_535, 65_536])
@pytest.mark.parametrize("rows", [1, 49, 128 * 56 * 56, 2**31 - 1])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_step_of_the_grid_is_whole_rows(channels: int, rows: int, dtype: str) -> None:
    kernel = epilogue_kernel(channels, dtype, bias=True, residual=True, activation="none")
    (step,) = epilogue_launch(kernel, rows, channels, H100.sm_count).steps
    columns = channels // dict(step.kernel.defines)["VECTOR"]
    threads = step.grid[0] * step.block[0]
    assert threads % columns == 0
    assert threads < 2**31
    assert step.grid[0] <= max(4 * H100.sm_count, columns)
    if columns <= 4 * H100.sm_count and rows > 10**5:
        assert step.grid[0] > 2 * H100.sm_count, "the device is not filled"


@pytest.mark.parametrize("arch", slow_but((H100.arch,), ARCHS, "three compiles each"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_for_every_target(kind: str, arch: str, dtype: str) -> None:
    for channels, activation in ((64, "gelu"), (33, "hardswish"), (64, "none")):
        told = {"residual": True, "activation": activation}
        if kind == "epilogue":
            kernel, most = epilogue_kernel(channels, dtype, bias=True, **told), 0
        else:  # eight registers are spilled where a GELU follows a residual
            kernel, most = scale_shift_kernel(channels, dtype, **told), 32
        registers, stack_bytes = resources(kernel, arch)
        assert registers <= 64  # four blocks of 256 threads fit a multiprocessor
        assert stack_bytes <= most
