"""Checking and timing configs on a GPU: what a sampler's worker process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from confpred.cuda import driver
from confpred.cuda.launch import BoundLaunch
from confpred.cudnn.plans import BuiltPlan, Plans
from confpred.errors import CompileError, LaunchError
from confpred.families.protocol import Family
from confpred.measure.arena import Arena, Operands, arena_of
from confpred.measure.outcome import Outcome
from confpred.measure.timing import Replayable, launches_a_replay, time_interleaved
from confpred.problem.operation import Launch, Operand, Step
from confpred.problem.record import Record

#: A plan that wants more is not measured: networks have little memory to spare.
MAX_WORKSPACE_BYTES = 2**31
#: A config that takes this many times as long as the fastest, and this many seconds, can be of no
#: use. Some of cuDNN's plans take hundreds of milliseconds, and would fill most of a run.
HOPELESS_FACTOR, HOPELESS_SECONDS = 30.0, 5e-3
Enqueue = Callable[[int, Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the configs of one problem share."""

    arena: Arena
    problem: Record
    family: Family
    outputs: tuple[Operand, ...]
    operands: Operands
    references: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A config that can be launched, as far as is known.

    Attributes:
        launch: with the workspace that a library's plan turned out to need.
        built: that plan.
    """

    launch: Launch
    built: BuiltPlan | None = None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A config that was found correct, but is not timed yet."""

    row: int
    enqueue: Enqueue
    outcome: Outcome  # as far as it is known before it is timed
    seconds: float
    is_program: bool


def measure(
    problem: Record,
    family: Family,
    rows: Sequence[int],
    *,
    ordinal: int,
    seed: int,
    report: Callable[[int], None],
) -> list[Outcome]:
    """Check each config of `rows` against the reference, then time the correct ones together.

    Args:
        problem, family, rows: the configs; each legal for the problem.
        ordinal: CUDA device.
        seed: of the order of the timed rounds.
        report: called with a row just before its config is first launched, so that a supervisor
            knows which config a process died of.

    Returns:
        One outcome a row, in the order of `rows`.
    """
    shared, candidates, outcomes = _prepare(problem, family, rows, ordinal, report)
    checked, failures = _check(shared, candidates, report)
    outcomes |= failures | _time(shared, checked, seed)
    return [outcomes[row] for row in rows]


def check(problem: Record, family: Family, rows: Sequence[int], *, ordinal: int) -> list[Outcome]:
    """The first half of `measure`: are the configs correct? Outcomes have no times."""
    shared, candidates, outcomes = _prepare(problem, family, rows, ordinal, lambda _row: None)
    checked, failures = _check(shared, candidates, lambda _row: None)
    outcomes |= failures | {c.row: c.outcome for c in checked}
    return [outcomes[row] for row in rows]


def _prepare(
    problem: Record,
    family: Family,
    rows: Sequence[int],
    ordinal: int,
    report: Callable[[int], None],
) -> tuple[_Shared, dict[int, _Candidate], dict[int, Outcome]]:
    """What is to be checked, and the outcomes of plans that cannot be built."""
    arena, operation = arena_of(ordinal), family.operation
    candidates, failures = _built(problem, family, rows, ordinal, report)
    operands = arena.operands(operation, problem, [c.launch for c in candidates.values()])
    outputs = tuple(o for o in operation.operands(problem) if o.terms)
    references = tuple(arena.reference(operation, problem, o, operands) for o in outputs)
    return _Shared(arena, problem, family, outputs, operands, references), candidates, failures


def _built(
    problem: Record,
    family: Family,
    rows: Sequence[int],
    ordinal: int,
    report: Callable[[int], None],
) -> tuple[dict[int, _Candidate], dict[int, Outcome]]:
    candidates: dict[int, _Candidate] = {}
    failures: dict[int, Outcome] = {}
    plans: Plans | None = None
    for row in rows:
        launch = family.launch(problem, row)
        if launch.plan is None:
            candidates[row] = _Candidate(launch)
            continue
        report(row)
        try:
            plans = plans or Plans(problem, ordinal)  # type: ignore[arg-type]  # a convolution
            built = plans.build(launch.plan)
            if built.workspace_bytes > MAX_WORKSPACE_BYTES:
                raise LaunchError(f"it needs a workspace of {built.workspace_bytes} bytes")
        except LaunchError as error:
            failures[row] = Outcome(row, "illegal", message=str(error))
            continue
        launch = replace(launch, scratch_bytes=built.workspace_bytes)
        candidates[row] = _Candidate(launch, built)
    return candidates, failures


def _check(
    shared: _Shared, rows: Mapping[int, _Candidate], report: Callable[[int], None]
) -> tuple[list[_Checked], dict[int, Outcome]]:
    """The correct configs, and what became of the others."""
    candidates: list[_Checked] = []
    failures: dict[int, Outcome] = {}
    for row, tried in rows.items():
        report(row)
        try:
            candidate = _check_one(shared, row, tried)
        except CompileError as error:
            failures[row] = Outcome(row, "compile_error", message=str(error))
        except LaunchError as error:
            failures[row] = Outcome(row, "launch_error", message=str(error))
        else:
            if candidate.outcome.status == "ok":
                candidates.append(candidate)
            else:
                failures[row] = candidate.outcome
    return candidates, failures


