"""cuDNN's plans on a GPU: built, and launched on a stream.

Plans(problem) ----> build(plan) ----> BuiltPlan: workspace_bytes, bind(names)
what cuDNN offers                                                |
                                                                 v
                                                enqueue(stream, addresses)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confpred.cudnn.graphs import Graph, front_end, release
from confpred.cudnn.table import release_text
from confpred.errors import LaunchError
from confpred.problem.conv2d import Problem
from confpred.problem.operation import SCRATCH, Plan

_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A plan that can be launched in the context that it was built in.

    Attributes:
        workspace_bytes: device memory that a launch needs, of any content.
    """

    workspace_bytes: int
    _graph: Graph
    _index: int
    _ordinal: int

    def bind(self, names: Sequence[str]) -> Callable[[int, Sequence[int]], None]:
        """What enqueues the plan, given the handle of a CUDA stream and the device addresses of the
        operands in the order of `names`, among them ``scratch`` where there is a workspace.

        It raises `LaunchError` where cuDNN refuses.
        """
        run = self._graph.graph._execute_plan_at_index
        index, ordinal = self._index, self._ordinal
        slots = [(uid, names.index(name)) for name, uid in self._graph.uids.items()]
        scratch = names.index(SCRATCH) if self.workspace_bytes else None

        def enqueue(stream: int, addresses: Sequence[int]) -> None:
            handle = _handle(ordinal, stream)
            given = {uid: addresses[slot] for uid, slot in slots}
            workspace = 0 if scratch is None else addresses[scratch]
            try:
                run(given, workspace, index, handle)
            except RuntimeError as error:
                raise LaunchError(f"cuDNN refused a launch: {error}") from error

        return enqueue


class Plans:
    """What cuDNN offers for a problem on CUDA device `ordinal`, which is the current one."""

    def __init__(self, problem: Problem, ordinal: int) -> None:
        """
        Raises:
            MissingExtra: cuDNN's front end is not installed.
            LaunchError: cuDNN has no plan for the problem.
        """
        self._graph = Graph(problem, handle=_handle(ordinal, 0))
        self._ordinal = ordinal

    def build(self, plan: Plan) -> BuiltPlan:
        """
        Raises:
            LaunchError: `plan` is of another cuDNN, is not offered, or cannot be built.
        """
        if plan.version != release_text(release()):
            here = release_text(release())
            raise LaunchError(f"the plan is of cuDNN {plan.version}, and this is {here}")
        index = self._graph.place(plan.config)
        if index is None:
            raise LaunchError("cuDNN does not offer the plan for this problem")
        graph = self._graph.graph
        try:
            graph.build_plan_at_index(index)
            workspace: int = graph.get_workspace_size_plan_at_index(index)
        except (RuntimeError, front_end().cudnnGraphNotSupportedError) as error:
            raise LaunchError(f"cuDNN cannot build the plan: {error}") from error
        return BuiltPlan(workspace, self._graph, index, self._ordinal)


def _handle(ordinal: int, stream: int) -> int:
    """This thread's cuDNN handle of the current CUDA device `ordinal`, set to `stream`. cuDNN
    allows a handle one thread at a time."""
    try:
        handles: dict[int, list[int]] = _of_thread.handles
    except AttributeError:
        handles = _of_thread.handles = {}
    known = handles.get(ordinal)
    if known is None:
        known = handles[ordinal] = [front_end().create_handle(), -1]
    if stream != known[1]:
        front_end().set_stream(handle=known[0], stream=stream)
        known[1] = stream
    return known[0]
