"""Launches with matrix products in them, on operands that lie in an arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confpred.measure.pytorch import TorchGraph
from confpred.problem.operation import SCRATCH, Launch, Operand, Step
from confpred.products.run import Bound, Program, by_driver

Enqueue = Callable[[int, Sequence[int]], None]


class _Memory:
    """Device memory as others hand it to PyTorch (CUDA Array Interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def enqueue_of(
    launch: Launch,
    operands: Mapping[str, Operand],
    names: Sequence[str],
    load: Callable[[Step], Any],
    ordinal: int,
) -> Enqueue:
    """What enqueues `launch` on a stream, given the addresses of the operands in the order of
    `names`; `load` gives the kernel of a step. CUDA device `ordinal` becomes PyTorch's current one.

    Raises:
        CompileError, LaunchError: a kernel cannot be had.
    """

    def bind(step: Step) -> Bound:
        return by_driver(step, load(step))

    torch.cuda.set_device(ordinal)
    program = Program(launch, bind)
    views: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def tensors(addresses: Sequence[int]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, address in zip(names, addresses, strict=True):
            operand = operands.get(name)
            scratch = launch.scratch_bytes if name == SCRATCH else 0
            size = scratch if operand is None else operand.bytes
            if size and address:
                plain = torch.as_tensor(_Memory(address, size), device="cuda")
                found[name] = (
                    plain if operand is None else plain.view(getattr(torch, operand.dtype))
                )
        return found

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        key = tuple(addresses)
        if key not in views:
            views[key] = tensors(addresses)
        if torch.cuda.current_stream().cuda_stream == stream:
            program(views[key])
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                program(views[key])

    return enqueue


def graph_of(enqueue: Enqueue, slots: Sequence[Sequence[int]]) -> TorchGraph:
    """A CUDA graph of one launch on the operands of each of `slots`. PyTorch captures it, as cuBLAS
    has workspaces of PyTorch's."""

    def on_current_stream(addresses: Sequence[int]) -> None:
        enqueue(torch.cuda.current_stream().cuda_stream, addresses)

    return TorchGraph([partial(on_current_stream, slot) for slot in slots])
