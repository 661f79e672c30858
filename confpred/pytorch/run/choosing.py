"""From a problem to a choice, by the predictor, the limits and the switches in force.

A guess gives way to an answer that tuning has kept for this device, driver and cuDNN, whatever
`tune` says. Ranks of ``torch.distributed`` never differ in that: the answer of the first rank that
asks for a layer is the answer of all, and no rank waits for another one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from confpred.concurrency import uninterrupted
from confpred.cuda import driver
from confpred.cuda.compiler import close_kernels, open_kernels
from confpred.cuda.discovery import slowness
from confpred.cudnn.plans import lacks_library
from confpred.errors import ConfpredError, InvalidInput, UnknownDevice, first_line
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import operation_named, operation_of
from confpred.measure.pytorch import cudnn_version
from confpred.model.folder import shipped_models
from confpred.predict.choice import Choice, check_max_regret
from confpred.predict.plan import Plan, read_plan
from confpred.predict.predictor import Predictor
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import Operation
from confpred.problem.precision import convolutions_allow_tf32
from confpred.problem.record import Record
from confpred.sampler import kept

log = logging.getLogger(__name__)
T = TypeVar("T")
#: From the problems of a graph, of one operation, to choices; None where nothing is known.
Choose = Callable[[Sequence[Record]], Sequence[Choice | None]]
#: Predictors by operation, each loaded when it is first needed.
_predictors: dict[str, Predictor] = {}
#: By operation, the plans that are followed, first to last, and the predictor in force before them.
_plans: dict[str, tuple[Predictor | None, list[Plan]]] = {}
#: Callbacks that get every choice that is made, by the name of the watcher.
_watchers: dict[Hashable, Callable[[Choice], None]] = {}
#: Choices, launches and other results, by the sizes of a call.
_cache: dict[Hashable, Any] = {}
_MOST_CACHED = 65_536
#: GPUs as they run, and in words what is slow, by their ordinals (`as_it_runs`).
_clocks: dict[int, tuple[Device, str]] = {}
_clocks_lock = threading.Lock()


def cached(key: Hashable, find: Callable[[], T]) -> T:
    """Return ``find()``, cached by `key` until `forget` is called."""
    try:
        answer: T = _cache[key]
    except KeyError:
        answer = find()
        if len(_cache) >= _MOST_CACHED:
            _cache.clear()
        _cache[key] = answer
    return answer


def is_cached_as_none(key: Hashable) -> bool:
    """Return whether the cached result of `key` is None."""
    return _cache.get(key, key) is None


def forget() -> None:
    """Choose again for every shape of eager calls; kernels stay loaded."""
    _cache.clear()


os.register_at_fork(after_in_child=forget)


def warn_once(message: str) -> None:
    """Log a warning, once until `forget` is called."""
    cached(("warned", message), lambda: log.warning(message))


def warn_of(error: Exception, where: str, effect: str) -> None:
    """Warn of an error in an optimization, once for each cause, with the traceback for DEBUG.
    `where` names the step that failed, and `effect` says what becomes of the program."""
    error = getattr(error, "inner_exception", error)  # the cause, where Dynamo has wrapped it
    warn_once(f"{effect}, as {where} failed: {type(error).__name__}: {first_line(error)}")
    log.debug("%s failed", where, exc_info=error)


@dataclass(frozen=True, slots=True)
class Constraints:
    """Bounds that a caller sets on choices.

    Attributes:
        limits: every choice keeps within them.
        max_regret: largest bound on regret at which a prediction is taken; None for any.
    """

    limits: Limits = UNLIMITED
    max_regret: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.limits, Limits):
            raise InvalidInput("limits", self.limits, "a confpred.Limits")
        check_max_regret(self.max_regret)


ANY = Constraints()
#: From choices to those that run: guesses are replaced by choices that are measured now.
Measure = Callable[[Sequence[Choice | None], Device, Constraints], Sequence[Choice | None]]
#: In force during a capture (`confpred.pytorch.run.tuning`).
measuring: ContextVar[Measure | None] = ContextVar("measuring", default=None)


def use_predictor(predictor: Predictor, operation: str = CONVOLUTION.name) -> None:
    """Let `predictor` choose from now on, in place of the newest model of the package.

    Networks that were captured before keep their choices, if within its limits. `operation` is
    ``conv2d``, or another one such as ``linear_chain``; `InvalidInput` is raised where no family
    computes it.
    """
    name = operation_named(operation).name
    _plans.pop(name, None)
    _predictors[name] = predictor
    forget()


def use_plan(path: str | Path) -> Callable[[], None]:
    """Follow the plan at `path` from now on, in place of a predictor.

    Its choices are taken as they are. Where compiled kernels go along, they are loaded without a
    compiler and without a write to the user's cache. Shapes that the plan lacks are chosen and
    compiled as without it. Networks that were captured before keep their choices.

    Args:
        path: a file, or a folder with compiled kernels: what `confpred.record_plan`,
            `confpred.prepare` or ``confpred plan export`` wrote, or a person.

    Returns:
        A function that ends this, in any order where several plans are followed. A later
        `use_predictor` has ended it already.

    Raises:
        InvalidInput: the plan has no choice for the current CUDA device, or is not valid.
        DataError: it cannot be read, or it or its kernels were made for other sources.
    """
    path = Path(path)
    on_gpu = torch.cuda.is_available()  # else the plan is checked, and of no use
    device = driver.device_of(torch.cuda.current_device()) if on_gpu else None
    plan = read_plan(path, device)
    kernels = open_kernels(path, device.arch) if device and path.is_dir() else None
    names = [operation.name for operation in plan.operations]
    for name in names:
        _, plans = _plans.setdefault(name, (_predictors.get(name), []))
        plans.append(plan)
        _follow(name)
    forget()

    def undo() -> None:
        for name in names:
            if name in _plans:
                _, plans = _plans[name]
                plans[:] = [other for other in plans if other is not plan]
                _follow(name)
        if kernels is not None:
            close_kernels(kernels)
        forget()

    return undo


def _follow(name: str) -> None:
    """Let the former predictor for operation `name`, and the plans that are left, be in force."""
    former, plans = _plans[name]
    _predictors.pop(name, None)
    if former is not None:
        _predictors[name] = former
    for plan in plans:
        _predictors[name] = current_predictor(name).following(plan)
    if not plans:
        del _plans[name]


def is_known(operation: str) -> bool:
    """Return whether there is a predictor, or a model of the package, for `operation`."""
    return operation in _predictors or os.path.isdir(shipped_models(operation))


def current_predictor(operation: str = CONVOLUTION.name) -> Predictor:
    """Return the predictor in force for `operation`: the one given to `use_predictor`, else, for
    convolutions, the service at ``$CONFPRED_URL``, else the newest models of the package."""
    predictor, url = _predictors.get(operation), os.environ.get("CONFPRED_URL")
    if predictor is None and url and operation == CONVOLUTION.name:
        try:
            from confpred.client.served import predictor_at  # imports httpx

            predictor = predictor_at(url)
        except ConfpredError as error:  # no reason to hold up a network
            log.warning("ignoring CONFPRED_URL: %s; choosing in this process", error)
    current = _predictors[operation] = predictor or Predictor.load(operation=operation)
    return current


def limits_for(problem: Record, limits: Limits) -> Limits:
    """Return `limits` and those of the predictor in force, without TF32 where PyTorch's switch
    forbids it for convolutions."""
    predictor = _predictors.get(operation_of(problem).name)  # none is loaded for this
    limits = limits if predictor is None else limits & predictor.limits
    is_single = isinstance(problem, (Problem, ConvNd)) and problem.dtype == "float32"
    if is_single and limits.tf32 and not convolutions_allow_tf32():
        return replace(limits, tf32=False)
    return limits


def choose_many(
    problems: Sequence[Record], device: Device, constraints: Constraints = ANY
) -> list[Choice | None]:
    """Choose for each of `problems` on `device`, as `preview` does, and notify the watchers."""
    choices = preview(problems, device, constraints)
    announce(*dict.fromkeys(filter(None, choices)))
    return choices


def is_open(choice: Choice, constraints: Constraints) -> bool:
    """Return whether a measurement may change `choice`: a guess, also one that was refused."""
    return choice.is_guess or (choice.source == "fallback" and constraints.max_regret is not None)


def preview(
    problems: Sequence[Record], device: Device, constraints: Constraints = ANY
) -> list[Choice | None]:
    """Return the choice for each of `problems` on `device`, without notifying watchers; None where
    there is no choice, such as on an unknown device.

    Problems of one operation and with the same limits are predicted in one call. Guesses give way
    to answers that tuning has kept and, during a capture, to measurements made now (`measuring`).
    """
    chosen: dict[Record, Choice] = {}
    kinds = {p: (operation_of(p).name, limits_for(p, constraints.limits)) for p in problems}
    try:
        for kind in dict.fromkeys(kinds.values()):
            group = [problem for problem, own in kinds.items() if own == kind]
            operation, limits = kind
            within = current_predictor(operation).within(limits)
            choices = within.choose_many(group, device, max_regret=constraints.max_regret)
            guesses = [choice.problem for choice in choices if is_open(choice, constraints)]
            answers = kept_answers(guesses, device, operation_named(operation), within.limits)
            # The problem of a choice is deterministic where the limits say so.
            better = (answers.get(choice.problem, choice) for choice in choices)
            chosen.update(zip(group, better, strict=True))
    except UnknownDevice as error:
        log.debug("falling back to PyTorch: %s", error)
    except ConfpredError as error:  # such as a damaged model: worth a look
        log.warning("falling back to PyTorch: %s", error)
    found: Sequence[Choice | None] = [chosen.get(problem) for problem in problems]
    measure = measuring.get()
    return list(found if measure is None else measure(found, device, constraints))


def kept_folder(device: Device, operation: Operation) -> Path:
    """Return the folder of what is measured under this machine's driver and cuDNN; that of machines
    without cuDNN's front end has no plans."""
    cudnn = cudnn_version() + "-without-plans" * lacks_library("cudnn")
    return kept.folder_of(device.key, operation, driver.describe(0)[1], cudnn)


