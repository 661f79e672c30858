"""From a problem of PyTorch's to a choice, by the predictor, the limits and the switches in force.

What was found is kept by the callers, by shape; `forget` makes all of them ask again.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.errors import (
    ConfpredError,
    UnknownDevice,
)
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.families.registry import operation_named
from confpred.measure.pytorch import cudnn_version
from confpred.model.conditions import changes
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.device import Device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.precision import convolutions_allow_tf32
from confpred.problem.record import Record
from confpred.pytorch import layouts, quiet
from confpred.pytorch.guards import guard
from confpred.pytorch.streams import is_capturing

log = logging.getLogger(__name__)
Found = TypeVar("Found")
_MOST_KEPT = 65_536
_MOST_PLACES = 4096

#: What serves a call, by all that its tensors' shapes and layouts decide; see `remember`.
served: dict[Any, Any] = {}
#: What serves calls like the last one of a place, which is named by what it has to itself, such as
#: a weight's identity: the function, a guard of its tensors (`confpred.pytorch.guards`), and what
#: else it depends on. It is a hint: whoever reads it compares both.
latest: dict[Any, tuple[Any, Callable[..., bool], Any]] = {}
_predictor: Predictor | None = None  # loaded when it is first needed
_others: dict[str, Predictor] = {}  # by operation, of those that are no convolution
_forgetting: list[Callable[[], None]] = []
_watchers: list[Callable[[Choice], None]] = []
_max_regret: float | None = None  # what bound on regret is accepted; None for any
_noticed: set[int] = set()  # devices whose versions were compared
_chosen: dict[tuple[Record, int, Limits], Future[Choice | None]] = {}
_limits = UNLIMITED  # of all choices; a call may have others
#: What names predictors that cannot tell what they follow, in this process alone.
_unnamed: weakref.WeakKeyDictionary[Predictor, str] = weakref.WeakKeyDictionary()
_tf32 = True  # as PyTorch's switch was last seen
#: Whether a dense layer may be served by anything but PyTorch's own operator, as far as is known;
#: while it may not, whoever meets one need not look further.
may_serve_dense = True
_serves_dense: dict[Device, bool] = {}


def use_predictor(predictor: Predictor, operation: str = CONVOLUTION.name) -> None:
    """Let `predictor` choose from now on, in place of the newest model of the package; for another
    operation than convolution, such as ``linear_chain``, in place of PyTorch's own.

    Raises:
        InvalidInput: no family computes that operation.
    """
    global _predictor
    if operation_named(operation) is CONVOLUTION:
        _predictor = predictor
        _noticed.clear()
    else:
        _others[operation] = predictor
    forget()


def accept(max_regret: float | None) -> None:
    """Let kernels of ours run only where the bound on their regret is at most `max_regret`, if it
    is not None."""
    global _max_regret
    if max_regret != _max_regret:
        _max_regret = max_regret
        forget()


def predictor_for(operation: str) -> Predictor | None:
    """What was given to `use_predictor` for an operation that is no convolution."""
    return _others.get(operation)


def use_plan(path: Path) -> Callable[[], None]:
    """Take the choices in the plan at `path` as they are, on the current CUDA device.

    Returns:
        What goes back to the former predictor.

    Raises:
        InvalidInput, DataError: see `confpred.predict.predictor.Predictor.load`.
    """
    on_gpu = torch.cuda.is_available()  # else the file is checked, and of no use
    device = driver.device_of(torch.cuda.current_device()) if on_gpu else None
    planned = Predictor.load(pins=path, device=device)
    former = _predictor
    use_predictor(planned)

    def undo() -> None:
        global _predictor
        _predictor = former
        forget()

    return undo


def current_predictor() -> Predictor:
    """What was given to `use_predictor`; else what asks the service at ``$CONFPRED_URL``, or, where
    that is not set, the newest models of the package."""
    global _predictor
    if _predictor is None:
        _predictor = _first_predictor()
    return _predictor


def _first_predictor() -> Predictor:
    url = os.environ.get("CONFPRED_URL")
    if url:
        try:
            from confpred.client.served import predictor_at  # imports httpx

            return predictor_at(url)
        except ConfpredError as error:  # no reason to hold up a network
            log.warning("CONFPRED_URL is of no use: %s; this process chooses", error)
    return Predictor.load()


def decided_by(ordinal: int) -> tuple[object, ...]:
    """What the choices for CUDA device `ordinal` follow from, as values that are written alike in
    every process where they are the same."""
    predictor = current_predictor()
    try:
        identity = predictor.identity(driver.device_of(ordinal))
    except ConfpredError as error:  # such as an unknown device, whose layers are PyTorch's
        identity = str(error)
    if identity is None:
        identity = _unnamed.setdefault(predictor, uuid4().hex)
    return identity, _limits, _max_regret, convolutions_allow_tf32()


def use_limits(limits: Limits) -> None:
    """Have every choice that is made from now on keep within `limits`."""
    global _limits
    if limits != _limits:
        _limits = limits
        forget()


def limits_of(problem: Record, own: Limits | None = None) -> Limits:
    """What a choice for `problem` keeps within: the limits of all choices, or a call's `own`, and
    what PyTorch's switch says of TF32 in convolutions."""
    limits = _limits if own is None else own
    if problem.dtype == "float32" and not notice_switch() and limits.tf32:
        limits = replace(limits, tf32=False)
    return limits


