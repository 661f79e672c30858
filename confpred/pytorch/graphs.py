"""CUDA graphs of captured graphs, by PyTorch's cudagraph trees.

A replay overwrites what the one before it returned. As the network has to behave as in eager mode,
results that the caller sees are copied out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree

from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch.passes import Run, val_of

log = logging.getLogger("confpred")
#: Graphs that one captured graph may become: one for each set of open sizes and switches.
MOST_GRAPHS = 8
#: The stream of the last replay on each device: replays share memory, so they follow one another.
_last_stream: dict[int, torch.cuda.Stream] = {}


def is_recordable(backward: bool) -> bool:
    """Return whether this thread may run a pass as a CUDA graph.

    Cudagraph trees belong to the main thread, and to those that autograd starts for its backward
    passes. Others run without: PyTorch keeps trees in memory of the thread that is not safe to give
    back when the thread ends, and no thread may wait for the device while another one records.
    """
    if threading.current_thread() is threading.main_thread():
        from torch._inductor.cudagraph_trees import local

        # Before PyTorch 2.13 trees are there only for the thread that has imported the module.
        return hasattr(local, "tree_manager_containers")
    return backward and bool(torch._C._is_key_in_tls("tree_manager_containers"))


def graphed(gm: fx.GraphModule, plain: Run, *, kind: str, **arguments: Any) -> Run:
    """Return a function that replays `gm` as a CUDA graph wherever that is right; the arguments are
    those of `Graphed`."""
    why = why_not(gm)
    if why is not None:
        log.info("no CUDA graph of the %s pass: %s", kind, why)
        return plain
    return Graphed(gm, plain, kind=kind, **arguments)


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
    node = get_first_incompatible_cudagraph_node(gm)
    return None if node is None else f"{node.target} cannot be captured"


class Graphed:
    """A captured graph that is replayed; called with a list of inputs, which it empties.

    Args:
        gm: the captured graph, for what it says of its nodes.
        plain: runs it without a CUDA graph.
        device: the CUDA device.
        static: places of inputs that stay where they are, such as parameters.
        written: places of inputs that it writes to.
        visible: how many results, from the first on, the caller sees; None for all.
        kind: ``inference``, ``forward`` or ``backward``.
    """

    def __init__(
        self, gm: fx.GraphModule, plain: Run, *, device: int, static: Sequence[int],
        written: Sequence[int], visible: int | None, kind: str,
    ) -> None:  # fmt: skip
        from torch._inductor.cudagraph_utils import get_placeholder_info

        self._boxed_call = True  # what PyTorch wraps it in copies this from the object itself
        self._plain, self._visible, self._kind = plain, visible, kind
        self._device, self._graphs, self._said = device, dict[Any, Run](), set[str]()
        results: Any = gm.graph.output_node().args[0]
        self._arguments: dict[str, Any] = {
            "static_input_idxs": tuple(static), "device_index": device,
            "is_backward": kind == "backward", "is_inference": kind == "inference",
            "stack_traces": [getattr(result, "stack_trace", None) for result in results],
            "placeholders": get_placeholder_info(gm.graph), "mutated_input_idxs": tuple(written),
        }  # fmt: skip

    def __call__(self, inputs: list[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return self._plain(inputs)
        if not is_recordable(self._kind == "backward"):
            self._say("in other threads than the main one")
            return self._plain(inputs)
        key = (_switches(), *(x for x in inputs if isinstance(x, int)))
        run = self._graphs.get(key)
        if run is None:
            if len(self._graphs) >= MOST_GRAPHS:
                self._say(f"for further sizes, as it has {MOST_GRAPHS} graphs")
                return self._plain(inputs)
            from torch._inductor.cudagraph_trees import cudagraphify_impl

            run = self._graphs[key] = cudagraphify_impl(self._plain, [], **self._arguments)
        stream = torch.cuda.current_stream(self._device)
        last = _last_stream.get(self._device)
        if last is not None and last != stream:
            stream.wait_stream(last)
        _last_stream[self._device] = stream
        return self._copied(run(inputs))

    def _say(self, where: str) -> None:
        """Log once where this pass runs without a CUDA graph."""
        if where not in self._said:
            self._said.add(where)
            log.warning("the %s pass runs without a CUDA graph %s", self._kind, where)

    def _copied(self, returned: Any) -> list[Any]:
        """Return `returned` with copies in the place of what the caller sees.

        Results that share memory, such as a tensor and a view of it, go on to share it.
        """
        results: list[Any] = list(returned)
        groups: dict[int, list[int]] = {}
        for i, t in enumerate(results[: self._visible]):
            if isinstance(t, Tensor):
                groups.setdefault(t.untyped_storage()._cdata, []).append(i)
        alone = [places[0] for places in groups.values() if len(places) == 1]
        copies = {i: torch.empty_like(results[i]) for i in alone}
        with torch.no_grad():
            if copies:
                torch._foreach_copy_(list(copies.values()), [results[i] for i in alone])
            for places in (shared for shared in groups.values() if len(shared) > 1):
                storage = results[places[0]].untyped_storage().clone()
                for i in places:
                    t = results[i]
                    empty = torch.empty(0, dtype=t.dtype, device=t.device)
                    copies[i] = empty.set_(storage, t.storage_offset(), t.shape, t.stride())
        return [copies.get(i, result) for i, result in enumerate(results)]


def _switches() -> tuple[bool, ...]:
    """Return PyTorch's switches that decide how a recorded graph computes, and no guard knows."""
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, convolutions_allow_tf32(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
