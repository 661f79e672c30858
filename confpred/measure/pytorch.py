"""Timing PyTorch's operator, under the protocol that times confpred kernels.

Where a residual or an activation follows a convolution, confpred's epilogue kernel
(`confpred.pytorch.run.pointwise`) is timed with PyTorch's convolution: a user gets both where
PyTorch's operator is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.epilogue import epilogue_of, left_to_pytorch
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.launch.runner import Enqueue, Runner, bound, workspaces
from confpred.measure.timing import Outcome, launches_a_replay, time_interleaved
from confpred.problem.conv2d import Problem
from confpred.problem.operation import Operand, Operation, Prepared
from confpred.problem.record import Record


class TorchGraph:
    """A PyTorch CUDA graph in the form that `time_interleaved` replays.

    Args:
        calls: the launches of one replay; each must use operands of its own, and what they return
            is kept, so that their outputs are distinct too.
    """

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls[0]()  # libraries choose algorithms and make handles outside of the capture
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = [call() for call in calls]

    def launch(self, stream: Any) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.handle))):
            self._graph.replay()


class Evictor:
    """Empties the L2 cache by reading a buffer larger than it; leaves no dirty lines behind."""

    def __init__(self, l2_bytes: int) -> None:
        self._buffer = torch.zeros(3 * l2_bytes // 4, device="cuda")

    def __call__(self, stream: Any) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.handle))):
            self._buffer.sum()


def operands(operation: Operation, problem: Record, copies: int) -> list[dict[str, Tensor]]:
    """Return `copies` sets of random inputs by name on the current device, prepared for PyTorch's
    call."""
    inputs = [o for o in operation.operands(problem) if not o.terms]

    def filled(o: Operand) -> Tensor:
        empty = torch.empty(o.shape, dtype=getattr(torch, o.dtype), device="cuda")
        return empty.uniform_(o.center - o.scale, o.center + o.scale)

    sets = [{o.name: filled(o) for o in inputs} for _ in range(copies)]
    return (
        [operation.prepared(problem, s) for s in sets] if isinstance(operation, Prepared) else sets
    )


def copies_for(problem: Record, launches: int, l2_bytes: int) -> int:
    """Return how many operand sets keep a replay of `launches` from finding its operands in L2."""
    return max(1, min(launches, -(-3 * l2_bytes // problem.minimum_bytes)))


def measure_pytorch(
    operation: Operation, problem: Record, *, ordinal: int, seed: int, mode: str = "benchmark"
) -> Outcome:
    """Time PyTorch's operator.

    Args:
        operation, problem: what to compute.
        ordinal: CUDA device.
        seed: of the order of the timed rounds.
        mode: ``benchmark``, where PyTorch tries cuDNN's algorithms and keeps the fastest, or
            ``heuristics``, its default. On most layers they are about as fast; on some the first
            is several times as fast, and on a few it is slower. PyTorch keeps the algorithm that
            it chose first for a problem as long as the process lives, in either mode, so a process
            measures one problem in one mode alone.

    Returns:
        The outcome of its one config; ``launch_error`` where PyTorch refuses the problem.
    """
    outcome = Outcome(
        PYTORCH_OPERATOR.config_id, "ok", error=0.0, cudnn=cudnn_version(), cudnn_mode=mode
    )
    device = driver.make_current(ordinal)
    torch.cuda.set_device(ordinal)
    torch.backends.cudnn.benchmark = mode == "benchmark"
    l2_bytes = driver.device_of(ordinal).l2_bytes
    call = library_call(operation, problem, ordinal)
    try:
        (first,) = operands(operation, problem, 1)
        call(first)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(first)
        end.record()
        end.synchronize()
        launches = launches_a_replay(start.elapsed_time(end) * 1e-3)
        sets = operands(operation, problem, copies_for(problem, launches, l2_bytes))
        turns = [sets[i % len(sets)] for i in range(launches)]
        graph = TorchGraph([partial(call, tensors) for tensors in turns])
        evict = Evictor(l2_bytes)
        torch.cuda.synchronize()
        stream = device.create_stream()
        (timing,) = time_interleaved(device, stream, [graph], [launches], seed, evict)
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        return replace(outcome, status="launch_error", error=float("nan"), message=message)
    finally:
        torch.cuda.empty_cache()
    return outcome.timed(timing, driver.sm_clock_mhz(ordinal))


def library_call(
    operation: Operation, problem: Record, ordinal: int
) -> Callable[[dict[str, Tensor]], Any]:
    """Return the call that confpred makes where PyTorch's operator is chosen."""
    if not isinstance(problem, Problem) or not problem.has_epilogue:
        return partial(operation.pytorch, problem)
    plain = left_to_pytorch(problem)
    launch = epilogue_of(problem, driver.device_of(ordinal).sm_count)
    enqueue = bound(launch, ("out", "bias", "residual"), ordinal)

    def call(tensors: dict[str, Tensor]) -> torch.Tensor:
        inputs = {name: t for name, t in tensors.items() if name not in ("bias", "residual")}
        out: torch.Tensor = operation.pytorch(plain, inputs)
        others = [tensors.get(name) for name in ("bias", "residual")]
        addresses = [out.data_ptr(), *(0 if t is None else t.data_ptr() for t in others)]
        enqueue(torch.cuda.current_stream().cuda_stream, addresses)
        return out

    return call


def cudnn_version() -> str:
    """Return cuDNN's version, such as ``9.19.0``; empty if PyTorch has no cuDNN."""
    number = torch.backends.cudnn.version()
    if number is None:
        return ""
    major, minor_patch = divmod(number, 10_000)
    return f"{major}.{minor_patch // 100}.{minor_patch % 100}"


# Launches with matrix products in them, on operands in an arena.


class _DeviceBytes:
    """Device memory as others hand it to PyTorch (CUDA Array Interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def on_addresses(runner: Runner, operands: Mapping[str, Operand], ordinal: int) -> Runner:
    """Return the runner of a program that takes addresses and any stream, as the runners of kernels
    do. CUDA device `ordinal` becomes PyTorch's current one."""
    torch.cuda.set_device(ordinal)
    sizes = workspaces(runner.launch) | {name: o.bytes for name, o in operands.items()}
    dtypes = {name: getattr(torch, operand.dtype) for name, operand in operands.items()}
    operand_sets: dict[tuple[int, ...], list[Tensor]] = {}

    def tensors(addresses: Sequence[int]) -> list[Tensor]:
        memory = zip(runner.names, addresses, strict=True)
        plain = {n: torch.as_tensor(_DeviceBytes(a, sizes[n]), device="cuda") for n, a in memory}
        return [t.view(dtypes.get(name, torch.uint8)) for name, t in plain.items()]

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        key = tuple(addresses)
        if key not in operand_sets:
            operand_sets[key] = tensors(addresses)
        if torch.cuda.current_stream().cuda_stream == stream:
            runner.enqueue(stream, operand_sets[key])
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                runner.enqueue(stream, operand_sets[key])

    return replace(runner, enqueue=enqueue)


def graph_of(enqueue: Enqueue, slots: Sequence[Sequence[int]]) -> TorchGraph:
    """Return a CUDA graph of one launch on the operands of each of `slots`.

    PyTorch captures it, because cuBLAS uses workspaces that PyTorch allocates.
    """

    def on_current_stream(addresses: Sequence[int]) -> None:
        enqueue(torch.cuda.current_stream().cuda_stream, addresses)

    return TorchGraph([partial(on_current_stream, slot) for slot in slots])
