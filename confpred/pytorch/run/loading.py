"""From an assignment to a launch: compiled, loaded, ready for tensors of one shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.driver import NoContext
from confpred.errors import CompileError, LaunchError, MissingExtra
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.families.registry import operation_of
from confpred.launch.assignment import Assignment
from confpred.launch.runner import Loader, Runner, compile_soon, workspaces
from confpred.predict.choice import MAX_TOP, Choice
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import ZEROED
from confpred.problem.record import Record
from confpred.pytorch.run import choosing
from confpred.pytorch.run.choosing import Constraints, cached, limits_for, runs_kernel, warn_once

log = logging.getLogger(__name__)
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CHANNELS_LAST = torch.channels_last
#: Memory formats with the channels last, by the number of dimensions; lines have none.
LAST_FORMATS = {4: CHANNELS_LAST, 5: torch.channels_last_3d}
NOWHERE: Mapping[int, Tensor] = MappingProxyType({})
ALIGNMENT = 16  # bytes; the kernels load this much at a time
#: The handle of the current stream of a CUDA device, without the object that PyTorch makes of it.
#: A PyTorch without CUDA lacks the function, and never calls it here.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
#: A tensor of a size, strides and dtype on the current CUDA device, as Inductor's code allocates
#: it: PyTorch's public function fills memory first where algorithms are to be deterministic.
_empty: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


def in_context(ordinal: int, launch: Callable[..., Any], *operands: Any) -> None:
    """Call `launch` with the current stream of CUDA device `ordinal` and `operands`; again where
    this thread had not used the device yet, as the one of a backward pass."""
    try:
        launch(current_stream(ordinal), *operands)
    except NoContext:
        driver.make_current(ordinal)
        launch(current_stream(ordinal), *operands)


class ReadyLaunch:
    """The runner of an assignment, on PyTorch's tensors."""

    __slots__ = ("_enqueue", "_ordinal", "_outputs", "_takes_tensors", "_workspaces", "assignment")

    def __init__(self, assignment: Assignment, runner: Runner, ordinal: int) -> None:
        self.assignment, self._ordinal = assignment, ordinal
        self._enqueue, self._takes_tensors = runner.enqueue, runner.takes_tensors
        problem: Any = assignment.problem
        operands = operation_of(problem).operands(problem)  # outputs first
        layout = getattr(problem, "layout", "channels_last")
        self._outputs = [
            (*_strided(o.shape, layout), getattr(torch, o.dtype)) for o in operands if o.terms
        ]
        self._workspaces = [
            (size, torch.zeros if name == ZEROED else torch.empty)
            for name, size in workspaces(runner.launch).items()
        ]

    def run(self, *inputs: Tensor | None, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """Enqueue the launch on the current stream of its device, and return the outputs.

        Workspaces are new at each call, from the current stream's pool: memory that is kept would
        be shared by streams and CUDA graphs.

        `inputs` are in the order of the operation's operands, None for one that the problem does
        not have; of the problem's shapes and dtype, on the launch's device, dense as the kernels
        read them (`dense`). Unaligned ones are copied. `into` has aligned tensors to write outputs
        to, by their position; the others are new.
        """
        ordinal = self._ordinal
        if torch.cuda.current_device() != ordinal:
            with torch.cuda.device(ordinal):
                return self.run(*inputs, into=into)
        device = torch.device("cuda", ordinal)
        aligned_inputs = [aligned(t) for t in inputs if t is not None]
        made = [
            into[place] if place in into else _empty(*output)
            for place, output in enumerate(self._outputs)
        ]
        spaces = [make(n, dtype=torch.uint8, device=device) for n, make in self._workspaces]
        tensors: list[Any] = [*made, *aligned_inputs, *spaces]
        operands = tensors if self._takes_tensors else [t.data_ptr() for t in tensors]
        in_context(ordinal, self._enqueue, operands)
        return made


def alike(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether `x` is on a CUDA device and `others` have its dtype and device."""
    return x.is_cuda and all(
        t is None or (t.dtype is x.dtype and t.device == x.device) for t in others
    )


def is_channels_last(x: Tensor) -> bool:
    """Return whether `x` is dense with its channels last, beyond doubt: a tensor of one channel or
    one pixel is dense in either layout, and PyTorch takes it for one with its channels first."""
    return lies_channels_last(x) and not x.is_contiguous()


def lies_channels_last(x: Tensor) -> bool:
    """Return whether `x`, of one, two or three spatial dimensions, is dense with its channels
    last."""
    if x.dim() == 3:
        return x.mT.is_contiguous()
    layout = LAST_FORMATS.get(x.dim())
    return layout is not None and x.is_contiguous(memory_format=layout)


def layout_of(x: Tensor) -> str:
    """Return the layout that confpred's operators give to the results for an input `x`: its own, as
    PyTorch gives the results of images; images are always channels last. Lines and volumes need
    not be dense: a part of the channels of a matrix product lies as the whole does."""
    is_doubtful = x.shape[1] == 1 or x.numel() == x.shape[0] * x.shape[1] or x.is_contiguous()
    is_last = x.stride(1) == 1 and not is_doubtful  # one channel or position lies in either
    return "channels_last" if x.dim() == 4 or is_last else "channels_first"


def is_dense(x: Tensor, layout: str) -> bool:
    """Return whether `x` lies in a `layout` as kernels read it."""
    return lies_channels_last(x) if layout == "channels_last" else x.is_contiguous()


def dense(t: Tensor, layout: str = "channels_last") -> Tensor:
    """Return `t` as kernels of a `layout` read it, or a dense vector; no negative view."""
    t = t.resolve_neg()
    if layout != "channels_last":
        return t.contiguous()
    if t.dim() == 3:
        return t.mT.contiguous().mT
    return t.contiguous(memory_format=LAST_FORMATS.get(t.dim(), torch.contiguous_format))


def aligned(t: Tensor) -> Tensor:
    """Return `t`, or a copy that begins where kernels can load ``ALIGNMENT`` bytes."""
    return t.clone(memory_format=torch.preserve_format) if t.data_ptr() % ALIGNMENT else t


def _strided(shape: Sequence[int], layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides, as PyTorch counts them, of an operand whose dense shape is
    `shape`; a matrix or vector has no channels."""
    t = torch.empty(tuple(shape), device="meta")
    t = t.movedim(-1, 1) if len(shape) > 2 and layout == "channels_last" else t
    return tuple(t.shape), t.stride()


def ready_launch(assignment: Assignment, ordinal: int) -> ReadyLaunch:
    """Return the launch of `assignment` on CUDA device `ordinal`, without limits; raises
    `CompileError`, `LaunchError` or `MissingExtra` where a kernel or a plan cannot be made."""
    problem = assignment.problem
    with torch.cuda.device(ordinal):
        runner = Loader(operation_of(problem), problem, ordinal).runner(assignment.launch)
    return ReadyLaunch(assignment, runner, ordinal)


def choose_and_load(problem: Record, ordinal: int, constraints: Constraints) -> ReadyLaunch | None:
    """Choose for `problem` now, and return the launch; None for PyTorch's operator."""
    choice = choosing.choose(problem, ordinal, constraints)
    if choice is None or not runs_kernel(choice):
        return None
    return load(Assignment.of(choice), ordinal, constraints.limits)


def load(assignment: Assignment, ordinal: int, limits: Limits = UNLIMITED) -> ReadyLaunch | None:
    """Return the launch of `assignment` on CUDA device `ordinal`, compiled now if need be; None
    where the driver or the compiler refuses it, which is logged.

    For a library's plan it is the first in the ranking, from the assigned one on, that the library
    builds and that needs no more memory than `limits` allow: only the library knows which plans it
    has for a problem. None for PyTorch's operator, too.
    """
    limits = limits_for(assignment.problem, limits)

    def find() -> ReadyLaunch | None:
        if assignment.candidate == PYTORCH_OPERATOR:
            return None
        with torch.cuda.device(ordinal):
            return _load_first(assignment, ordinal, limits)

    return cached(("launch", assignment, ordinal, limits), find)


def was_refused(choice: Choice, ordinal: int, limits: Limits) -> bool:
    """Return whether `load` has tried to load `choice` and failed."""
    limits = limits_for(choice.problem, limits)
    return choosing.is_cached_as_none(("launch", Assignment.of(choice), ordinal, limits))


def _load_first(assignment: Assignment, ordinal: int, limits: Limits) -> ReadyLaunch | None:
    problem = assignment.problem
    loader = Loader(operation_of(problem), problem, ordinal)
    others = map(Assignment.of, _ranked_beside(assignment, ordinal, limits))
    for assigned in chain([assignment], others):
        launch = assigned.launch
        if limits.allow(problem, launch):  # limits may have changed since the choice
            try:
                runner = loader.runner(launch)
            except (CompileError, LaunchError, MissingExtra) as error:
                if loader.may_build_others(launch):
                    log.debug("%s: %s", problem, error)
                    continue
                if launch.plan is None:
                    log.warning("falling back to PyTorch for %s: %s", problem, error)
                else:  # such as a missing cuDNN: the same for every problem
                    warn_once(f"falling back to PyTorch: {error}")
                return None
            if limits.allow(problem, runner.launch):
                return ReadyLaunch(assigned, runner, ordinal)
            log.debug("%s: the plan needs %d bytes", problem, runner.launch.scratch_bytes)
        if launch.plan is None:
            return None
    log.info("falling back to PyTorch for %s: cuDNN builds none of the chosen plans", problem)
    return None


def _ranked_beside(assignment: Assignment, ordinal: int, limits: Limits) -> Iterator[Choice]:
    """Yield the ranking of the problem without `assignment`, up to PyTorch's operator; it is ranked
    once it is needed."""
    problem, device = assignment.problem, driver.device_of(ordinal)
    predictor = choosing.current_predictor(operation_of(problem).name).within(limits)
    for other in predictor.rank(problem, device, MAX_TOP):
        if other.candidate == PYTORCH_OPERATOR:
            break
        if other.candidate != assignment.candidate:
            yield other


def compile_ahead(
    choices: Sequence[Choice], ordinal: int, limits: Limits = UNLIMITED
) -> dict[Choice, Choice]:
    """Compile the kernels of `choices` in parallel, and load them on CUDA device `ordinal`; the
    call that needs one that fails falls back to PyTorch.

    Returns:
        Each choice as it was loaded: with the plan that its library builds.
    """
    assignments = {choice: Assignment.of(choice) for choice in choices if runs_kernel(choice)}
    for assignment in assignments.values():
        compile_soon(assignment.launch, ordinal)
    as_loaded = {choice: choice for choice in choices}
    for choice, assignment in assignments.items():
        ready = load(assignment, ordinal, limits)
        if ready is not None and ready.assignment.candidate != choice.candidate:
            ranked = _ranked_beside(assignment, ordinal, limits_for(choice.problem, limits))
            built = ready.assignment.candidate
            as_loaded[choice] = next((c for c in ranked if c.candidate == built), choice)
    return as_loaded
