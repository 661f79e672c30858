"""A problem as cuDNN is told of it, and the plans that it offers for it.

cuDNN's heuristics need no GPU: they are told of one by its properties. So the candidates of a
problem can be listed on any machine where cuDNN is installed. Engines that are compiled at run
time, for most activations, are offered only where a driver is installed too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from confpred.cudnn.names import config_of
from confpred.cudnn.table import release_of
from confpred.errors import LaunchError, MissingExtra
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device
from confpred.problem.operation import Operand

#: Clocks of multiprocessors and memory, in kHz (data sheets); cuDNN's heuristics ask for them.
_CLOCKS = {
    "h100": (1_980_000, 2_619_000),
    "h200": (1_980_000, 3_201_000),
    "a100": (1_410_000, 1_512_000),
}
_DRIVER = 13_000
_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
_RELU6 = 6.0


@cache
def front_end() -> Any:
    """cuDNN's Python front end.

    Raises:
        MissingExtra: it is not installed, or finds no cuDNN.
    """
    try:
        import cudnn

        cudnn.backend_version()
    except Exception as error:  # it raises RuntimeError where libcudnn is missing
        raise MissingExtra(f"nvidia-cudnn-frontend ({error})", "cudnn") from error
    return cudnn


@cache
def release() -> int:
    """The cuDNN that is installed, as ``plans.csv`` numbers it.

    Raises:
        MissingExtra: see `front_end`.
    """
    return release_of(front_end().backend_version())


def operand_uids(problem: Problem) -> dict[str, int]:
    """The number by which cuDNN knows each operand of `problem`, by the operand's name."""
    operands = CONVOLUTION.operands(problem)
    return {operand.name: 1 + index for index, operand in enumerate(operands)}


class Graph:
    """A problem's operation graph, with the plans that cuDNN offers for it.

    Attributes:
        names: what the front end calls each plan, its favourite first.
        graph: the front end's own.
        uids: number of each operand's tensor, by the operand's name.
    """

    def __init__(self, problem: Problem, **where: Any) -> None:
        """
        Args:
            problem: any.
            where: what the front end takes for the device: a ``handle`` or a ``device_property``.

        Raises:
            MissingExtra: see `front_end`.
            LaunchError: cuDNN has no plan for the problem.
        """
        cudnn = front_end()
        operands = CONVOLUTION.operands(problem)
        if sum(operand.terms > 0 for operand in operands) > 1:
            raise LaunchError("cuDNN has no plan for the gradients of filter and bias together")
        self.uids = operand_uids(problem)
        try:
            self.graph = self._built(problem, operands, where)
            modes = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
            self.graph.create_execution_plans(modes)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
            raise LaunchError(f"cuDNN has no plan for {problem}: {_first_line(error)}") from error
        count = self.graph.get_execution_plan_count()
        self.names: list[str] = [self.graph.get_plan_name_at_index(i) for i in range(count)]
        self._places: dict[frozenset[tuple[str, int]], int] = {}
        for index, name in enumerate(self.names):
            config = config_of(name)
            if config is not None:
                self._places.setdefault(frozenset(config.items()), index)

    @classmethod
    def without_gpu(cls, problem: Problem, device: Device) -> Graph:
        """The graph for a device that need not be there; its plans cannot be launched."""
        return cls(problem, device_property=_properties(device))

    def place(self, config: Mapping[str, int]) -> int | None:
        """Index of the first plan of this engine and these knobs; None if there is none."""
        return self._places.get(frozenset(config.items()))

    def places(self) -> dict[str, int]:
        """Index of the first plan of each config, by the plan's name."""
        return {self.names[index]: index for index in self._places.values()}

    def _built(
        self, problem: Problem, operands: Sequence[Operand], where: Mapping[str, Any]
    ) -> Any:
        cudnn = front_end()
        kinds = cudnn.data_type
        half, wide = getattr(kinds, _TYPES[problem.dtype]), kinds.FLOAT
        graph = cudnn.pygraph(
            io_data_type=half, intermediate_data_type=wide, compute_data_type=wide, **where
        )
        tensors = {
            o.name: graph.tensor(
                name=o.name,
                dim=_sizes(o),
                stride=_strides(o),
                data_type=half,
                uid=self.uids[o.name],
            )
            for o in operands
            if not o.terms
        }
        layer = {
            "padding": list(problem.padding),
            "stride": list(problem.stride),
            "dilation": list(problem.dilation),
        }
        if problem.direction == "fprop":
            out = graph.conv_fprop(image=tensors["in"], weight=tensors["filter"], **layer)
            # In this order: engines that are compiled ahead take a residual before a bias.
            for name in ("residual", "bias"):
                if name in tensors:
                    out = graph.add(a=out, b=tensors[name])
            out = _activated(graph, out, problem.activation)
        elif problem.direction == "dgrad":
            out = graph.conv_dgrad(loss=tensors["out_grad"], filter=tensors["filter"], **layer)
        else:
            out = graph.conv_wgrad(image=tensors["in"], loss=tensors["out_grad"], **layer)
        made = operands[0]
        out.set_output(True).set_data_type(half).set_uid(self.uids[made.name])
        out.set_dim(_sizes(made)).set_stride(_strides(made))
        graph.validate()
        graph.build_operation_graph()
        return graph