def kept_answers(
    problems: Sequence[Record], device: Device, operation: Operation, limits: Limits
) -> dict[Record, Choice]:
    """Return the answers within `limits` that are kept for `problems`; for ranks, those that all of
    them give."""
    own = _own_shards(device, operation) if problems else ()
    if not problems or not _settled_names(own, device, operation):
        return {}
    times = _times(own, kept.unread.total())
    choices = {p: kept.answer(p, device, times.get(p, ()), limits) for p in problems}
    agreed = (_agreed(choice, p, device, limits) for p, choice in choices.items())
    return {choice.problem: choice for choice in agreed if choice is not None}


def kept_shards(device: Device, operation: Operation) -> Sequence[str]:
    """Return the names of the files that answers are looked up in; for ranks, those of the first
    rank that asked. So all ranks look answers up or none does, and all or none keep their graphs in
    PyTorch's cache."""
    return _settled_names(_own_shards(device, operation), device, operation)


def _settled_names(own: Sequence[Path], device: Device, operation: Operation) -> Sequence[str]:
    """Return the names of this process's files `own`; for ranks, of those of the first that asked;
    empty where ranks cannot agree."""
    return _settled(f"{device.key} {operation.name}", [shard.name for shard in own]) or ()


def _own_shards(device: Device, operation: Operation) -> tuple[Path, ...]:
    """Return the files that this process can read of what was measured under its driver and
    cuDNN."""
    every = kept.shards_of(device.key, operation)
    if not every:
        return ()
    try:
        here = kept_folder(device, operation)
    except Exception as error:  # such as a machine without a GPU, where nothing was measured
        log.debug("kept answers are not used: %s", error)
        return ()
    return tuple(shard for shard in every if shard.parent == here)


