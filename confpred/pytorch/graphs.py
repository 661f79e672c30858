"""CUDA graphs of captured graphs.

A captured function (a forward pass and its backward pass, or an inference pass) is recorded at its
second call and replayed from the third on. A replay writes to the same memory as the one before:

    inputs        parameters are read where they are; others are copied into the graph's memory
    results       those that the caller sees are copied out
    saved tensors stay in the graph's memory, for the backward pass

So a pass is replayed only while no saved tensor of an earlier call is alive, which weak references
to their storages tell, and a backward pass only for the forward pass that was replayed last. Every
other call runs without a graph and computes the same. A pass that cannot be recorded is never tried
again.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch.passes import Run, val_of

log = logging.getLogger("confpred")
#: Recordings of one pass: one for each set of open sizes and switches, and after moved parameters.
MOST_GRAPHS = 8
#: Marks the main thread, and the threads that autograd starts for its backward passes.
_MAIN_THREAD = "confpred_main_thread"
#: Streams that passes are recorded on.
_recording_streams: dict[int, torch.cuda.Stream] = {}


@dataclass(eq=False)
class Memory:
    """A pool of GPU memory that one replay at a time writes to.

    Attributes:
        pool: PyTorch's handle of it; None before the first recording.
        graphs: those that are recorded in it and alive.
        forward: the recording of the forward pass that was replayed last.
        saved: the tensors that this pass saved for its backward pass.
        stream: the stream of the last replay.
        lock: held while a pass is recorded, or its replay enqueued.
    """

    pool: Any = None
    graphs: WeakSet[torch.cuda.CUDAGraph] = field(default_factory=WeakSet)
    forward: Recording | None = None
    saved: list[StorageWeakRef] = field(default_factory=list)
    stream: torch.cuda.Stream | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def pool_to_record_in(self) -> Any:
        """Return the pool; a new one where no graph is left of those in the old one, which PyTorch
        does not open again."""
        if not self.graphs:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def is_waited_for(self) -> bool:
        """Return whether a tensor is alive that the last forward pass saved."""
        self.saved = [reference for reference in self.saved if not reference.expired()]
        return bool(self.saved)


@cache
def memory_of_inference(device: int) -> Memory:
    """Return the memory that all inference passes of a CUDA device share: nothing in it outlives a
    replay."""
    return Memory()


@dataclass(slots=True)
class _Result:
    """Where a recorded result lies.

    Attributes:
        value: the result itself, where it is no tensor.
        facts: size, stride, storage offset and dtype; None where it is no tensor.
        place: the static input whose memory it is in; None for the graph's memory.
        storage: its storage in the graph's memory: address and bytes.
    """

    value: Any = None
    facts: dict[str, Any] | None = None
    place: int | None = None
    storage: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, value: Any, places: dict[int, int]) -> _Result:
        """Describe a result; `places` are static inputs by the address of their storage."""
        if not isinstance(value, Tensor):
            return cls(value)
        if value.is_neg() or value.is_conj():
            raise ValueError("a result is a negative or conjugate view")
        facts = {
            "size": value.shape, "stride": value.stride(), "dtype": value.dtype,
            "storage_offset": value.storage_offset(),
        }  # fmt: skip
        memory = value.untyped_storage()
        address = memory.data_ptr()
        return cls(None, facts, places.get(address), (address, memory.nbytes()))

    @property
    def is_dense(self) -> bool:
        """Whether it fills its storage, as a tensor does that nothing else is a view of."""
        facts: Any = self.facts
        return bool(facts["size"].numel() * facts["dtype"].itemsize == self.storage[1])

    def within(self, storage: Any) -> Tensor:
        """Return this result in `storage`."""
        make: Any = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata
        found: Tensor = make(self.facts, storage)
        return found

    def of_input(self, x: Tensor) -> Tensor:
        """Return this result as what it is, a static input or a view of one."""
        facts: Any = self.facts
        geometry = facts["size"], facts["stride"], facts["storage_offset"]
        same = (x.shape, x.stride(), x.storage_offset()) == geometry
        return x if same else x.detach().as_strided(*geometry)


@dataclass(slots=True)
class Recording:
    """A recorded pass.

    Attributes:
        graph: the CUDA graph.
        switches: those that were in force.
        why: why there is no graph; None where there is one.
        buffers: where inputs are copied to, by place.
        addresses: of the inputs that are read where they are, by place.
        from_forward: places of the inputs that the forward pass left in the graph's memory.
        results: of the pass.
        sources: visible results that are copied alone, by place.
        shared: storages that several visible results are in, with their places.
        saved: places of the results that stay in the graph's memory for the backward pass.
        held: storages of these results by address, which keep other recordings away from them
            until the backward pass is recorded.
        backward: the recording of the backward pass.
        is_stale: its backward pass has to be recorded again, which needs what `held` was.
    """

    graph: Any
    switches: tuple[bool, ...]
    why: str | None = None
    buffers: dict[int, Tensor] = field(default_factory=dict)
    addresses: dict[int, int] = field(default_factory=dict)
    from_forward: set[int] = field(default_factory=set)
    results: list[_Result] = field(default_factory=list)
    sources: dict[int, Tensor] = field(default_factory=dict)
    shared: list[tuple[Any, list[int]]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    held: dict[int, Any] = field(default_factory=dict)
    backward: Recording | None = None
    is_stale: bool = False

    def moved(self, inputs: Sequence[Any]) -> set[int]:
        """Return the places of inputs that are no longer where the graph reads them."""
        return {i for i, address in self.addresses.items() if inputs[i].data_ptr() != address}

    def replay(self, inputs: list[Any], memory: Memory, device: int) -> list[Any]:
        """Replay the graph on the current stream with these inputs, which are freed, and return its
        results."""
        stream = torch.cuda.current_stream(device)
        if memory.stream is not None and memory.stream != stream:
            stream.wait_stream(memory.stream)
        memory.stream = stream
        static = {i: inputs[r.place] for i, r in enumerate(self.results) if r.place is not None}
        if self.buffers:
            with torch.no_grad():
                given = [inputs[i] for i in self.buffers]
                torch._foreach_copy_(list(self.buffers.values()), given)
                del given
        inputs.clear()
        self.graph.replay()
        results = [result.value for result in self.results]
        with torch.no_grad():
            copies = [torch.empty_like(source) for source in self.sources.values()]
            if copies:
                torch._foreach_copy_(copies, list(self.sources.values()))
            for place, made in zip(self.sources, copies, strict=True):
                results[place] = made
            for storage, places in self.shared:
                whole = storage.clone()
                for place in places:
                    results[place] = self.results[place].within(whole)
            for place, x in static.items():
                results[place] = self.results[place].of_input(x)
        fresh: dict[int, Any] = {}
        for place in self.saved:
            address, size = self.results[place].storage
            if address not in fresh:
                fresh[address] = _storage(address, size, device)
            results[place] = self.results[place].within(fresh[address])
        if self.saved:
            memory.saved = [StorageWeakRef(storage) for storage in fresh.values()]
        return results


def _storage(address: int, size: int, device: int) -> Any:
    """Return a storage of so many bytes of a CUDA device, which does not own them."""
    cuda = torch.device("cuda", device)
    if not size:
        return torch.UntypedStorage(0, device=cuda)
    return torch._C._construct_storage_from_data_pointer(address, cuda, size)


def graphed(gm: fx.GraphModule, plain: Run, *, kind: str, **arguments: Any) -> Run:
    """Return a function that replays `gm` as a CUDA graph wherever that is right; the arguments are
    those of `Graphed`."""
    reason = why_not(gm)
    if reason is None and set(arguments["written"]) - set(arguments["static"]):
        reason = "it writes to an input that is no parameter or buffer"
    if reason is not None:
        log.info("no CUDA graph of the %s pass: %s", kind, reason)
        return plain
    return Graphed(plain, kind=kind, **arguments)


def why_not(gm: fx.GraphModule) -> str | None:
    """Return why `gm` cannot become a CUDA graph, in words; None if it can."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    vals = _pytree.tree_leaves(list(map(val_of, gm.graph.nodes)))
    devices = {t.device for t in vals if isinstance(t, Tensor) and t.device.type != "meta"}
    others = sorted(str(device) for device in devices if device.type != "cuda")
    if not devices or others:
        return f"it uses {', '.join(others) or 'no device'}"
    if len(devices) > 1:
        return f"it uses several devices: {', '.join(sorted(map(str, devices)))}"
    inputs = map(val_of, gm.graph.find_nodes(op="placeholder"))
    if any(isinstance(x, Tensor) and 0 in x.shape for x in inputs):
        return "an input is empty"
    if torch.cuda.get_allocator_backend() != "native":
        return f"the allocator is {torch.cuda.get_allocator_backend()}"
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "PYTORCH_NO_CUDA_MEMORY_CACHING is set"
    plain = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in plain.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if not is_triton(node):
                return f"{node.target} may need the host"
            node.meta["val"] = None  # PyTorch's look at it up to 2.11 fails
    node = get_first_incompatible_cudagraph_node(plain)
    return None if node is None else f"{node.target} cannot be captured"


