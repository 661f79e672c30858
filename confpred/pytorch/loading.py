"""From a choice to a launch: compiled, loaded.

Choice --> compile (threads; NVRTC lets go of Python's lock) --> load --> ReadyLaunch
      `--> of a library's plans, the first in the ranking that it builds --^
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from confpred.cuda import driver
from confpred.cuda.compiler import Compiled
from confpred.cuda.launch import BoundLaunch
from confpred.cudnn.plans import Plans
from confpred.errors import CompileError, InvalidProblem, LaunchError, MissingExtra
from confpred.families.registry import all_families
from confpred.predict.choice import MAX_TOP, Choice
from confpred.problem.conv2d import Problem
from confpred.problem.limits import Limits
from confpred.problem.operation import KernelSpec, Launch
from confpred.problem.precision import convolutions_allow_tf32
from confpred.pytorch.choosing import (
    current_predictor,
    is_ours,
    limits_of,
    notice_switch,
    when_forgotten,
)
from confpred.pytorch.fallback import pytorch_for
from confpred.pytorch.kernels import loaded, submit
from confpred.pytorch.programs import ReadyProgram
from confpred.pytorch.ready import Enqueue, ReadyLaunch

log = logging.getLogger(__name__)
_at_hand: dict[tuple[Choice, int, Limits], Choice | None] = {}
when_forgotten(_at_hand.clear)


def load(choice: Choice, ordinal: int, own: Limits | None = None) -> ReadyLaunch | None:
    """The launch of `choice`, compiled now if need be; None where the driver or the compiler
    refuses it, which is logged. Of a library's plans it is the first in the ranking from `choice`
    on that the library builds and that needs no more memory than the limits allow."""
    if not isinstance(choice.problem, Problem):
        raise InvalidProblem("problem", choice.problem, "a convolution")
    limits, launch = limits_of(choice.problem, own), _launch_of(choice)
    if launch.plan is not None:
        ready = _load_plan(choice, choice.problem, ordinal, limits)
    else:
        ready = _load_kernels(choice, launch, ordinal, limits)
    if ready is not None and choice.problem.dtype == "float32":
        _follow_switch(ready, choice.problem)
    return ready


def _load_kernels(
    choice: Choice, launch: Launch, ordinal: int, limits: Limits
) -> ReadyLaunch | None:
    if not limits.allow(choice.problem, launch):  # they are others since it was chosen
        return None
    try:
        for kernel in launch.kernels:
            submit(kernel, _arch(ordinal))  # side by side
        if launch.program:
            return ReadyProgram(choice, launch, ordinal)
        kernels = [loaded(step.kernel, step.smem_bytes, ordinal) for step in launch.steps]

        def bind(names: Sequence[str]) -> Enqueue:
            return BoundLaunch(kernels, launch, names).enqueue

        return ReadyLaunch(choice, launch, bind, ordinal)
    except (CompileError, LaunchError, MissingExtra) as error:
        log.warning("PyTorch's own operator: %s", error)
        return None


def _load_plan(
    choice: Choice, problem: Problem, ordinal: int, limits: Limits
) -> ReadyLaunch | None:
    """What a library offers for a problem is known to the library alone, so a plan that is chosen
    from what it has offered for such problems may not be there: then the next one in the ranking
    is tried, until PyTorch's own operator is."""
    try:
        with torch.cuda.device(ordinal):
            plans = Plans(problem, ordinal)
    except (LaunchError, MissingExtra) as error:
        _warn_once(str(error))
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
                _warn_once(str(error))
                return None
            log.debug("%s: %s", problem, error)
            continue
        launch = replace(launch, scratch_bytes=built.workspace_bytes)
        if not limits.allow(problem, launch):
            log.debug("%s: the plan needs %d bytes", problem, built.workspace_bytes)
            continue
        return ReadyLaunch(found, launch, built.bind, ordinal)
    log.info("%s: PyTorch's own operator, as no plan that is predicted to win is there", problem)
    return None


def _from_on(choice: Choice, ordinal: int, limits: Limits) -> Iterator[Choice]:
    """The choices from `choice` on, best first; the others are ranked once they are needed."""
    yield choice
    predictor, device = current_predictor().within(limits), driver.device_of(ordinal)
    for other in predictor.rank(choice.problem, device, MAX_TOP):
        if other.candidate != choice.candidate:
            yield replace(choice, candidate=other.candidate, predicted_ms=other.predicted_ms)


def _follow_switch(ready: ReadyLaunch, problem: Problem) -> None:
    """Have `ready` ask at each call whether PyTorch's switch for TF32 is as it was when it was
    chosen, if that decides whether it may run, or what else might; once it is not, everything is
    chosen anew, and PyTorch's own operator serves that call."""
    allowed = notice_switch()
    if allowed and not ready.tf32:
        return  # it may run in any case; forbidden, PyTorch's operator only gets slower
    wanted, run, theirs = ready.tf32, ready.run, pytorch_for(problem)

    def serve(*given: Any) -> Any:
        if convolutions_allow_tf32() is wanted:
            return run(*given)
        notice_switch()
        return theirs(*given)

    ready.run = serve


@cache
def _warn_once(message: str) -> None:
    log.warning("PyTorch's own operator: %s", message)


def at_hand(choice: Choice, ordinal: int) -> Choice | None:
    """What would run where `choice` is the answer: `choice` itself, or, of a library's plans, the
    first that `load` has, which may be none."""
    if _launch_of(choice).plan is None:
        return choice
    key = (choice, ordinal, limits_of(choice.problem))
    try:
        return _at_hand[key]
    except KeyError:
        ready = load(choice, ordinal)
        found = _at_hand[key] = None if ready is None else ready.choice
        return found


def compile_ahead(choices: Sequence[Choice], others: Iterable[KernelSpec], ordinal: int) -> None:
    """Compile, in parallel, what `choices` will launch and `others`, and load the former on CUDA
    device `ordinal`; a kernel that cannot be had is left to the call that needs it."""
    ours = [choice for choice in choices if is_ours(choice)]
    for choice in ours:
        for kernel in _launch_of(choice).kernels:
            submit(kernel, _arch(ordinal))
    for kernel in others:  # after those that are waited for
        submit(kernel, _arch(ordinal))
    for choice in ours:
        load(choice, ordinal)


def waiting_for(choice: Choice, ordinal: int) -> list[Future[Compiled]]:
    """Compilations that are under way for `choice`, started now if need be; empty when all of its
    kernels are compiled."""
    found = [submit(kernel, _arch(ordinal)) for kernel in _launch_of(choice).kernels]
    return [future for future in found if not future.done()]


def _launch_of(choice: Choice) -> Launch:
    candidate = choice.candidate
    return all_families()[candidate.provider].launch(choice.problem, candidate.config_id)


def _arch(ordinal: int) -> str:
    return driver.device_of(ordinal).arch