def notes_of(problem: Problem, device: Device) -> dict[str, tuple[bool, bool]]:
    """Of each plan that is offered for `problem`, by name: whether it computes on tensor cores, and
    whether it gives the same bits each time."""
    notes = front_end().numerical_note
    every = Graph.without_gpu(problem, device)
    plain = _left(problem, device, notes.TENSOR_CORE)
    repeatable = _left(problem, device, notes.NONDETERMINISTIC)
    return {name: (name not in plain, name in repeatable) for name in every.places()}


def _left(problem: Problem, device: Device, note: Any) -> set[str]:
    """The plans that have not this note."""
    graph = Graph.without_gpu(problem, device)
    graph.graph.deselect_numeric_notes([note])
    left = set()
    for name, index in graph.places().items():
        try:
            graph.graph.build_plan_at_index(index)
        except (RuntimeError, front_end().cudnnGraphNotSupportedError):
            continue  # deselected
        left.add(name)
    return left


def _activated(graph: Any, x: Any, name: str) -> Any:
    if name == "relu":
        return graph.relu(input=x)
    if name == "relu6":
        return graph.relu(input=x, lower_clip=0.0, upper_clip=_RELU6)
    if name == "silu":
        return graph.mul(a=x, b=graph.sigmoid(input=x))
    if name == "gelu":
        return graph.gelu(input=x)
    if name == "none":
        return x
    raise LaunchError(f"cuDNN computes no {name}")


def _sizes(operand: Operand) -> list[int]:
    """Sizes as cuDNN has them: N C H W of any layout; a vector is one of channels."""
    if len(operand.shape) == 1:
        return [1, *operand.shape, 1, 1]
    n, h, w, c = operand.shape
    return [n, c, h, w]


def _strides(operand: Operand) -> list[int]:
    _, c, h, w = _sizes(operand)
    return [c * h * w, 1, w * c, c]


@cache
def _properties(device: Device) -> Any:
    """What cuDNN's heuristics ask of a GPU (the fields of ``cudnnBackendDeviceProp``)."""
    if device.key not in _CLOCKS:
        raise LaunchError(f"cuDNN cannot be told of a device {device.key}")
    core, memory = _CLOCKS[device.key]
    described = {
        "deviceName": device.product,
        "deviceVer": 10 * int("".join(filter(str.isdecimal, device.arch))),
        "driverVer": _DRIVER,
        "cudaDeviceId": 0,
        "totalGlobalMem": 2**36,
        "pciDeviceId": 0,
        "multiProcessorCount": device.sm_count,
        "l2CacheSize": device.l2_bytes,
        "smClockRateKHz": core,
        "memClockRateKHz": memory,
        "maxGridSize": [2**31 - 1, 65_535, 65_535],
        "maxBlockSize": [1024, 1024, 64],
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": 32 * device.warps_per_sm,
        "maxCtasPerSM": device.blocks_per_sm,
        "warpSize": 32,
        "regsPerBlock": device.regs_per_sm,
        "maxRegistersPerSM": device.regs_per_sm,
        "maxSharedMemoryPerBlock": 48 * 1024,
        "maxSharedMemoryPerBlockOptin": device.smem_per_block,
        "reservedSharedMemoryPerBlock": device.smem_reserved_per_block,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
    }
    return front_end().create_device_properties(json.dumps(described))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
