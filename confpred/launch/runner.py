"""Runners: launches that are compiled, built and loaded on one CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from confpred.cudnn.plans import Plans
from confpred.launch.kernels import bound, compile_soon
from confpred.problem.operation import SCRATCH, ZEROED, Launch, Operation
from confpred.problem.record import Record


def workspaces(launch: Launch) -> dict[str, int]:
    """Return the bytes of each workspace that `launch` needs, by the operand's name. The one called
    ``zeroed`` is zero before the launch, and left so; ``scratch`` holds anything."""
    sizes = {ZEROED: launch.zeroed_bytes, SCRATCH: launch.scratch_bytes}
    return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True, slots=True)
class Runner:
    """A launch that lacks only its operands.

    Attributes:
        launch: the launch, with the workspace that a library's plan needs.
        names: names of the operation's operands, outputs first, then of the workspaces.
        enqueue: enqueues the launch, given a CUDA stream's handle and the operands' addresses in
            the order of `names`; a program takes PyTorch's tensors, and uses the current stream. It
            raises `NoContext` where the thread has no CUDA context yet, and `LaunchError` where the
            launch is refused.
    """

    launch: Launch
    names: tuple[str, ...]
    enqueue: Callable[[int, Sequence[Any]], None]

    @property
    def takes_tensors(self) -> bool:
        """Whether `enqueue` is given tensors, in place of their addresses."""
        return bool(self.launch.program)


class Loader:
    """Makes the runners of one problem on CUDA device `ordinal`, which is the current one."""

    def __init__(self, operation: Operation, problem: Record, ordinal: int) -> None:
        self._names = tuple(operand.name for operand in operation.operands(problem))
        self._problem, self._ordinal = problem, ordinal
        self._plans: Plans | None = None  # a library lists them once for all candidates

    def runner(self, launch: Launch) -> Runner:
        """Return `launch`, which computes the problem, ready to run.

        Raises:
            CompileError, LaunchError, MissingExtra: a kernel or a plan cannot be made.
        """
        if launch.plan is not None:
            problem: Any = self._problem  # a convolution
            self._plans = self._plans or Plans(problem, self._ordinal)
            built = self._plans.build(launch.plan)
            launch = replace(launch, scratch_bytes=built.workspace_bytes)
            names = (*self._names, *workspaces(launch))
            return Runner(launch, names, built.bind(names))
        names = (*self._names, *workspaces(launch))
        if not launch.program:
            return Runner(launch, names, bound(launch, names, self._ordinal))
        from confpred.launch.program import Program, by_driver  # imports torch

        compile_soon(launch, self._ordinal)
        program = Program(launch, lambda step: by_driver(step, self._ordinal))

        def enqueue(_: int, tensors: Sequence[Any]) -> None:
            program(dict(zip(names, tensors, strict=True)))

        return Runner(launch, names, enqueue)

    def may_build_others(self, launch: Launch) -> bool:
        """Return whether the library, which refused the plan of `launch`, may build another: it is
        installed, and of the release that listed the plan."""
        return bool(
            launch.plan and self._plans is not None and self._plans.is_of_this_release(launch.plan)
        )
