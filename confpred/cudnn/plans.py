"""cuDNN's plans on a GPU: built, and launched on a stream.

    Plans(problem) --> build(plan) ----> BuiltPlan: workspace_bytes, bind(names)
                         |     |                                         |
       built before, from the  what cuDNN offers                         v
       kernel cache            for the problem          enqueue(stream, addresses)

Most plans are ready in cuDNN, and built in a tenth of a millisecond; those of engines that are
compiled at run time take half a second, and are kept beside the compiled kernels.

All of it may happen while a CUDA graph is captured: what a capture forbids, such as to load a
kernel or to allocate, is done outside of it (`confpred.cuda.driver.outside_capture`), and the graph
has the plan's launches alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from confpred.cuda import driver
from confpred.cuda.cache import KernelCache, default_folder
from confpred.cudnn.table import config_of, release_of, release_text
from confpred.errors import LaunchError, MissingExtra, first_line
from confpred.families.protocol import LibraryFamily
from confpred.families.registry import family_named, operation_of
from confpred.problem.conv import LAYOUTS, ConvNd
from confpred.problem.conv2d import PAIRS, Problem
from confpred.problem.device import Device
from confpred.problem.operation import SCRATCH, LibraryPlan, Operand

log = logging.getLogger(__name__)
_of_thread = threading.local()
#: A plan that took longer to build is kept, seconds.
_SLOW_S = 0.02


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A plan that can be launched in the context that it was built in.

    Attributes:
        workspace_bytes: device memory that a launch needs, of any content.
    """

    workspace_bytes: int
    _graph: Any  # the front end's
    _index: int
    _uids: Mapping[str, int]
    _ordinal: int

    def bind(self, names: Sequence[str]) -> Callable[[int, Sequence[int]], None]:
        """Return a function that enqueues the plan, given a CUDA stream's handle and device
        addresses.

        The addresses are in the order of `names`, with ``scratch`` if there is a workspace.

        It raises `LaunchError` where cuDNN refuses.
        """
        run = self._graph._execute_plan_at_index
        index, ordinal = self._index, self._ordinal
        slots = [(uid, names.index(name)) for name, uid in self._uids.items()]
        scratch = names.index(SCRATCH) if self.workspace_bytes else None
        is_loaded = False

        def enqueue(stream: int, addresses: Sequence[int]) -> None:
            nonlocal is_loaded
            handle = _handle(ordinal, stream)
            operands = {uid: addresses[slot] for uid, slot in slots}
            workspace = 0 if scratch is None else addresses[scratch]
            try:
                if is_loaded:
                    run(operands, workspace, index, handle)
                    return
                with driver.outside_capture():  # CUDA loads a kernel when it is first launched
                    run(operands, workspace, index, handle)
                is_loaded = True
            except RuntimeError as error:
                raise LaunchError(f"cuDNN refused a launch: {error}") from error

        return enqueue