def notice_switch() -> bool:
    """Whether PyTorch's switch allows TF32 in convolutions; everything is chosen anew where it has
    been turned since the last time."""
    global _tf32
    allowed = convolutions_allow_tf32()
    if allowed is not _tf32:
        _tf32 = allowed
        forget()
    return allowed


def forget() -> None:
    """Choose again for every shape; kernels stay loaded."""
    global may_serve_dense
    served.clear()
    latest.clear()
    quiet.forget()
    _chosen.clear()
    _serves_dense.clear()
    may_serve_dense = True
    for also in _forgetting:
        also()


def when_forgotten(also: Callable[[], None]) -> None:
    """Call `also` whenever all shapes are to be chosen again."""
    _forgetting.append(also)


def remember(key: Any, what: Found) -> Found:
    """`what`, which serves calls of `key` from now on."""
    if len(served) < _MOST_KEPT:
        served[key] = what
    latest.clear()
    quiet.forget()
    return what


def note(
    place: Any,
    serve: Any,
    tensors: Sequence[Tensor | None],
    facts: Any,
    *,
    outside_graphs: bool = False,
) -> None:
    """Have `serve` serve what comes next from `place` with tensors like these, or only what is not
    captured."""
    quiet.look_again()  # where one layer gets other tensors, others do
    if len(latest) >= _MOST_PLACES:
        latest.clear()  # weights that are made anew at each call have ever new identities
    agrees = guard(*(t for t in tensors if t is not None))
    if outside_graphs:
        latest[place] = serve, lambda given: not is_capturing() and agrees(given), facts
    else:
        latest[place] = serve, agrees, facts


@contextmanager
def watch_choices(callback: Callable[[Choice], None]) -> Iterator[None]:
    """Call `callback` with every choice made inside the block; each shape is chosen again there."""
    _watchers.append(callback)
    forget()
    try:
        yield
    finally:
        _watchers.remove(callback)


def choose(
    problem: Problem, ordinal: int, own: Limits | None = None, *, any_bound: bool = False
) -> Choice | None:
    """The choice for `problem` on CUDA device `ordinal`, within the limits of all choices or those
    of the call's `own`, and, if `any_bound` is set, whatever bound on its regret is accepted; None
    for a device without a description."""
    accepted = None if any_bound else _max_regret
    try:
        predictor, device = current_predictor(), driver.device_of(ordinal)
        within = predictor.within(limits_of(problem, own))
        choice = within.choose(problem, device, max_regret=accepted)
        _learn_of_dense(device)
    except UnknownDevice as error:
        log.debug("PyTorch's own operator: %s", error)
        return None
    except ConfpredError as error:  # such as a damaged model: worth a look
        log.warning("PyTorch's own operator: %s", error)
        return None
    _notice_changes(ordinal)
    announce(choice)
    return choice


