"""From a choice to a launch: compiled in threads, loaded, ready for tensors of one shape."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.compiler import Compiled, compile_kernel
from confpred.cuda.driver import BoundLaunch, NoContext
from confpred.cudnn.plans import Plans
from confpred.errors import CompileError, LaunchError, MissingExtra
from confpred.families.registry import all_families, operation_of
from confpred.predict.choice import MAX_TOP, Choice
from confpred.problem.conv2d import Problem
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec, Launch, Step
from confpred.products.run import Program, by_driver
from confpred.pytorch.run.choosing import current_predictor, is_ours, kept, limits_for, warn_once

log = logging.getLogger(__name__)
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CHANNELS_LAST = torch.channels_last
NOWHERE: Mapping[int, Tensor] = MappingProxyType({})
ALIGNMENT = 16  # bytes; the kernels load this much at a time
#: From the operands' names to what enqueues a launch, given a stream's handle and the addresses of
#: the operands.
Bind = Callable[[Sequence[str]], Callable[[int, Sequence[int]], None]]
#: The handle of the current stream of a CUDA device, without the object that PyTorch makes of it.
#: A PyTorch without CUDA lacks the function, and never calls it here.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
#: A tensor of a size, strides and dtype on the current CUDA device, as Inductor's code allocates
#: it: PyTorch's public function fills memory first where algorithms are to be deterministic.
_empty: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


@cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that compile; each starts when it is first needed."""
    return ThreadPoolExecutor(min(32, os.cpu_count() or 1), "confpred-compiler")


@cache
def submit(spec: KernelSpec, arch: str) -> Future[Compiled]:
    """Return `spec` compiled for `arch`, now or soon; nothing is compiled twice."""
    return _threads().submit(compile_kernel, spec, arch)


@cache
def loaded(spec: KernelSpec, smem_bytes: int, ordinal: int) -> Any:
    """Return `spec` in the context of CUDA device `ordinal`, compiled now if need be, also while a
    CUDA graph is captured; all launches of a kernel share it. Raises what `ready_launch` does, and
    `UnknownDevice`."""
    compiled = submit(spec, driver.device_of(ordinal).arch).result()
    with torch.cuda.device(ordinal):
        driver.make_current(ordinal)
        with driver.outside_capture():
            return driver.load(compiled, smem_bytes).kernel


def in_context(ordinal: int, launch: Callable[[int], Any]) -> None:
    """Call `launch` with the current stream of CUDA device `ordinal`; again where this thread had
    not used the device yet, as the one of a backward pass."""
    try:
        launch(current_stream(ordinal))
    except NoContext:
        driver.make_current(ordinal)
        launch(current_stream(ordinal))


def _reset_after_fork() -> None:
    """Forget threads and kernels, which a child process does not have."""
    for found in (_threads, submit, loaded):
        found.cache_clear()


os.register_at_fork(after_in_child=_reset_after_fork)


