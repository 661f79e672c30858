"""CUDA graphs of captured graphs.

A captured function (a forward pass and its backward pass, or an inference pass) is recorded at its
second call, and replayed at that and all later ones. A replay overwrites the one before:

    inputs        parameters are read where they are; others are copied into the graph's memory
    results       those that the caller sees are copied out, and converted on the way
    saved tensors stay in the graph's memory, for the backward pass

So a forward pass is replayed only while nobody holds a saved tensor of an earlier call, as counts
of references tell, and a backward pass only for the forward pass that was replayed last. Other
calls, and passes that cannot be recorded, run without a graph and compute the same.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree

from confpred.errors import first_line
from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch.run.memory import (
    Copier,
    Dtypes,
    Run,
    SavedTensors,
    alias_of,
    buffer_for,
    converted,
    converting,
    view_in,
)  # fmt: skip

log = logging.getLogger("confpred")
#: Most recordings of a pass: one for each set of open sizes and switches, and after moved inputs.
MOST_GRAPHS = 8
#: Marks the main thread, and the threads that autograd starts for its backward passes.
_MAIN_THREAD = "confpred_main_thread"
#: Streams that passes are recorded on, by CUDA device.
_recording_streams: dict[int, torch.cuda.Stream] = {}


@dataclass(eq=False)
class GraphMemory:
    """A pool of GPU memory that one replay at a time writes to.

    Attributes:
        pool: PyTorch's handle of it; None before the first recording.
        graphs: CUDA graphs that were recorded in it and are alive.
        forward: the recording of the forward pass that was replayed last.
        stream: the stream of the last replay.
        lock: held while a pass is recorded, or its replay enqueued.
    """

    pool: Any = None
    graphs: WeakSet[torch.cuda.CUDAGraph] = field(default_factory=WeakSet)
    forward: Recording | None = None
    stream: torch.cuda.Stream | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def pool_to_record_in(self) -> Any:
        """Return the pool to record in. Where no graph of the present one is alive it is a new one,
        as PyTorch does not open the present one again."""
        if not self.graphs:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def is_in_use(self) -> bool:
        """Return whether somebody holds a tensor that the last forward pass saved."""
        return self.forward is not None and self.forward.saved.are_held()


@cache
def memory_of_inference(device: int) -> GraphMemory:
    """Return the memory of all inference passes of a device: nothing in it outlives a replay."""
    return GraphMemory()


@dataclass(slots=True)
class Recording:
    """A recorded pass.

    Attributes:
        graph: the CUDA graph.
        switches: PyTorch's switches at the recording.
        why: why there is no graph; None where there is one.
        buffers: where inputs are copied to, by index.
        addresses: of the inputs that are read where they are, by index.
        from_forward: ids of the inputs that the forward pass left in the graph's memory, by index.
        results: the pass' results that are no tensors, and None in place of each tensor.
        of_inputs: results in a static input's memory, by index: that input's index, their geometry.
        copiers: of visible results that each fill their storage, by dtypes before and after.
        shared: storages of other visible results, copied whole, with these results by index.
        saved: results that stay in the graph's memory, with their `saved_places`.
        unlike: dtypes of the other visible results that are to be converted.
        held: storages of these results by address, which keep other recordings away from them
            until the backward pass is recorded.
        backward: the recording of the backward pass.
        is_stale: whether to record it again, for its backward pass, which needs a new `held`.
    """

    graph: Any
    switches: tuple[bool, ...]
    why: str | None = None
    buffers: dict[int, Tensor] = field(default_factory=dict)
    addresses: dict[int, int] = field(default_factory=dict)
    from_forward: dict[int, int] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    of_inputs: dict[int, tuple[int, Any]] = field(default_factory=dict)
    copiers: dict[Any, Copier] = field(default_factory=dict)
    shared: list[tuple[Any, dict[int, Tensor]]] = field(default_factory=list)
    saved: SavedTensors = field(default_factory=lambda: SavedTensors(()))
    saved_places: list[int] = field(default_factory=list)
    unlike: dict[int, torch.dtype] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)
    backward: Recording | None = None
    is_stale: bool = False

    def moved(self, inputs: Sequence[Any]) -> set[int]:
        """Return the indices of inputs that are no longer where the graph reads them."""
        return {i for i, address in self.addresses.items() if inputs[i].data_ptr() != address}

    def replay(self, inputs: list[Any], memory: GraphMemory, device: int) -> list[Any]:
        """Replay the graph on the current stream; free the `inputs`, and return its results."""
        stream = torch.cuda.current_stream(device)
        if memory.stream is not None and memory.stream != stream:
            stream.wait_stream(memory.stream)
        memory.stream = stream
        results = list(self.results)
        with torch.no_grad():
            for place, (static, geometry) in self.of_inputs.items():
                x = inputs[static]
                same = (x.shape, x.stride(), x.storage_offset()) == geometry
                results[place] = x if same else x.as_strided(*geometry)
            if self.buffers:
                inputs_to_copy = [inputs[i] for i in self.buffers]
                torch._foreach_copy_(list(self.buffers.values()), inputs_to_copy)
                del inputs_to_copy
            inputs.clear()
            self.graph.replay()
            for copier in self.copiers.values():
                for place, made in zip(copier.places, copier.copies(), strict=True):
                    results[place] = made
            for storage, views in self.shared:
                whole = storage.clone()
                for place, view in views.items():
                    results[place] = view_in(whole, view)
        for place, x in zip(self.saved_places, self.saved, strict=True):
            results[place] = x
        return converted(results, self.unlike) if self.unlike else results


def make_replayable(reason: str | None, plain: Run, *, kind: str, **arguments: Any) -> Run:
    """Return a function that replays `plain` as a CUDA graph wherever that is right, unless there
    is a `reason` why it cannot become one; the arguments are those of `Graphed`."""
    if reason is None and (allocator := torch.cuda.get_allocator_backend()) != "native":
        reason = f"the allocator is {allocator}"
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        reason = reason or "PYTORCH_NO_CUDA_MEMORY_CACHING is set"
    if reason is not None:
        log.info("no CUDA graph of the %s pass: %s", kind, reason)
        arguments["reasons"].add(f"as {reason}")
        return converting(plain, arguments["dtypes"])
    return Graphed(plain, kind=kind, **arguments)


def why_no_graph(gm: fx.GraphModule, static: Sequence[int], written: Sequence[int]) -> str | None:
    """Return why `gm` is never a CUDA graph, else None; `static`, `written` are as of `Graphed`."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    vals = _pytree.tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    devices = {t.device for t in vals if isinstance(t, Tensor) and t.device.type != "meta"}
    others = sorted(str(device) for device in devices if device.type != "cuda")
    if not devices or others:
        return f"it uses {', '.join(others) or 'no device'}"
    if len(devices) > 1:
        return f"it uses several devices: {', '.join(sorted(map(str, devices)))}"
    examined = _LazyGraphModule(gm, copy.deepcopy(gm.graph))
    for node in examined.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if "triton_kernel_wrapper" not in str(node.target):
                return f"{node.target} may need the host"
            node.meta["val"] = None  # PyTorch's look at it up to 2.11 fails
    node = get_first_incompatible_cudagraph_node(examined)
    if node is None and set(written) <= set(static):
        return None
    writes = "it writes to an input that is no parameter or buffer"
    return writes if node is None else f"{node.target} cannot be captured"


