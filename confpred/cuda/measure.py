"""Checking and timing configs on a GPU: what a sampler's worker process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confpred.cuda import driver
from confpred.cuda.bench import Bench, Operands, bench_of
from confpred.cuda.timing import launches_a_replay, time_interleaved
from confpred.errors import CompileError, LaunchError
from confpred.families.base import Family
from confpred.measurement import Status
from confpred.problem import Problem


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one config; the fields mean what `confpred.measurement.Measurement` says.

    Attributes:
        row: of the family's config table; -1 for PyTorch's own operator.
    """

    row: int
    status: Status
    time_ms: float = float("nan")
    spread_ms: float = float("nan")
    samples: int = 0
    registers: int = 0
    local_bytes: int = 0
    smem_bytes: int = 0
    error: float = float("nan")
    sm_clock_mhz: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Candidate:
    row: int
    bound: driver.BoundLaunch
    loaded: driver.LoadedKernel
    smem_bytes: int
    error: float
    seconds: float


def measure(
    problem: Problem,
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
    bench = bench_of(ordinal)
    operands = bench.operands(problem)
    candidates, outcomes = _check(bench, problem, family, rows, operands, report)
    outcomes |= _time(bench, candidates, operands, seed)
    return [outcomes[row] for row in rows]


def check(problem: Problem, family: Family, rows: Sequence[int], *, ordinal: int) -> list[Outcome]:
    """The first half of `measure`: are the configs correct? Outcomes have no times."""
    bench = bench_of(ordinal)
    operands = bench.operands(problem)
    candidates, outcomes = _check(bench, problem, family, rows, operands, lambda _row: None)
    outcomes |= {c.row: Outcome(c.row, "ok", error=c.error) for c in candidates}
    return [outcomes[row] for row in rows]


def _check(
    bench: Bench,
    problem: Problem,
    family: Family,
    rows: Sequence[int],
    operands: Operands,
    report: Callable[[int], None],
) -> tuple[list[_Candidate], dict[int, Outcome]]:
    """The correct configs, and what became of the others."""
    reference = bench.reference(problem, operands)
    candidates: list[_Candidate] = []
    failures: dict[int, Outcome] = {}
    for row in rows:
        report(row)
        try:
            candidates.append(_check_one(bench, problem, family, row, operands, reference))
        except CompileError as error:
            failures[row] = Outcome(row, "compile_error", message=str(error))
        except LaunchError as error:
            failures[row] = Outcome(row, "launch_error", message=str(error))
        except _WrongResult as error:
            failures[row] = error.outcome
    return candidates, failures


class _WrongResult(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.message)


def _check_one(
    bench: Bench,
    problem: Problem,
    family: Family,
    row: int,
    operands: Operands,
    reference: int,
) -> _Candidate:
    """Launch one config once on poisoned output and compare it with the reference.

    Raises:
        CompileError, LaunchError: it cannot run.
        _WrongResult: an element is outside the dtype's rounding of the reference.
    """
    launch = family.launch(problem, row)
    loaded = bench.load(family.source(problem, row))
    bound = driver.BoundLaunch(loaded.kernel, launch)
    bench.poison_output()
    start, end = (bench.cuda.create_event({"timing_enabled": True}) for _ in range(2))
    bench.stream.record(start)
    bound.enqueue(bench.handle, *operands.slot(0))
    bench.stream.record(end)
    error, outside = bench.compare(problem, operands.bases[0], reference)
    if outside:
        raise _WrongResult(
            Outcome(
                row,
                "wrong_result",
                registers=loaded.registers,
                local_bytes=loaded.local_bytes,
                smem_bytes=launch.smem_bytes,
                error=error,
                message=f"{outside} of {problem.output_elements} elements are off",
            )
        )
    return _Candidate(row, bound, loaded, launch.smem_bytes, error, (end - start) * 1e-3)


def _time(
    bench: Bench, candidates: Sequence[_Candidate], operands: Operands, seed: int
) -> dict[int, Outcome]:
    """The outcomes of the correct configs, by row."""
    graphs, launches, slot = [], [], 0
    for candidate in candidates:
        count = launches_a_replay(candidate.seconds)
        builder = bench.stream.create_graph_builder().begin_building()
        capturing = int(builder.stream.handle)
        for _ in range(count):
            candidate.bound.enqueue(capturing, *operands.slot(slot))
            slot += 1
        graphs.append(builder.end_building().complete())
        launches.append(count)
    timings = time_interleaved(bench.cuda, bench.stream, graphs, launches, seed)
    clock = driver.sm_clock_mhz(bench.ordinal)
    return {
        c.row: Outcome(
            c.row,
            "ok",
            time_ms=t.median_ms,
            spread_ms=t.spread_ms,
            samples=t.samples,
            registers=c.loaded.registers,
            local_bytes=c.loaded.local_bytes,
            smem_bytes=c.smem_bytes,
            error=c.error,
            sm_clock_mhz=clock,
        )
        for c, t in zip(candidates, timings, strict=True)
    }