class Plans:
    """cuDNN's plans for a problem on CUDA device `ordinal`, which is the current one."""

    def __init__(
        self, problem: Problem | ConvNd, ordinal: int, kernel_cache: KernelCache | None = None
    ) -> None:
        """Cache plans that are slow to build in `kernel_cache`, by default the user's.

        Raises:
            MissingExtra, LaunchError: see `_handle`.
        """
        self._problem, self._ordinal = problem, ordinal
        self._cache = kernel_cache or KernelCache(default_folder())
        self._uids = operand_uids(problem)
        self._offered: dict[tuple[str, ...], Graph] = {}  # by heuristics
        _handle(ordinal)

    def build(self, plan: LibraryPlan) -> BuiltPlan:
        """Return `plan`, built and ready to be bound.

        Raises:
            LaunchError: `plan` is of another cuDNN, is not offered, or cannot be built.
        """
        if not self.is_of_this_release(plan):
            here = release_text(release())
            raise LaunchError(f"the plan is of cuDNN {plan.version}, and this is {here}")
        key = self._key(plan)
        with driver.outside_capture():
            return self._read_cached(key) or self._build_new(plan, key)

    def is_of_this_release(self, plan: LibraryPlan) -> bool:
        """Return whether `plan` was listed by the installed release of cuDNN; another one numbers
        and orders engines and knobs differently."""
        return plan.version == release_text(release())

    def _build_new(self, plan: LibraryPlan, key: str) -> BuiltPlan:
        for heuristics in (USUAL, EVERY):
            offered = self._offered.get(heuristics)
            if offered is None:
                offered = Graph(self._problem, heuristics, handle=_handle(self._ordinal))
                self._offered[heuristics] = offered
            if (index := offered.place(plan.config)) is not None:
                break
        else:
            raise LaunchError("cuDNN does not offer the plan for this problem")
        start = time.perf_counter()
        try:
            offered.graph.build_plan_at_index(index)
            built = self._built(offered.graph, index)
            if time.perf_counter() - start > _SLOW_S:
                self._cache.put(key, bytes(offered.graph.serialize()))
        except (RuntimeError, front_end().cudnnGraphNotSupportedError) as error:
            raise LaunchError(f"cuDNN cannot build the plan: {error}") from error
        return built

    def _read_cached(self, key: str) -> BuiltPlan | None:
        """Return the plan that was built before; None if there is none, or cuDNN refuses it now."""
        content = self._cache.get(key)
        if content is None:
            return None
        handle = _handle(self._ordinal)
        try:
            graph = front_end().pygraph(handle=handle)
            graph.deserialize(handle, list(content))
            return self._built(graph, 0)
        except (RuntimeError, front_end().cudnnGraphNotSupportedError) as error:
            log.debug("%s: a cached plan is built again: %s", self._problem, error)
            return None

    def _built(self, graph: Any, index: int) -> BuiltPlan:
        workspace: int = graph.get_workspace_size_plan_at_index(index)
        return BuiltPlan(workspace, graph, index, self._uids, self._ordinal)

    def _key(self, plan: LibraryPlan) -> str:
        """Return the name of the plan's cache entry: all that decides its bytes."""
        library = front_end()
        facts = (
            *("cuDNN plan", library.backend_version(), library.__version__),
            *driver.describe(self._ordinal),
            *(str(self._problem), sorted(plan.config.items())),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _handle(ordinal: int, stream: int | None = None) -> int:
    """Return this thread's cuDNN handle of the current CUDA device `ordinal`, set to `stream`.

    cuDNN allows a handle one thread at a time.

    Raises:
        MissingExtra: see `front_end`.
        LaunchError: cuDNN gives none.
    """
    handles: dict[int, list[int]] = _of_thread.__dict__.setdefault("handles", {})
    handle = handles.get(ordinal)
    if handle is None:
        library = front_end()
        try:
            with driver.outside_capture():
                handle = handles[ordinal] = [library.create_handle(), -1]
        except RuntimeError as error:
            raise LaunchError(f"cuDNN gives no handle: {error}") from error
    if stream is not None and stream != handle[1]:
        front_end().set_stream(handle=handle[0], stream=stream)
        handle[1] = stream
    return handle[0]


# Operation graphs. cuDNN's heuristics need no GPU but its properties, so the candidates of a
# problem can be listed on any machine with cuDNN. Engines that are compiled at run time, for most
# activations, are offered only if a driver is installed too.

#: Clocks of multiprocessors and memory, in kHz (data sheets); cuDNN's heuristics ask for them.
_CLOCKS = {
    "h100": (1_980_000, 2_619_000),
    "h200": (1_980_000, 3_201_000),
    "a100": (1_410_000, 1_512_000),
}
_DRIVER = 13_000
#: Which of cuDNN's heuristics offer plans. All of them take 15 to 25 ms a problem and offer half as
#: many plans again, such as the fast ones of wide groups' gradients; without B it is 2 to 6 ms.
USUAL, EVERY = ("A", "FALLBACK"), ("A", "B", "FALLBACK")
_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}


@cache
def front_end() -> Any:
    """Import cuDNN's Python front end.

    Raises:
        MissingExtra: it is not installed, or finds no cuDNN.
    """
    try:
        import cudnn

        cudnn.backend_version()  # loads libcudnn, or raises RuntimeError
    except Exception as error:
        raise MissingExtra(f"nvidia-cudnn-frontend ({error})", "gpu") from error
    return cudnn


@cache
def is_missing() -> bool:
    """Return whether cuDNN's front end is not installed, or finds no cuDNN."""
    try:
        front_end()
    except MissingExtra:
        return True
    return False


def lacks_library(provider: str) -> bool:
    """Return whether a provider's candidates are plans of cuDNN, which `is_missing`."""
    return isinstance(family_named(provider), LibraryFamily) and is_missing()


@cache
def release() -> int:
    """Return the installed cuDNN as ``plans.csv`` numbers it.

    Raises:
        MissingExtra: see `front_end`.
    """
    return release_of(front_end().backend_version())


def operand_uids(problem: Problem | ConvNd) -> dict[str, int]:
    """Return cuDNN's number of each operand of `problem`, by the operand's name."""
    operands = operation_of(problem).operands(problem)
    return {operand.name: 1 + index for index, operand in enumerate(operands)}