def _check_one(shared: _Shared, row: int, candidate: _Candidate) -> _Checked:
    """Launch one config once on poisoned outputs and compare them with the references: each element
    must be within the dtype's rounding, or within that of TF32 where the config uses it; where a
    launch states another error, the output as a whole must be within that.

    Raises:
        CompileError, LaunchError: it cannot run.
    """
    arena, launch, names = shared.arena, candidate.launch, shared.operands.names
    loaded = [arena.load(step.kernel) for step in launch.steps]
    if candidate.built is not None:
        enqueue: Enqueue = candidate.built.bind(names)
    elif launch.program:
        from confpred.measure.programs import enqueue_of  # imports torch

        sizes = {o.name: o for o in shared.family.operation.operands(shared.problem)}
        load = partial(_kernel_of, arena)
        enqueue = enqueue_of(launch, sizes, names, load, arena.ordinal)
    else:
        enqueue = BoundLaunch([k.kernel for k in loaded], launch, names).enqueue
    arena.poison(shared.outputs)
    seconds = _once(shared, enqueue)
    errors, faults = [], []
    for output, reference in zip(shared.outputs, shared.references, strict=True):
        error, outside = arena.compare(output, shared.operands, reference, tf32=launch.tf32)
        errors.append(error)
        if launch.error is not None:
            if not error <= launch.error:  # NaN is wrong too
                faults.append(f"the error of {output.name} is {error:.2g}")
        elif outside:
            faults.append(f"{outside} of {output.elements} elements of {output.name} are off")
    if not arena.left_zero(shared.operands, launch.zeroed_bytes):
        faults.append("the zeroed workspace is not zero again")
    outcome = Outcome(
        row,
        "wrong_result" if faults else "ok",
        registers=max((k.registers for k in loaded), default=0),
        local_bytes=max((k.local_bytes for k in loaded), default=0),
        smem_bytes=max((step.smem_bytes for step in launch.steps), default=0),
        error=max(errors),
        message="; ".join(faults),
    )
    return _Checked(row, enqueue, outcome, seconds, bool(launch.program))


def _kernel_of(arena: Arena, step: Step) -> Any:
    return arena.load(step.kernel).kernel


def _is_hopeless(seconds: float, best: float) -> bool:
    return seconds > HOPELESS_SECONDS and seconds > HOPELESS_FACTOR * best


def _once(shared: _Shared, enqueue: Enqueue) -> float:
    """Seconds of one launch, which has ended."""
    arena = shared.arena
    start, end = (arena.cuda.create_event({"timing_enabled": True}) for _ in range(2))
    arena.stream.record(start)
    enqueue(arena.handle, shared.operands.slot(0))
    arena.stream.record(end)
    arena.stream.sync()
    return float(end - start) * 1e-3


def _time(shared: _Shared, candidates: Sequence[_Checked], seed: int) -> dict[int, Outcome]:
    """The outcomes of the correct configs, by row; one that is hopeless has a single sample."""
    best = min((c.seconds for c in candidates), default=0.0)
    useful, hopeless = [], {}
    for candidate in candidates:
        seconds = candidate.seconds
        if _is_hopeless(seconds, best):  # in the first launch, modules may have been loaded
            seconds = _once(shared, candidate.enqueue)
        if _is_hopeless(seconds, best):
            hopeless[candidate.row] = replace(
                candidate.outcome, time_ms=1e3 * seconds, spread_ms=0.0, samples=1
            )
        else:
            useful.append(replace(candidate, seconds=seconds))
    return hopeless | _replayed(shared, useful, seed)


def _replayed(shared: _Shared, candidates: Sequence[_Checked], seed: int) -> dict[int, Outcome]:
    arena = shared.arena
    graphs: list[Replayable] = []
    launches, slot = [], 0
    for candidate in candidates:
        count = launches_a_replay(candidate.seconds)
        if candidate.is_program:
            from confpred.measure.programs import graph_of  # imports torch

            slots = [shared.operands.slot(slot + i) for i in range(count)]
            graphs.append(graph_of(candidate.enqueue, slots))
            launches.append(count)
            slot += count
            continue
        builder = arena.stream.create_graph_builder().begin_building()
        capturing = int(builder.stream.handle)
        for _ in range(count):
            candidate.enqueue(capturing, shared.operands.slot(slot))
            slot += 1
        graphs.append(builder.end_building().complete())
        launches.append(count)
    timings = time_interleaved(arena.cuda, arena.stream, graphs, launches, seed)
    clock = driver.sm_clock_mhz(arena.ordinal)
    return {
        c.row: replace(
            c.outcome,
            time_ms=t.median_ms,
            spread_ms=t.spread_ms,
            samples=t.samples,
            sm_clock_mhz=clock,
        )
        for c, t in zip(candidates, timings, strict=True)
    }
