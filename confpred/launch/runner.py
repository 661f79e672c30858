"""Kernels, compiled in threads and loaded once for all launches; and runners: launches that are
compiled, built and loaded on one CUDA device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from confpred.concurrency import submit
from confpred.cuda import driver
from confpred.cuda.compiler import CompiledKernel, compile_kernel
from confpred.cudnn.plans import Plans
from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec, Launch, Operation, Step
from confpred.problem.record import Record

#: Enqueues a launch, given the handle of a CUDA stream and the addresses of the operands.
Enqueue = Callable[[int, Sequence[int]], None]


@cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that compile; each starts when it is first needed."""
    return ThreadPoolExecutor(min(32, os.cpu_count() or 1), "confpred-compiler")


@cache
def _submitted(spec: KernelSpec, arch: str) -> Future[CompiledKernel]:
    """Return `spec` compiled for `arch`, now or soon; nothing is compiled twice."""
    return submit(_threads(), compile_kernel, spec, arch)


def compile_soon(launch: Launch, ordinal: int) -> None:
    """Compile the kernels of `launch` for CUDA device `ordinal`, side by side."""
    for kernel in launch.kernels:
        _submitted(kernel, driver.device_of(ordinal).arch)


@cache
def loaded(spec: KernelSpec, ordinal: int) -> driver.LoadedKernel:
    """Return `spec` in the context of CUDA device `ordinal`, which becomes this thread's: compiled
    now if need be, also while a CUDA graph is captured. It may use all the shared memory of a
    block.

    Raises:
        CompileError, LaunchError, MissingExtra: it cannot be compiled or loaded.
        UnknownDevice: the device has no description.
    """
    device = driver.device_of(ordinal)
    compiled = _submitted(spec, device.arch).result()
    driver.make_current(ordinal)
    with driver.outside_capture():
        return driver.load(compiled, device.smem_per_block)


def bound(launch: Launch, names: Sequence[str], ordinal: int) -> Enqueue:
    """Return a function that enqueues the kernels of `launch` on CUDA device `ordinal`, given the
    addresses of the operands in the order of `names`, 0 for an absent one; see `driver.bind`.
    Raises what `loaded` does."""
    compile_soon(launch, ordinal)
    kernels = [loaded(step.kernel, ordinal) for step in launch.steps]
    return driver.bind(kernels, launch, names)


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
        from confpred.launch.program import Program, on_tensors  # imports torch

        compile_soon(launch, self._ordinal)

        def bind(step: Step) -> Callable[[Any], None]:
            own = tuple(dict.fromkeys(step.operands))
            return on_tensors(own, bound(Launch((step,)), own, self._ordinal))

        program = Program(launch, bind)

        def enqueue(_: int, tensors: Sequence[Any]) -> None:
            program(dict(zip(names, tensors, strict=True)))

        return Runner(launch, names, enqueue)

    def may_build_others(self, launch: Launch) -> bool:
        """Return whether the library, which refused the plan of `launch`, may build another: it is
        installed, and of the release that listed the plan."""
        return bool(
            launch.plan and self._plans is not None and self._plans.is_of_this_release(launch.plan)
        )


def _reset_after_fork() -> None:
    """Forget threads and kernels, which a child process does not have."""
    for cached in (_threads, _submitted, loaded):
        cached.cache_clear()


os.register_at_fork(after_in_child=_reset_after_fork)