class ReadyLaunch:
    """A launch of `choice`, compiled and loaded."""

    __slots__ = ("_enqueue", "_ordinal", "_outputs", "_workspaces", "choice")

    def __init__(self, choice: Choice, launch: Launch, bind: Bind | Program, ordinal: int) -> None:
        """Bind a launch, or take a program, which is called with the operands by name."""
        self.choice, self._ordinal = choice, ordinal
        problem: Any = choice.problem
        operands = operation_of(problem).operands(problem)  # outputs first
        self._outputs = [(*_layout(o.shape), getattr(torch, o.dtype)) for o in operands if o.terms]
        spaces: list[tuple[str, int, Callable[..., Tensor]]] = [
            (ZEROED, launch.zeroed_bytes, torch.zeros), (SCRATCH, launch.scratch_bytes, torch.empty)
        ]  # fmt: skip
        self._workspaces = [space for space in spaces if space[1]]
        names = [*(o.name for o in operands), *(name for name, *_ in self._workspaces)]
        self._enqueue: Callable[[Sequence[Tensor], int], None]
        if isinstance(bind, Program):
            self._enqueue = lambda tensors, _: bind(dict(zip(names, tensors, strict=True)))
        else:
            enqueue = bind(names)
            self._enqueue = lambda tensors, s: enqueue(s, [t.data_ptr() for t in tensors])

    def run(self, *inputs: Tensor | None, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """Enqueue the launch on the current stream of its device, and return the outputs.

        Workspaces are new at each call, from the current stream's pool: memory that is kept would
        be shared by streams and CUDA graphs.

        `inputs` are in the order of the operation's operands, None for one that the problem does
        not have; of the problem's shapes and dtype, on the launch's device, dense as the kernels
        read them (`dense`). Unaligned ones are copied. `into` has aligned tensors to write outputs
        to, by their place; the others are new.
        """
        ordinal = self._ordinal
        if torch.cuda.current_device() != ordinal:
            with torch.cuda.device(ordinal):
                return self.run(*inputs, into=into)
        device = torch.device("cuda", ordinal)
        given = [aligned(t) for t in inputs if t is not None]
        made = [
            into[place] if place in into else _empty(*output)
            for place, output in enumerate(self._outputs)
        ]
        spaces = [make(n, dtype=torch.uint8, device=device) for _, n, make in self._workspaces]
        in_context(ordinal, partial(self._enqueue, [*made, *given, *spaces]))
        return made


def alike(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether `x` is on a CUDA device and `others` have its dtype and device."""
    return x.is_cuda and all(
        t is None or (t.dtype is x.dtype and t.device == x.device) for t in others
    )


def is_channels_last(x: Tensor) -> bool:
    """Return whether `x` is dense with its channels last, beyond doubt: a tensor of one channel or
    one pixel is dense in either layout, and PyTorch takes it for one with its channels first."""
    return x.dim() == 4 and x.is_contiguous(memory_format=CHANNELS_LAST) and not x.is_contiguous()


def dense(t: Tensor) -> Tensor:
    """Return `t` as the kernels read it: channels last, or a dense vector; no negative view."""
    layout = CHANNELS_LAST if t.dim() == 4 else torch.contiguous_format
    return t.resolve_neg().contiguous(memory_format=layout)


def aligned(t: Tensor) -> Tensor:
    """Return `t`, or a copy that begins where kernels can load ``ALIGNMENT`` bytes."""
    return t.clone(memory_format=torch.preserve_format) if t.data_ptr() % ALIGNMENT else t


def _layout(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides, as PyTorch counts them, of an operand whose dense shape is
    `shape`: an image or filter has its channels last."""
    t = torch.empty(tuple(shape), device="meta")
    t = t.permute(0, 3, 1, 2) if len(shape) == 4 else t
    return tuple(t.shape), t.stride()


def load(choice: Choice, ordinal: int, limits: Limits = UNLIMITED) -> ReadyLaunch | None:
    """Return the launch of `choice` on CUDA device `ordinal`, compiled now if need be; None where
    the driver or the compiler refuses it, which is logged.

    For a library's plan it is the first in the ranking, from `choice` on, that the library builds
    and that needs no more memory than `limits` allow.
    """
    limits = limits_for(choice.problem, limits)

    def find() -> ReadyLaunch | None:
        launch = _launch_of(choice)
        if launch.plan is not None and isinstance(choice.problem, Problem):
            return _load_plan(choice, choice.problem, ordinal, limits)
        return _load_kernels(choice, launch, ordinal, limits)

    return kept(("launch", choice.problem, choice.candidate, ordinal, limits), find)


def _load_kernels(
    choice: Choice, launch: Launch, ordinal: int, limits: Limits
) -> ReadyLaunch | None:
    if not limits.allow(choice.problem, launch):  # they are others since it was chosen
        return None
    try:
        return ready_launch(choice, launch, ordinal)
    except (CompileError, LaunchError, MissingExtra) as error:
        log.warning("falling back to PyTorch for %s: %s", choice.problem, error)
        return None


def ready_launch(choice: Choice, launch: Launch, ordinal: int) -> ReadyLaunch:
    """Return `launch`, of kernels and perhaps of products between them, on CUDA device `ordinal`;
    raises `CompileError`, `LaunchError` or `MissingExtra` where a kernel cannot be had."""
    for kernel in launch.kernels:
        submit(kernel, driver.device_of(ordinal).arch)  # side by side

    def load_step(step: Step) -> Any:
        return loaded(step.kernel, step.smem_bytes, ordinal)

    if launch.program:
        program = Program(launch, lambda step: by_driver(step, load_step(step)))
        return ReadyLaunch(choice, launch, program, ordinal)
    kernels = [load_step(step) for step in launch.steps]
    return ReadyLaunch(choice, launch, lambda n: BoundLaunch(kernels, launch, n).enqueue, ordinal)


def _load_plan(
    choice: Choice, problem: Problem, ordinal: int, limits: Limits
) -> ReadyLaunch | None:
    """Load the first plan in the ranking, from `choice` on, that the library builds; only the
    library knows which ones it has for a problem."""
    try:
        with torch.cuda.device(ordinal):
            plans = Plans(problem, ordinal)
    except (LaunchError, MissingExtra) as error:
        warn_once(f"falling back to PyTorch: {error}")
        return None
    for found in _from_on(choice, ordinal, limits):
        if not is_ours(found):
            break
        launch = _launch_of(found)
        if launch.plan is None:
            return _load_kernels(found, launch, ordinal, limits)
        if not limits.allow(problem, launch):
            continue
        try:
            with torch.cuda.device(ordinal):
                built = plans.build(launch.plan)
        except LaunchError as error:
            if not plans.is_of_this_release(launch.plan):
                warn_once(f"falling back to PyTorch: {error}")
                return None
            log.debug("%s: %s", problem, error)
            continue
        launch = replace(launch, scratch_bytes=built.workspace_bytes)
        if not limits.allow(problem, launch):
            log.debug("%s: the plan needs %d bytes", problem, built.workspace_bytes)
            continue
        return ReadyLaunch(found, launch, built.bind, ordinal)
    log.info("falling back to PyTorch for %s: cuDNN builds none of the chosen plans", problem)
    return None


def _from_on(choice: Choice, ordinal: int, limits: Limits) -> Iterator[Choice]:
    """Yield `choice` and those ranked after it; the others are ranked once they are needed."""
    yield choice
    predictor, device = current_predictor().within(limits), driver.device_of(ordinal)
    for other in predictor.rank(choice.problem, device, MAX_TOP):
        if other.candidate != choice.candidate:
            yield replace(choice, candidate=other.candidate, predicted_ms=other.predicted_ms)


def compile_ahead(choices: Sequence[Choice], ordinal: int, limits: Limits = UNLIMITED) -> None:
    """Compile the kernels of `choices` in parallel, and load them on CUDA device `ordinal`; one
    that cannot be had is left to the call that needs it."""
    ours = [choice for choice in choices if is_ours(choice)]
    for choice in ours:
        for kernel in _launch_of(choice).kernels:
            submit(kernel, driver.device_of(ordinal).arch)
    for choice in ours:
        load(choice, ordinal, limits)


def _launch_of(choice: Choice) -> Launch:
    candidate = choice.candidate
    return all_families()[candidate.provider].launch(choice.problem, candidate.config_id)
