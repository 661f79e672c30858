"""The kernel that folds batch norms: what the host makes of tensors, interpreted on the CPU and
compared with PyTorch in float64; and compiled for every target."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layers import H100
from ptx.launch import run_kernel
from ptx.memory import DeviceMemory, Operand
from ptx.text import PtxError
from ptxas import ARCHS, resources
from torch import Tensor

from confpred.measure.kernels import ABSOLUTE, ROUNDING
from confpred.problem.operation import Step
from confpred.pytorch.run import fold as folding

_POINTERS = ("gamma", "beta", "mean", "variance", "bias", "filter", "first", "second")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(slots=True)
class Interpreted:
    """Takes the launches that go to the driver.

    Attributes:
        tensors: all that may be read, or written.
        launches: grids, so far.
    """

    arch: str = H100.arch
    tensors: list[Tensor] = field(default_factory=list)
    launches: list[tuple[int, int, int]] = field(default_factory=list)

    def launch(self, kernel, grid, threads, stream, argument: ctypes.Structure) -> None:
        self.launches.append(grid)
        operands = [
            Operand(str(place), _bytes(t), written=True, once=False)
            for place, t in enumerate(self.tensors)
        ]
        memory = DeviceMemory(operands)
        places = {t.data_ptr(): str(place) for place, t in enumerate(self.tensors)}
        for layer in argument.layer:
            for name in _POINTERS:
                at = getattr(layer, name)
                setattr(layer, name, memory.address(places[at]) if at else None)
        step = Step(folding.KERNEL, grid, (threads, 1, 1), 0, (), {})
        run_kernel(step, [bytes(argument)], memory, self.arch)
        for operand, tensor in zip(operands, self.tensors, strict=True):
            _bytes(tensor)[:] = operand.content


def _bytes(tensor: Tensor) -> np.ndarray:
    return np.asarray(torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreted]:
    machine = Interpreted()
    monkeypatch.setattr(folding, "loaded", lambda *_: None)
    monkeypatch.setattr(folding, "launch_with", machine.launch)
    return machine


def norm(k: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Weight, bias, mean and variance."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.rand(4, k, generator=generator) * 2 - 1
    some[3] = some[3].abs() + 0.1
    return [row.clone().to(dtype) for row in some]


def folded(machine: Interpreted, columns: list[list[Tensor | None]], eps, dtypes) -> list[Tensor]:
    """Return the results of `fold` by the kernel; they are poisoned before."""
    means, filters = columns[2], columns[5]
    out = [
        t.fill_(float("nan"))
        for mean, weight, dtype in zip(means, filters, dtypes, strict=True)
        for t in folding.empty(mean, weight, str(dtype).removeprefix("torch."))
    ]
    machine.tensors = [*(t for column in columns for t in column if t is not None), *out]
    folding._launch(list(zip(*columns, strict=True)), eps, out)
    return out


def right(columns: list[list[Tensor | None]], eps, place: int) -> tuple[Tensor, Tensor]:
    """Filter and bias, or scale and shift, by what PyTorch's batch norm does in float64."""
    gamma, beta, mean, variance, bias, weight = (
        None if column[place] is None else column[place].double() for column in columns
    )

    def normed(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, gamma, beta, eps=eps[place])

    k = len(mean)
    zero = torch.zeros(1, k, 1, 1).double()
    shift = normed(zero if bias is None else zero + bias.view(1, k, 1, 1)).flatten()
    scale = (normed(zero + 1) - normed(zero)).flatten()
    return scale if weight is None else weight * scale.view(k, 1, 1, 1), shift


def is_near(found: Tensor, expected: Tensor) -> bool:
    name = str(found.dtype).removeprefix("torch.")
    bound = 2 * ROUNDING[name] * expected.abs() + ABSOLUTE
    return bool(((found.double() - expected).abs() <= bound).all())  # a NaN is beyond any bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("arch", ["sm_80", H100.arch])
def test_all_kinds_of_layers_in_one_launch(interpreted, dtype, weights, arch) -> None:
    interpreted.arch = arch
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 3, 3, 2), (9, 8, 1, 1), None, (17, 1, 5, 5), None, (3, 2, 1, 7), (2, 264, 2, 2)]
    columns: list[list[Tensor | None]] = [[] for _ in range(6)]
    for place, shape in enumerate(shapes):
        k = 11 if shape is None else shape[0]
        rows = norm(k, torch.float32, place)
        rows[:2] = [row.to(weights) for row in rows[:2]]
        if place == 1:
            rows[0] = None
        if place == 2:
            rows[1] = None
        if place == 5:
            rows[:2] = [None, None]
        bias = torch.rand(k, generator=generator).to(weights) if place % 2 else None
        weight = None
        if shape is not None:
            weight = (torch.rand(shape, generator=generator) * 2 - 1).to(weights)
            if place in (0, 6):  # the latter in more vectors than a lane asks for at once
                weight = weight.contiguous(memory_format=torch.channels_last)
            if place == 3:  # every other channel of a larger tensor
                weight = weight.repeat_interleave(2, 0)[::2]
        for column, t in zip(columns, (*rows, bias, weight), strict=True):
            column.append(t)
    eps = [1e-5, 1e-3, 0.1, 1e-5, 1.0, 1e-5, 1e-3]
    out = folded(interpreted, columns, eps, [dtype] * 7)
    assert interpreted.launches == [(3, 7, 1)]
    for place, shape in enumerate(shapes):
        first, second = out[2 * place : 2 * place + 2]
        expected = right(columns, eps, place)
        assert first.dtype is second.dtype is (torch.float32 if shape is None else dtype)
        assert is_near(first, expected[0])
        assert is_near(second, expected[1])
        if shape is not None:
            assert first.is_contiguous(memory_format=torch.channels_last)


def test_more_channels_than_warps(interpreted) -> None:
    """A warp takes several channels: blocks are at most 128."""
    k = 128 * 8 + 37
    columns = [[t] for t in norm(k, torch.float32, 0)] + [[None], [torch.rand(k, 2, 1, 1)]]
    out = folded(interpreted, columns, [1e-5], [torch.float32])
    assert interpreted.launches == [(128, 1, 1)]
    assert all(map(is_near, out, right(columns, [1e-5], 0)))


def test_a_wrong_result_is_seen(interpreted) -> None:
    columns = [[t] for t in norm(9, torch.float32, 0)] + [[torch.rand(9)], [torch.rand(9, 2, 3, 1)]]
    out = folded(interpreted, columns, [1e-5], [torch.float32])
    for place in range(6):
        others = [[t.flip(0) for t in c] if i == place else c for i, c in enumerate(columns)]
        expected = right(others, [1e-5], 0)
        assert not all(map(is_near, out, expected))


def test_a_result_that_is_too_small_is_not_overrun(interpreted) -> None:
    columns = [[t] for t in norm(9, torch.float32, 0)] + [[None], [None]]
    out = [torch.empty(9), torch.empty(8)]
    interpreted.tensors = [*(c[0] for c in columns[:4]), *out]
    with pytest.raises(PtxError, match="byte 35 of"):
        folding._launch(list(zip(*columns, strict=True)), [1e-5], out)


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_a_spill_for_every_target(arch: str) -> None:
    registers, stack_bytes = resources(folding.KERNEL, arch)
    assert registers <= 128
    assert stack_bytes == 0


def test_a_launch_fits_what_every_driver_passes() -> None:
    assert ctypes.sizeof(folding._FoldLayers) <= 4096