class Graph:
    """A problem's operation graph, with the plans that cuDNN offers for it.

    Attributes:
        names: the front end's name of each plan, in the order that cuDNN prefers.
        graph: the front end's graph.
        uids: number of each operand's tensor, by the operand's name.
    """

    def __init__(
        self, problem: Problem | ConvNd, heuristics: Sequence[str] = EVERY, **where: Any
    ) -> None:
        """Build the graph, and list its plans.

        Args:
            problem: any.
            heuristics: those of cuDNN that offer plans.
            where: the front end's argument for the device: a ``handle`` or a ``device_property``.

        Raises:
            MissingExtra: see `front_end`.
            LaunchError: cuDNN has no plan for the problem.
        """
        cudnn = front_end()
        operands = operation_of(problem).operands(problem)
        if sum(operand.terms > 0 for operand in operands) > 1:
            raise LaunchError("cuDNN has no plan for the gradients of filter and bias together")
        if getattr(problem, "cut", 0):
            raise LaunchError("cuDNN has no plan for a layer that leaves outputs out")
        self.uids = operand_uids(problem)
        try:
            self.graph = self._built(problem, operands, where)
            self.graph.create_execution_plans([getattr(cudnn.heur_mode, h) for h in heuristics])
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
            raise LaunchError(f"cuDNN has no plan for {problem}: {first_line(error)}") from error
        count = self.graph.get_execution_plan_count()
        self.names: list[str] = [self.graph.get_plan_name_at_index(i) for i in range(count)]
        self._places: dict[frozenset[tuple[str, int]], int] = {}
        for index, name in enumerate(self.names):
            config = config_of(name)
            if config is not None:
                self._places.setdefault(frozenset(config.items()), index)

    @classmethod
    def without_gpu(cls, problem: Problem | ConvNd, device: Device) -> Graph:
        """Return the graph for a device that need not be there; its plans cannot be launched."""
        return cls(problem, device_property=_properties(device))

    def place(self, config: Mapping[str, int]) -> int | None:
        """Return the index of the first plan of this engine and these knobs, or None."""
        return self._places.get(frozenset(config.items()))

    def places(self) -> dict[str, int]:
        """Return the index of the first plan of each config, by the plan's name."""
        return {self.names[index]: index for index in self._places.values()}

    def _built(
        self, problem: Problem | ConvNd, operands: Sequence[Operand], where: Mapping[str, Any]
    ) -> Any:
        cudnn = front_end()
        kinds = cudnn.data_type
        half, wide = getattr(kinds, _TYPES[problem.dtype]), kinds.FLOAT
        graph = cudnn.pygraph(
            io_data_type=half, intermediate_data_type=wide, compute_data_type=wide, **where
        )
        tensors = {}
        for o in (o for o in operands if not o.terms):
            sizes, strides = tensor_layout(problem, o)
            layout = {"dim": sizes, "stride": strides, "uid": self.uids[o.name]}
            tensors[o.name] = graph.tensor(name=o.name, data_type=half, **layout)
        made = operands[0]
        sizes, strides = tensor_layout(problem, made)
        layer = {name: list(getattr(problem, name)[2 - len(sizes) :]) for name in PAIRS}
        if problem.direction == "fprop":
            out = graph.conv_fprop(image=tensors["in"], weight=tensors["filter"], **layer)
        elif problem.direction == "dgrad":
            out = graph.conv_dgrad(loss=tensors["out_grad"], filter=tensors["filter"], **layer)
            out.set_dim(sizes).set_stride(strides)  # which do not follow from its operands
        else:
            out = graph.conv_wgrad(image=tensors["in"], loss=tensors["out_grad"], **layer)
        # In this order: engines that are compiled ahead take a residual before a bias.
        for name in ("residual", "bias"):
            if name in tensors:
                out = graph.add(a=out, b=tensors[name])
        if problem.activation not in _ACTIVATED:
            raise LaunchError(f"cuDNN computes no {problem.activation}")
        out = _ACTIVATED[problem.activation](graph, out)
        out.set_output(True).set_data_type(half).set_uid(self.uids[made.name])
        out.set_dim(sizes).set_stride(strides)
        graph.validate()
        graph.build_operation_graph()
        return graph


#: Activations as cuDNN's graphs have them.
_ACTIVATED: Mapping[str, Callable[[Any, Any], Any]] = {
    "none": lambda graph, x: x,
    "relu": lambda graph, x: graph.relu(input=x),
    "relu6": lambda graph, x: graph.relu(input=x, lower_clip=0.0, upper_clip=6.0),
    "silu": lambda graph, x: graph.mul(a=x, b=graph.sigmoid(input=x)),
    "gelu": lambda graph, x: graph.gelu(input=x),
}


def tensor_layout(problem: Problem | ConvNd, operand: Operand) -> tuple[list[int], list[int]]:
    """Return sizes and strides of an operand in cuDNN's order, N C H W or N C D H W, of any layout.
    A vector has one element a channel, and a line is an image of height 1."""
    rank, layout = getattr(problem, "rank", 2), getattr(problem, "layout", LAYOUTS[0])
    is_vector = len(operand.shape) == 1
    sizes = [*(1,) * (rank + 1), *operand.shape] if is_vector else [*operand.shape]
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    if is_vector or layout == LAYOUTS[0]:
        for values in (sizes, strides):
            values.insert(1, values.pop())
    if rank == 1:
        strides.insert(2, sizes[2] * strides[2])
        sizes.insert(2, 1)
    return sizes, strides


@cache
def _properties(device: Device) -> Any:
    """Return the fields of ``cudnnBackendDeviceProp`` that cuDNN's heuristics ask for."""
    if device.key not in _CLOCKS:
        raise LaunchError(f"cuDNN cannot describe a device {device.key}")
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