def is_triton(node: fx.Node) -> bool:
    """Return whether a node launches a Triton kernel."""
    return "triton_kernel_wrapper" in str(node.target)


class Graphed:
    """A captured pass that is replayed; called with a list of inputs, which it empties.

    Args:
        plain: runs it without a CUDA graph.
        memory: of a forward pass and its backward pass, or of inference.
        device: the CUDA device.
        static: places of inputs that stay where they are: parameters, buffers and saved tensors.
        written: places of inputs that it writes to, all of them static.
        visible: how many results, from the first on, the caller sees; None for all.
        kind: ``inference``, ``forward`` or ``backward``.

    Attributes:
        replays: how many calls were replayed.
    """

    def __init__(
        self, plain: Run, *, memory: Memory, device: int, static: Sequence[int],
        written: Sequence[int], visible: int | None, kind: str,
    ) -> None:  # fmt: skip
        self._boxed_call = True  # what PyTorch wraps it in copies this from the object itself
        self._plain, self._visible, self._kind = plain, visible, kind
        self._memory, self._device = memory, device
        self._static, self._written = set(static), frozenset(written)
        self._recordings: dict[Any, Recording | None] = {}
        self._tries = 0
        self._reasons: set[str] = set()
        self.replays = 0

    def __call__(self, inputs: list[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return self._plain(inputs)
        if not _is_of_main_thread(self._kind == "backward"):
            return self._without(inputs, "in other threads than the main one")
        memory = self._memory
        with memory.lock:
            found = self._recording(inputs)
            if isinstance(found, Recording):
                if self._kind == "forward":
                    memory.forward = found
                self.replays += 1
                return found.replay(inputs, memory, self._device)
        return self._without(inputs, found)

    def _without(self, inputs: list[Any], reason: str) -> Any:
        """Run this pass without a graph, and log why, once for each reason."""
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            log.info("the %s pass runs without a CUDA graph %s", self._kind, reason)
        return self._plain(inputs)

    def _recording(self, inputs: list[Any]) -> Recording | str:
        """Return the recording to replay with these inputs, or why there is none; the reason of a
        first call is empty."""
        switches = _switches()
        key = (switches, *(x for x in inputs if isinstance(x, int)))
        if key not in self._recordings:
            if len(self._recordings) >= MOST_GRAPHS:
                return f"for further sizes, as it has {MOST_GRAPHS} graphs"
            self._recordings[key] = None
            return ""
        if self._kind == "backward":
            return self._of_last_forward(inputs, switches)
        if self._memory.is_waited_for():
            return "while tensors that an earlier call saved wait for their backward pass"
        recording = self._recordings[key]
        moved = set() if recording is None else recording.moved(inputs)
        if recording is None or recording.is_stale or moved:
            self._static -= moved - self._written  # copied from now on
            recording = self._recordings[key] = self._record(inputs, switches, {})
        return recording if recording.why is None else recording.why

    def _of_last_forward(self, inputs: list[Any], switches: Any) -> Recording | str:
        """Return the recording of the backward pass that belongs to the last forward pass."""
        forward = self._memory.forward
        if forward is None or (forward.saved and not self._memory.is_waited_for()):
            return "where its forward pass ran without"
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return "where saved tensors are retained, as a replay overwrites them"
        if forward.switches != switches:
            return "under other switches than its forward pass"
        recording = forward.backward
        if recording is None:
            if forward.held and not any(_address_of(x) in forward.held for x in inputs):
                return "where its forward pass ran without"
            held, forward.held = forward.held, {}
            recording = forward.backward = self._record(inputs, switches, held)
        if recording.why is not None:
            return recording.why
        moved = recording.moved(inputs)
        if moved & recording.from_forward:
            return "where its forward pass ran without"
        if moved:
            self._static -= moved
            forward.is_stale = True
            return "where parameters have moved"
        return recording

    def _record(self, inputs: list[Any], switches: Any, held: dict[int, Any]) -> Recording:
        """Record this pass; `held` are storages of its forward pass by address, which are freed as
        the pass has read them. Where that fails, the recording says why."""
        self._tries += 1
        if self._tries > MOST_GRAPHS:
            return Recording(None, switches, f"as it was recorded {MOST_GRAPHS} times")
        graph, given = torch.cuda.CUDAGraph(), list(inputs)
        recording = Recording(graph, switches)
        pool = self._memory.pool_to_record_in()
        try:
            with torch.cuda.device(self._device), _recorded(graph, pool, self._device):
                places: dict[int, int] = {}  # of inputs by the address of their storage
                for i, x in enumerate(inputs):
                    if not isinstance(x, Tensor):
                        continue
                    if i not in self._static:
                        given[i] = _buffer_for(x)
                        recording.buffers[i] = _again(given[i])
                        continue
                    recording.addresses[i], address = x.data_ptr(), _address_of(x)
                    if address in held:
                        recording.from_forward.add(i)
                        given[i] = _within(held[address], x)
                    elif x.numel():
                        places[address] = i
                held.clear()
                self._describe(recording, list(self._plain(given)), places)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            return Recording(None, switches, f"as it cannot be recorded: {first or type(error)}")
        self._memory.graphs.add(graph)
        return recording

    def _describe(self, recording: Recording, results: list[Any], places: dict[int, int]) -> None:
        """Enter where the results of a pass lie."""
        owners: dict[int, list[int]] = {}
        for i, result in enumerate(results):
            recording.results.append(_Result.of(result, places))
            if not isinstance(result, Tensor) or recording.results[i].place is not None:
                continue
            if self._visible is None or i < self._visible:
                owners.setdefault(_address_of(result), []).append(i)
            else:
                recording.saved.append(i)
                recording.held[_address_of(result)] = result.untyped_storage()
        for shared in owners.values():
            first = recording.results[shared[0]]
            if len(shared) == 1 and first.is_dense:
                recording.sources[shared[0]] = _again(results[shared[0]])
            else:
                recording.shared.append((_storage(*first.storage, self._device), shared))


def _address_of(x: Any) -> int:
    """Return the address of the storage of a tensor; 0 for all else."""
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0


def _within(storage: Any, like: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor as `like` in `storage`, which any mode may write to."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=like.dtype, device=device or like.device)
        return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _buffer_for(x: Tensor) -> Tensor:
    """Return memory for a copy of `x`. Nothing is launched, as `torch.empty` does where PyTorch is
    set to be deterministic: that would be recorded, and run behind the copy."""
    like = torch.empty_like(x, device="meta")
    storage = torch.UntypedStorage(like.numel() * like.element_size(), device=x.device)
    return _within(storage, like, x.device)


def _again(x: Tensor) -> Tensor:
    """Return a tensor in the memory of `x`, which does not own it."""
    memory = x.untyped_storage()
    return _within(_storage(memory.data_ptr(), memory.nbytes(), x.get_device()), x)


def _is_of_main_thread(backward: bool) -> bool:
    """Return whether this is the main thread, or one that autograd started for its backward pass.

    No thread may wait for the device while another one records, so that one alone does.
    """
    if threading.current_thread() is threading.main_thread():
        torch._C._stash_obj_in_tls(_MAIN_THREAD, True)
        return True
    return backward and bool(torch._C._is_key_in_tls(_MAIN_THREAD))


@contextmanager
def _recorded(graph: Any, pool: Any, device: int) -> Iterator[None]:
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
                graph.capture_end()
            except BaseException:
                _mend(graph, pool, device)
                raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        current.wait_stream(stream)  # the first replay needs the random offset that was set there
        if collects:
            gc.enable()


def _mend(graph: Any, pool: Any, device: int) -> None:
    """End a recording that failed: PyTorch itself leaves its allocator in the pool, and its random
    numbers in the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a graph that is empty
        try:
            graph.capture_end()
        except Exception:
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
            another = torch.cuda.CUDAGraph()  # whose end is that of the random numbers, too
            another.capture_begin(capture_error_mode="thread_local")
            another.capture_end()
        graph.reset()


def _switches() -> tuple[bool, ...]:
    """Return PyTorch's switches that decide how a recorded graph computes, and no guard knows."""
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, convolutions_allow_tf32(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