@lru_cache(16)
def _times(shards: tuple[Path, ...], failures: int) -> kept.Times:
    """Return what was measured into the folder of `shards`, read once until it has others, or until
    there are more `failures` to read a file."""
    if not shards:
        return {}
    where = shards[0].parent
    try:
        return kept.times_in(where, operation_named(where.name))
    except Exception as error:  # such as a missing pyarrow: no reason to hold up a network
        kept.note_unread(where, f"cannot read {where}: {first_line(error)}")
        return {}


def ranks() -> int:
    """Return how many processes the job has; that of torchrun is known before they have met."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    with suppress(ValueError):
        return int(os.environ.get("WORLD_SIZE", 1))
    return 1


def _settled(question: str, mine: Any) -> Any:
    """Return the answer to `question`, which has the same words on all ranks: that of the first
    rank that asked, and `mine` if that is this one. None where ranks cannot agree yet."""
    if ranks() == 1:
        return mine
    if not dist.is_initialized():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    try:  # sets the value where there is none, and returns the value that is there then
        return json.loads(store.compare_set(f"confpred {question}", "", json.dumps(mine)))
    except RuntimeError as error:  # the store is gone, or has no such operation
        log.debug("ranks cannot agree: %s", error)
        return None


def _agreed(mine: Choice | None, problem: Record, device: Device, limits: Limits) -> Choice | None:
    """Return the kept answer that all ranks give for `problem`: `mine`, or that of the first rank
    that asked; None where that rank has none."""
    facts = mine and (mine.provider, mine.candidate.config_id, mine.predicted_ms, mine.pytorch_ms)
    settled = _settled(f"{device.key} {limits} {problem}", facts)
    if settled is None:
        return None
    provider, row, ms, pytorch_ms = settled
    one = Choice(problem, device.key, "measured", Candidate(provider, row), ms)
    return replace(one, pytorch_ms=pytorch_ms)


def choose(problem: Record, ordinal: int, constraints: Constraints = ANY) -> Choice | None:
    """Choose for `problem` on CUDA device `ordinal`; None for a device without a description."""
    return choose_on([problem], ordinal, constraints)[0]


def choose_on(
    problems: Sequence[Record], ordinal: int, constraints: Constraints = ANY
) -> list[Choice | None]:
    """Choose for each of `problems` on CUDA device `ordinal`, as `choose_many` does, and warn once
    where its driver or cuDNN differ from those of the model's measurements."""
    device = device_of(ordinal)
    if device is None:
        return [None] * len(problems)
    choices = choose_many(problems, device, constraints)
    check_clock(ordinal, choices)
    try:
        predictor = current_predictor(operation_of(problems[0]).name)
        model = predictor.models.get(device.key)
        if model is not None:
            _, driver_version = driver.describe(ordinal)
            for change in model.card.changes(driver=driver_version, cudnn=cudnn_version()):
                warn_once(f"model {model.version}: {change}; `confpred drift` checks it")
    except Exception as error:  # a warning is not worth an error
        log.debug("versions cannot be compared: %s", error)
    return choices