def serves_dense(ordinal: int) -> bool:
    """Whether a dense layer may be served by anything but PyTorch's own operator on CUDA device
    `ordinal`; it may take as long as to load the model."""
    try:
        return _learn_of_dense(driver.device_of(ordinal))
    except ConfpredError as error:  # `choose` says so where it counts
        log.debug("PyTorch's own operator: %s", error)
        return False


def _learn_of_dense(device: Device) -> bool:
    global may_serve_dense
    served_there = _serves_dense.get(device)
    if served_there is None:
        served_there = _serves_dense[device] = current_predictor().knows_libraries(device)
        may_serve_dense = any(_serves_dense.values())
    return served_there


def _notice_changes(ordinal: int) -> None:
    """Warn once a device where the driver or cuDNN is another one than its model's measurements
    are of."""
    if ordinal in _noticed:
        return
    _noticed.add(ordinal)
    try:
        model = current_predictor().models.get(driver.device_of(ordinal).key)
        if model is None:
            return
        now = {"driver": driver.describe(ordinal)[1], "cudnn": cudnn_version()}
    except Exception as error:  # a warning is not worth an error
        log.debug("versions cannot be compared: %s", error)
        return
    for change in changes(model, **now):
        log.warning("model %s: %s; `confpred drift` tells whether it holds", model.version, change)


def choose_soon(problem: Problem, ordinal: int, own: Limits | None = None) -> Future[Choice | None]:
    """`choose` in another thread: the first choice of a process loads the model, and a network has
    tens of problems."""
    key = (problem, ordinal, limits_of(problem, own))
    if key not in _chosen:
        _chosen[key] = _chooser().submit(choose, problem, ordinal, key[2])
    return _chosen[key]


@cache
def _chooser() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "confpred-chooser")


def is_watched() -> bool:
    """Whether someone waits for each choice."""
    return bool(_watchers)


def pytorch_ms(problem: Record, ordinal: int) -> float | None:
    """Milliseconds that PyTorch's own operator is expected to take for `problem`."""
    device = driver.device_of(ordinal)
    return current_predictor().expected_ms(problem, device, PYTORCH_OPERATOR)


def converting_pays(choice: Choice, ordinal: int) -> bool:
    """Whether `choice` is expected to beat PyTorch's operator on a tensor with its channels first,
    the copies between the layouts included."""
    problem = choice.problem
    if not isinstance(problem, Problem):
        return False
    theirs = pytorch_ms(problem, ordinal)
    return layouts.converting_pays(problem, choice.predicted_ms, theirs, driver.device_of(ordinal))


def announce(choice: Choice) -> None:
    """Tell those who watch that `choice` is what runs."""
    for watcher in _watchers:
        watcher(choice)


def why_not_ours(choice: Choice) -> str | None:
    """Why PyTorch's own operator is to run, in words; None if a kernel of ours is."""
    if choice.is_guess:  # which is not enough
        dense = getattr(choice.problem, "groups", None) == 1 and choice.source != "transferred"
        no_model = "no model for this device, and not measured on it"
        return "dense layers were never sampled" if dense else no_model
    if choice.source == "fallback":
        legal = "no kernel of ours is legal"
        return legal if _max_regret is None else f"{legal} and bounded within max_regret"
    if choice.candidate == PYTORCH_OPERATOR:
        told = {"pinned": "pinned", "measured": "measured slower"}
        return told.get(choice.source, "predicted slower")
    return None


def is_ours(choice: Choice) -> bool:
    """Whether a kernel of ours is to run."""
    reason = why_not_ours(choice)
    if reason is None:
        log.debug("%s: %s %s (%s)", choice.problem, choice.provider, choice.config, choice.source)
    else:
        log.debug("%s: PyTorch's own operator (%s: %s)", choice.problem, choice.source, reason)
    return reason is None


def _reset_after_fork() -> None:
    """A child process has not the threads of its parent, nor what they were about to find."""
    forget()
    _chooser.cache_clear()


os.register_at_fork(after_in_child=_reset_after_fork)