class Graphed:
    """A captured pass that is replayed; called with a list of inputs, which it empties.

    Args:
        plain: runs it without a CUDA graph.
        memory: of a forward pass and its backward pass, or of inference.
        device: the CUDA device.
        static: indices of inputs that stay where they are: parameters, buffers and saved tensors.
        written: indices of inputs that it writes to, all of them static.
        visible: how many results, from the first on, the caller sees; None for all.
        kind: ``inference``, ``forward`` or ``backward``.
        reasons: filled with why calls ran without a graph.
        dtypes: of results that `plain` returns in another one.

    Attributes:
        replays: how many calls were replayed.
    """

    def __init__(
        self, plain: Run, *, memory: GraphMemory, device: int, static: Sequence[int],
        written: Sequence[int], visible: int | None, kind: str, reasons: set[str],
        dtypes: Dtypes,
    ) -> None:  # fmt: skip
        self._boxed_call = True  # PyTorch's wrappers copy this from the instance
        self._recorded, self._plain = plain, converting(plain, dtypes)
        self._dtypes, self._visible, self._kind = dtypes, visible, kind
        self._memory, self._device = memory, device
        self._static, self._written = set(static), frozenset(written)
        self._sizes: list[int] | None = None  # indices of inputs that are open sizes
        self._recordings: dict[Any, Recording | None] = {}  # by switches and sizes
        self._tries = 0
        self._reasons = reasons
        self.replays = 0

    def __call__(self, inputs: list[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return self._plain(inputs)
        if not _is_of_main_thread(self._kind == "backward"):
            return self._run_plain(inputs, "in other threads than the main one")
        memory = self._memory
        with memory.lock:
            outcome = self._find_recording(inputs)
            if isinstance(outcome, Recording):
                if self._kind == "forward":
                    memory.forward = outcome
                self.replays += 1
                return outcome.replay(inputs, memory, self._device)
        return self._run_plain(inputs, outcome)

    def _run_plain(self, inputs: list[Any], reason: str) -> Any:
        """Run this pass without a graph, and log why, once for each reason."""
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            log.info("the %s pass runs without a CUDA graph %s", self._kind, reason)
        return self._plain(inputs)

    def _find_recording(self, inputs: list[Any]) -> Recording | str:
        """Return the recording to replay, or why there is none: an empty text at a first call."""
        switches = read_switches()
        if self._sizes is None:
            self._sizes = [i for i, x in enumerate(inputs) if isinstance(x, int)]
        key = (switches, *(inputs[i] for i in self._sizes))
        if key not in self._recordings:
            if len(self._recordings) >= MOST_GRAPHS:
                return f"for further sizes, as it has {MOST_GRAPHS} graphs"
            self._recordings[key] = None
            return ""
        if self._kind == "backward":
            return self._find_backward(inputs, switches)
        if self._memory.is_in_use():
            return "while tensors that an earlier call saved wait for their backward pass"
        recording = self._recordings[key]
        moved = set() if recording is None else recording.moved(inputs)
        if recording is None or recording.is_stale or moved:
            self._static -= moved - self._written  # copied from now on
            recording = self._recordings[key] = self._record(inputs, switches, {})
        return recording if recording.why is None else recording.why

    def _find_backward(self, inputs: list[Any], switches: Any) -> Recording | str:
        """Return the recording that follows the last forward pass, or why there is none."""
        forward = self._memory.forward
        if forward is None:
            return "where its forward pass ran without"
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return "where saved tensors are retained, as a replay overwrites them"
        if forward.switches != switches:
            return "under other switches than its forward pass"
        recording = forward.backward
        if recording is None:
            saved = set(map(id, forward.saved))
            if saved and saved.isdisjoint(map(id, inputs)):
                return "where its forward pass ran without"
            held, forward.held = forward.held, {}
            recording = forward.backward = self._record(inputs, switches, held)
        if recording.why is not None:
            return recording.why
        if any(id(inputs[i]) != saved_id for i, saved_id in recording.from_forward.items()):
            return "where its forward pass ran without"
        moved = recording.moved(inputs)
        if moved:
            self._static -= moved
            forward.is_stale = True
            return "where parameters have moved"
        return recording

    def _record(self, inputs: list[Any], switches: Any, held: dict[int, Any]) -> Recording:
        """Record this pass; `held` are storages of its forward pass by address, each freed once the
        pass has read it. A recording that fails has no graph, and says why."""
        self._tries += 1
        if self._tries > MOST_GRAPHS:
            return Recording(None, switches, f"as it was recorded {MOST_GRAPHS} times")
        graph, args = torch.cuda.CUDAGraph(), list(inputs)
        recording = Recording(graph, switches)
        pool = self._memory.pool_to_record_in()
        try:
            with torch.cuda.device(self._device), _record_block(graph, pool, self._device):
                places: dict[int, int] = {}  # of inputs by the address of their storage
                for i, x in enumerate(inputs):
                    if not isinstance(x, Tensor):
                        continue
                    if i not in self._static:
                        args[i] = buffer_for(x)
                        # It owns nothing: the pool reuses the memory once the pass has read it.
                        recording.buffers[i] = view_in(alias_of(args[i].untyped_storage()), args[i])
                        continue
                    address = x.untyped_storage().data_ptr()
                    if address in held:
                        recording.from_forward[i] = id(x)
                        args[i] = view_in(held[address], x)
                        continue
                    recording.addresses[i] = x.data_ptr()
                    if x.numel():
                        places[address] = i
                held.clear()
                self._locate_results(recording, inputs, list(self._recorded(args)), places)
        except Exception as error:
            return Recording(None, switches, f"as it cannot be recorded: {first_line(error)}")
        self._memory.graphs.add(graph)
        return recording

    def _locate_results(
        self, recording: Recording, inputs: list[Any], results: list[Any], places: dict[int, int]
    ) -> None:
        """Enter into `recording` where the `results` of a pass lie; `places` are indices of static
        `inputs` by the address of their storage."""
        visible = len(results) if self._visible is None else self._visible
        by_storage: dict[int, dict[int, Tensor]] = {}
        recording.unlike = dict(self._dtypes)
        recording.results = [None if isinstance(x, Tensor) else x for x in results]
        for place, x in enumerate(results):
            if not isinstance(x, Tensor):
                continue
            if x.is_neg() or x.is_conj():
                raise ValueError("a result is a negative or conjugate view")
            storage = x.untyped_storage()
            address = storage.data_ptr()
            if address in places:
                if inputs[places[address]].dtype is not x.dtype:
                    raise ValueError("a result is a view of another dtype")
                geometry = x.shape, x.stride(), x.storage_offset()
                recording.of_inputs[place] = places[address], geometry
            elif place < visible:
                by_storage.setdefault(address, {})[place] = x
            else:
                recording.saved_places.append(place)
                if address:  # it is not empty
                    recording.held[address] = storage
        recording.saved = SavedTensors([results[place] for place in recording.saved_places])
        for views in by_storage.values():
            ((place, x), *others) = views.items()
            alias = alias_of(x.untyped_storage())
            if others or 0 in x.stride() or x.numel() * x.element_size() != alias.nbytes():
                like = {i: view_in(alias, view) for i, view in views.items()}
                recording.shared.append((alias, like))
            else:
                dtype = recording.unlike.pop(place, x.dtype)
                copier = recording.copiers.setdefault((x.dtype, dtype), Copier(dtype))
                copier.add(place, view_in(alias, x))


def _is_of_main_thread(backward: bool) -> bool:
    """Return whether this is the main thread, or one that autograd runs its `backward` pass in.

    No thread may wait for the device while another one records, so only these use CUDA graphs.
    """
    if threading.current_thread() is threading.main_thread():
        torch._C._stash_obj_in_tls(_MAIN_THREAD, True)
        return True
    return backward and bool(torch._C._is_key_in_tls(_MAIN_THREAD))


@contextmanager
def _record_block(graph: Any, pool: Any, device: int) -> Iterator[None]:
    """Record what the block launches on the current CUDA device; nothing of it runs.

    A recording that fails leaves PyTorch's allocator and random numbers as they were.
    """
    current = torch.cuda.current_stream(device)
    if device not in _recording_streams:
        _recording_streams[device] = torch.cuda.Stream(device)
    stream = _recording_streams[device]
    stream.wait_stream(current)
    collects = gc.isenabled()
    gc.disable()  # what it frees may not be freed during a recording
    torch._C._cuda_clearCublasWorkspaces()  # each graph needs its own
    try:
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                yield
                _end(graph)
            except BaseException:
                _end_failed(graph, pool, device)
                raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        current.wait_stream(stream)  # the first replay needs the random offset that was set there
        if collects:
            gc.enable()


def _end_failed(graph: Any, pool: Any, device: int) -> None:
    """End a failed recording, and what PyTorch leaves open of it: its pool and random numbers."""
    try:
        _end(graph)
    except Exception:
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        another = torch.cuda.CUDAGraph()  # whose end is that of the random numbers, too
        another.capture_begin(capture_error_mode="thread_local")
        _end(another)
    graph.reset()


def _end(graph: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a graph that is empty, as that of an empty batch
        graph.capture_end()


def read_switches() -> tuple[bool, ...]:
    """Return PyTorch's switches that a recorded graph depends on and no guard of Dynamo checks."""
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, convolutions_allow_tf32(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
