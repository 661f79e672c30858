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
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confpred.cuda import driver
from confpred.cuda.cache import KernelCache, default_folder
from confpred.cudnn.graphs import Graph, front_end, operand_uids, release
from confpred.cudnn.table import release_text
from confpred.errors import LaunchError
from confpred.problem.conv2d import Problem
from confpred.problem.operation import SCRATCH, Plan

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
        """What enqueues the plan, given the handle of a CUDA stream and the device addresses of the
        operands in the order of `names`, among them ``scratch`` where there is a workspace.

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
            given = {uid: addresses[slot] for uid, slot in slots}
            workspace = 0 if scratch is None else addresses[scratch]
            try:
                if is_loaded:
                    run(given, workspace, index, handle)
                    return
                with driver.outside_capture():  # CUDA loads a kernel when it is first launched
                    run(given, workspace, index, handle)
                is_loaded = True
            except RuntimeError as error:
                raise LaunchError(f"cuDNN refused a launch: {error}") from error

        return enqueue


class Plans:
    """cuDNN's plans for a problem on CUDA device `ordinal`, which is the current one."""

    def __init__(
        self, problem: Problem, ordinal: int, kernel_cache: KernelCache | None = None
    ) -> None:
        """
        Args:
            problem: any.
            ordinal: CUDA device.
            kernel_cache: where plans that are slow to build are kept; the user's by default.

        Raises:
            MissingExtra, LaunchError: see `_handle`.
        """
        self._problem = problem
        self._ordinal = ordinal
        self._cache = kernel_cache or KernelCache(default_folder())
        self._uids = operand_uids(problem)
        self._offered: Graph | None = None
        _handle(ordinal)

    def build(self, plan: Plan) -> BuiltPlan:
        """
        Raises:
            LaunchError: `plan` is of another cuDNN, is not offered, or cannot be built.
        """
        if not self.is_of_this_release(plan):
            here = release_text(release())
            raise LaunchError(f"the plan is of cuDNN {plan.version}, and this is {here}")
        key = self._key(plan)
        with driver.outside_capture():
            return self._kept(key) or self._new(plan, key)

    def is_of_this_release(self, plan: Plan) -> bool:
        """Whether `plan` is of the cuDNN that is installed; another one numbers its engines and
        knobs as it likes, and has its own order of them."""
        return plan.version == release_text(release())

    def _new(self, plan: Plan, key: str) -> BuiltPlan:
        offered = self._offered
        if offered is None:
            offered = self._offered = Graph(self._problem, handle=_handle(self._ordinal))
        index = offered.place(plan.config)
        if index is None:
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

    def _kept(self, key: str) -> BuiltPlan | None:
        """The plan that was built before; None where it was not, or cuDNN takes it no more."""
        content = self._cache.get(key)
        if content is None:
            return None
        handle = _handle(self._ordinal)
        try:
            graph = front_end().pygraph(handle=handle)
            graph.deserialize(handle, list(content))
            return self._built(graph, 0)
        except (RuntimeError, front_end().cudnnGraphNotSupportedError) as error:
            log.debug("%s: a kept plan is built again: %s", self._problem, error)
            return None

    def _built(self, graph: Any, index: int) -> BuiltPlan:
        workspace: int = graph.get_workspace_size_plan_at_index(index)
        return BuiltPlan(workspace, graph, index, self._uids, self._ordinal)

    def _key(self, plan: Plan) -> str:
        """Of the plan's entry in the cache: all that decides its bytes."""
        library = front_end()
        facts = (
            *("cuDNN plan", library.backend_version(), library.__version__),
            *driver.describe(self._ordinal),
            *(str(self._problem), sorted(plan.config.items())),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _handle(ordinal: int, stream: int | None = None) -> int:
    """This thread's cuDNN handle of the current CUDA device `ordinal`, set to `stream` where it is
    to launch. cuDNN allows a handle one thread at a time.

    Raises:
        MissingExtra: see `front_end`.
        LaunchError: cuDNN gives none.
    """
    try:
        handles: dict[int, list[int]] = _of_thread.handles
    except AttributeError:
        handles = _of_thread.handles = {}
    known = handles.get(ordinal)
    if known is None:
        library = front_end()
        try:
            with driver.outside_capture():
                known = handles[ordinal] = [library.create_handle(), -1]
        except RuntimeError as error:
            raise LaunchError(f"cuDNN gives no handle: {error}") from error
    if stream is not None and stream != known[1]:
        front_end().set_stream(handle=known[0], stream=stream)
        known[1] = stream
    return known[0]
