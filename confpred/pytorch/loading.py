"""From a choice to a launch: compiled in threads, loaded, ready for tensors of one shape.

Choice --> compile (threads; NVRTC lets go of Python's lock) --> load --> ReadyLaunch
      `--> of a library's plans, the first in the ranking that it builds --^
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from confpred.cuda import driver
from confpred.cuda.launch import BoundLaunch
from confpred.cudnn.plans import Plans
from confpred.errors import CompileError, LaunchError, MissingExtra
from confpred.families.registry import all_families
from confpred.predict.choice import MAX_TOP, Choice
from confpred.problem.conv2d import Problem
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import Launch
from confpred.products.run import Program, by_driver
from confpred.pytorch.choosing import current_predictor, is_ours, kept, limits_for, warn_once
from confpred.pytorch.kernels import loaded, submit
from confpred.pytorch.ready import Enqueue, ReadyLaunch, by_address

log = logging.getLogger(__name__)


def load(choice: Choice, ordinal: int, limits: Limits = UNLIMITED) -> ReadyLaunch | None:
    """Return the launch of `choice` on CUDA device `ordinal`, compiled now if need be.

    Of a library's plans it is the first in the ranking, from `choice` on, that the library builds
    and that needs no more memory than `limits` allow.

    Returns:
        The launch; None where the driver or the compiler refuses it, which is logged.
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
    """Return `launch`, of kernels and perhaps of products between them, ready on CUDA device
    `ordinal`.

    Raises:
        CompileError, LaunchError, MissingExtra: a kernel cannot be had.
    """
    for kernel in launch.kernels:
        submit(kernel, driver.device_of(ordinal).arch)  # side by side
    if launch.program:
        program = Program(
            launch, lambda step: by_driver(step, loaded(step.kernel, step.smem_bytes, ordinal))
        )

        def bind(names: Sequence[str]) -> Enqueue:
            return lambda tensors: program(dict(zip(names, tensors, strict=True)))

        return ReadyLaunch(choice, launch, bind, ordinal)
    kernels = [loaded(step.kernel, step.smem_bytes, ordinal) for step in launch.steps]
    by_driver_alone = by_address(lambda n: BoundLaunch(kernels, launch, n).enqueue, ordinal)
    return ReadyLaunch(choice, launch, by_driver_alone, ordinal)


def _load_plan(
    choice: Choice, problem: Problem, ordinal: int, limits: Limits
) -> ReadyLaunch | None:
    """Load the first plan in the ranking, from `choice` on, that the library builds.

    Only the library knows which plans it has for a problem; where it lacks the chosen one, the next
    in the ranking is tried, until PyTorch's operator comes.
    """
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
        return ReadyLaunch(found, launch, by_address(built.bind, ordinal), ordinal)
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
    """Compile the kernels of `choices` in parallel, and load them on CUDA device `ordinal`.

    A kernel that cannot be had is left to the call that needs it.
    """
    ours, arch = [choice for choice in choices if is_ours(choice)], driver.device_of(ordinal).arch
    for choice in ours:
        for kernel in _launch_of(choice).kernels:
            submit(kernel, arch)
    for choice in ours:
        load(choice, ordinal, limits)


def _launch_of(choice: Choice) -> Launch:
    candidate = choice.candidate
    return all_families()[candidate.provider].launch(choice.problem, candidate.config_id)