def check_clock(ordinal: int, choices: Sequence[Choice | None]) -> None:
    """Warn once where CUDA device `ordinal` is slower than its model says, if it made `choices`."""
    device = device_of(ordinal)
    if device is not None and any(c and c.model and not c.is_guess for c in choices):
        as_it_runs(ordinal, device)


def as_it_runs(ordinal: int, device: Device) -> Device:
    """Return `device`, which CUDA device `ordinal` is, with the rates that it has now
    (`confpred.cuda.discovery.as_it_runs`), and warn where they are lower.

    It is measured at most once a process, and not while a CUDA graph is captured. An error leaves
    `device` as it is.
    """
    with uninterrupted, _clocks_lock:
        if ordinal not in _clocks:
            if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
                return device
            now = device
            try:
                with driver.outside_capture():  # of other threads
                    torch.cuda.current_stream(ordinal).synchronize()  # this program's own work
                now = driver.as_it_runs(ordinal)
            except Exception as error:  # a warning is not worth an error
                log.debug("the clock of cuda:%d cannot be measured: %s", ordinal, error)
            _clocks[ordinal] = now, slowness(device, now)
            if slow := slow_now(ordinal):
                log.warning("%s; `nvidia-smi -q -d PERFORMANCE` says why, choices stay", slow)
        return _clocks[ordinal][0]


def slow_now(ordinal: int | None) -> str:
    """Return in words what is slow on CUDA device `ordinal`; empty where nothing is, or it was not
    measured."""
    _, words = _clocks.get(ordinal, (None, "")) if ordinal is not None else (None, "")
    return words and f"cuda:{ordinal} is slow: {words}"


def device_of(ordinal: int) -> Device | None:
    """Return CUDA device `ordinal`; None where it has no description."""
    try:
        return driver.device_of(ordinal)
    except ConfpredError as error:
        log.debug("falling back to PyTorch: %s", error)
        return None


def pytorch_ms(problem: Record, device: Device) -> float | None:
    """Return the milliseconds that PyTorch's operator is expected to take for `problem`."""
    predictor = current_predictor(operation_of(problem).name)
    return predictor.expected_ms(problem, device, PYTORCH_OPERATOR)


@contextmanager
def watch_choices(callback: Callable[[Choice], None], name: Hashable = None) -> Iterator[None]:
    """Call `callback` with every choice made inside the block; each shape is chosen again there.

    Raises:
        InvalidInput: a watcher of that `name` is active; several may have the name None.
    """
    name = object() if name is None else name
    if _watchers.setdefault(name, callback) is not callback:
        raise InvalidInput("path", str(name), "a file that no other recording is to write")
    forget()
    try:
        yield
    finally:
        del _watchers[name]


def announce(*choices: Choice) -> None:
    """Notify the watchers that `choices` run."""
    for watcher, choice in itertools.product(list(_watchers.values()), choices):
        watcher(choice)


def why_pytorch(choice: Choice) -> str | None:
    """Return why PyTorch's operator is to run, in words; None if a confpred kernel is."""
    if not choice.is_launched:
        is_dense = getattr(choice.problem, "groups", None) == 1
        if choice.source == "transferred" or not (is_dense or isinstance(choice.problem, ConvNd)):
            return "no model for this device"
        return f"{choice.problem.grouping} layers were never sampled"
    if choice.source == "fallback":
        return "no legal kernel, or none within limits"
    if choice.candidate == PYTORCH_OPERATOR:
        reasons = {"pinned": "pinned", "measured": "measured slower"}
        return reasons.get(choice.source, "predicted slower")
    return None


def runs_kernel(choice: Choice) -> bool:
    """Return whether a confpred kernel or a chosen library plan is to run, and log what runs."""
    reason = why_pytorch(choice)
    if reason is None:
        log.debug("%s: %s %s (%s)", choice.problem, choice.provider, choice.config, choice.source)
    else:
        log.debug("falling back to PyTorch for %s: %s", choice.problem, reason)
    return reason is None
