"""Checks and times configs on a GPU, for a sampler's worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from confpred.cuda import driver
from confpred.errors import CompileError, LaunchError
from confpred.families.protocol import Family
from confpred.launch.runner import Loader, Runner, bound, loaded, workspaces
from confpred.measure.timing import (
    Outcome,
    Replayable,
    Status,
    Timing,
    launches_a_replay,
    time_interleaved,
)
from confpred.problem.operation import (
    REFERENCE,
    SCRATCH,
    ZEROED,
    KernelSpec,
    Launch,
    Operand,
    Operation,
)
from confpred.problem.record import Record

#: A plan that wants more is not measured: networks have little memory to spare.
MAX_WORKSPACE_BYTES = 2**31
#: A config that takes this many times as long as the fastest, and this many seconds, can be of no
#: use. Some of cuDNN's plans take hundreds of milliseconds, and would fill most of a run.
HOPELESS_FACTOR, HOPELESS_SECONDS = 30.0, 5e-3
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Facts that the configs of one problem share."""

    arena: Arena
    operands: Operands
    references: dict[Operand, int]


@dataclass(frozen=True, slots=True)
class _Checked:
    """A correct config that is not timed yet."""

    row: int
    runner: Runner
    outcome: Outcome  # as far as it is known before it is timed
    seconds: float


def measure(
    problem: Record,
    family: Family,
    rows: Sequence[int],
    *,
    ordinal: int,
    seed: int,
    report: Report,
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
    shared, checked, outcomes = _checked(problem, family, rows, ordinal, report)
    outcomes |= _time(shared, checked, seed)
    return [outcomes[row] for row in rows]


def check(problem: Record, family: Family, rows: Sequence[int], *, ordinal: int) -> list[Outcome]:
    """Check configs as `measure` does, and time nothing."""
    _, checked, outcomes = _checked(problem, family, rows, ordinal, lambda _row: None)
    outcomes |= {c.row: c.outcome for c in checked}
    return [outcomes[row] for row in rows]


def _checked(
    problem: Record, family: Family, rows: Sequence[int], ordinal: int, report: Report
) -> tuple[_Shared, list[_Checked], dict[int, Outcome]]:
    """Return the correct configs, and the outcomes of the others."""
    arena, operation, failures = arena_of(ordinal), family.operation, dict[int, Outcome]()
    loader, runners = Loader(operation, problem, ordinal), dict[int, Runner]()
    for row in rows:
        report(row)
        launch = family.launch(problem, row)
        with _record_failure(row, failures, "launch_error" if launch.plan is None else "illegal"):
            runner = loader.runner(launch)
            size = runner.launch.scratch_bytes
            if launch.plan is not None and size > MAX_WORKSPACE_BYTES:
                raise LaunchError(f"it needs a workspace of {size} bytes")
            runners[row] = runner
    operands = arena.operands(operation, problem, list(runners.values()))
    outputs = [operand for operand in operands.kinds.values() if operand.terms]
    references = {o: arena.reference(operation, problem, o, operands) for o in outputs}
    shared, checked = _Shared(arena, operands, references), list[_Checked]()
    for row, runner in runners.items():
        report(row)
        with _record_failure(row, failures):
            candidate = _check_one(shared, row, runner)
            if candidate.outcome.status == "ok":
                checked.append(candidate)
            else:
                failures[row] = candidate.outcome
    return shared, checked, failures


@contextmanager
def _record_failure(
    row: int, failures: dict[int, Outcome], refused: Status = "launch_error"
) -> Iterator[None]:
    """Put the outcome of a config that cannot run among `failures`, `refused` where the driver or
    the library does not take it."""
    try:
        yield
    except CompileError as error:
        failures[row] = Outcome(row, "compile_error", message=str(error))
    except LaunchError as error:
        failures[row] = Outcome(row, refused, message=str(error))


def _check_one(shared: _Shared, row: int, runner: Runner) -> _Checked:
    """Launch one config once on poisoned outputs and compare them with the references: each element
    must be within the dtype's rounding, or within that of TF32 where the config uses it; where a
    launch states another error, the output as a whole must be within that.

    Raises:
        LaunchError: it cannot run.
    """
    arena, launch = shared.arena, runner.launch
    if runner.takes_tensors:
        from confpred.measure.pytorch import on_addresses  # imports torch

        runner = on_addresses(runner, shared.operands.kinds, arena.ordinal)
    arena.poison(shared.references)
    seconds = _once(shared, runner)
    errors, faults = [], []
    for output, reference in shared.references.items():
        error, outside = arena.compare(output, shared.operands, reference, tf32=launch.tf32)
        errors.append(error)
        if launch.error is not None:
            if not error <= launch.error:  # NaN is wrong too
                faults.append(f"the error of {output.name} is {error:.2g}")
        elif outside:
            faults.append(f"{outside} of {output.elements} elements of {output.name} are off")
    if not arena.left_zero(shared.operands, launch.zeroed_bytes):
        faults.append("the zeroed workspace is not zero again")
    kernels = [loaded(kernel, arena.ordinal) for kernel in launch.kernels]
    outcome = Outcome(
        row,
        "wrong_result" if faults else "ok",
        registers=max((k.registers for k in kernels), default=0),
        local_bytes=max((k.local_bytes for k in kernels), default=0),
        smem_bytes=max((step.smem_bytes for step in launch.steps), default=0),
        error=max(errors),
        message="; ".join(faults),
    )
    return _Checked(row, runner, outcome, seconds)


def _is_hopeless(seconds: float, best: float) -> bool:
    return seconds > HOPELESS_SECONDS and seconds > HOPELESS_FACTOR * best


def _once(shared: _Shared, runner: Runner) -> float:
    """Return the seconds of one launch, which has ended."""
    arena = shared.arena
    start, end = (arena.cuda.create_event({"timing_enabled": True}) for _ in range(2))
    arena.stream.record(start)
    runner.enqueue(arena.handle, shared.operands.slot(0, runner.names))
    arena.stream.record(end)
    arena.stream.sync()
    return float(end - start) * 1e-3


def _time(shared: _Shared, candidates: Sequence[_Checked], seed: int) -> dict[int, Outcome]:
    """Return the outcomes of the correct configs, by row; a hopeless one has a single sample."""
    best = min((c.seconds for c in candidates), default=0.0)
    useful, hopeless = [], {}
    for candidate in candidates:
        seconds = candidate.seconds
        if _is_hopeless(seconds, best):  # in the first launch, modules may have been loaded
            seconds = _once(shared, candidate.runner)
        if _is_hopeless(seconds, best):
            hopeless[candidate.row] = candidate.outcome.timed(Timing(1e3 * seconds, 0.0, 1))
        else:
            useful.append(replace(candidate, seconds=seconds))
    return hopeless | _time_replays(shared, useful, seed)


def _time_replays(shared: _Shared, candidates: Sequence[_Checked], seed: int) -> dict[int, Outcome]:
    arena = shared.arena
    graphs: list[Replayable] = []
    launches, slot = [], 0
    for candidate in candidates:
        count = launches_a_replay(candidate.seconds)
        slots = [shared.operands.slot(slot + i, candidate.runner.names) for i in range(count)]
        slot += count
        launches.append(count)
        if candidate.runner.launch.program:
            from confpred.measure.pytorch import graph_of  # imports torch

            graphs.append(graph_of(candidate.runner.enqueue, slots))
            continue
        builder = arena.stream.create_graph_builder().begin_building()
        capturing = int(builder.stream.handle)
        for addresses in slots:
            candidate.runner.enqueue(capturing, addresses)
        graphs.append(builder.end_building().complete())
    timings = time_interleaved(arena.cuda, arena.stream, graphs, launches, seed)
    clock = driver.sm_clock_mhz(arena.ordinal)
    return {c.row: c.outcome.timed(t, clock) for c, t in zip(candidates, timings, strict=True)}


# Operands, references and workspaces in device memory.
_ALIGN = 256
_L2_MULTIPLE = 3  # operands cycle through this many times the L2 cache
#: Largest relative error of one rounding to the dtype (half a unit in the last place), doubled for
#: a sum that rounds to the neighbour.
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}
#: Errors of sums of products of values in [-1, 1), in float32; they grow with the number of
#: products.
ABSOLUTE, ABSOLUTE_A_TERM = 1e-5, 4e-7
#: The error of a product of numbers in [-1, 1) that are rounded to TF32 first, to 11 bits each, has
#: a standard deviation below this. Errors of a sum grow with the root of their number, and the
#: largest of some million is some six deviations away.
_TF32 = 2.0**-12
_TF32_DEVIATIONS = 8
_POISON = 0xFF  # every byte: NaN in all the dtypes
_GRID = 132 * 8  # blocks of the helper kernels that stride over their elements


def tolerance(output: Operand, *, tf32: bool = False) -> tuple[float, float]:
    """Return how far each element of `output` may be from the reference: as a share of it, and what
    is added to that; more where the inputs may be rounded to TF32."""
    absolute = ABSOLUTE + ABSOLUTE_A_TERM * output.terms
    if tf32:
        absolute += _TF32_DEVIATIONS * _TF32 * output.terms**0.5
    return ROUNDING[output.dtype], absolute


@dataclass(frozen=True, slots=True)
class Operands:
    """Several copies of a problem's operands in device memory.

    Attributes:
        kinds: the operation's operands, by name.
        bases: address of the first of each, and of each workspace that a launch needs, which
            launches of one stream share as they do in a program.
        slots: how many copies there are.
    """

    kinds: Mapping[str, Operand]
    bases: Mapping[str, int]
    slots: int

    def slot(self, index: int, names: Iterable[str]) -> list[int]:
        """Return the addresses of `names` for launch `index`; after the last slot comes the
        first."""
        index %= self.slots
        strides = {name: _aligned(operand.bytes) for name, operand in self.kinds.items()}
        return [self.bases[name] + index * strides.get(name, 0) for name in names]


class Arena:
    """Device memory, stream and helper kernels of one GPU, kept between problems.

    Attributes:
        ordinal: CUDA device.
        cuda: the `cuda.core` device, current in this thread.
        device: its description.
        stream, handle: the stream that everything runs on, and its CUDA handle.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.cuda = driver.make_current(ordinal)
        self.device = driver.device_of(ordinal)
        self.stream = self.cuda.create_stream()
        self.handle = int(self.stream.handle)
        self._buffers: dict[str, Any] = {}
        self._filled: dict[str, tuple[str, float, float]] = {}
        self._computed: dict[str, Record] = {}  # what the references hold

    def operands(
        self, operation: Operation, problem: Record, runners: Sequence[Runner]
    ) -> Operands:
        """Return random inputs, sliced so that successive slices do not fit in L2 together, and the
        workspaces that any of `runners` needs."""
        kinds = {operand.name: operand for operand in operation.operands(problem)}
        sizes = {name: _aligned(operand.bytes) for name, operand in kinds.items()}
        # Two at least: a launch must not find what the one before it left in L2.
        slots = max(2, -(-_L2_MULTIPLE * self.device.l2_bytes // sum(sizes.values())))
        bases = {
            name: self._buffer(
                name, slots * sizes[name], None if o.terms else (o.dtype, o.scale, o.center)
            )
            for name, o in kinds.items()
        }
        wanted = [space for runner in runners for space in workspaces(runner.launch).items()]
        for name, size in dict(sorted(wanted)).items():  # the largest
            bases[name] = self._buffer(name, size, None)
        return Operands(kinds, bases, slots)

    def reference(
        self, operation: Operation, problem: Record, output: Operand, operands: Operands
    ) -> int:
        """Return the address of `output` in float64, for the inputs of slice 0: their values depend
        on the problem alone, so the families of a problem share it."""
        name = f"{REFERENCE} {output.name}"
        address = self._buffer(name, 8 * output.elements, None)
        if self._computed.get(name) == problem:
            return address
        self._buffers[name].fill(0, stream=self.stream)
        step = operation.reference(problem, output.name)
        names = (*operands.kinds, REFERENCE)
        enqueue = bound(Launch((step,)), names, self.ordinal)
        enqueue(self.handle, [*operands.slot(0, operands.kinds), address])
        self._computed[name] = problem
        return address

    def poison(self, outputs: Iterable[Operand]) -> None:
        """Fill all outputs and the scratch with NaN, which shows elements that are never written or
        are read too early; and fill the zeroed workspace with zeros."""
        for name in (*(o.name for o in outputs), SCRATCH):
            if name in self._buffers:
                self._buffers[name].fill(_POISON, stream=self.stream)
            self._filled.pop(name, None)  # an output here may be an input of the next problem
        if ZEROED in self._buffers:
            self._buffers[ZEROED].fill(0, stream=self.stream)

    def compare(
        self, output: Operand, operands: Operands, reference: int, *, tf32: bool = False
    ) -> tuple[float, int]:
        """Return the relative error of `output` in the 2-norm, and how many elements are outside
        the bound, which is wider where the inputs may be rounded to TF32."""
        relative, absolute = tolerance(output, tf32=tf32)
        error, norm, outside = self._totals(
            "compare",
            output.dtype,
            operands.bases[output.name],
            reference,
            np.int64(output.elements),
            np.float64(relative),
            np.float64(absolute),
        )
        return float(np.sqrt(error / norm)) if norm else float(np.sqrt(error)), int(outside)

    def left_zero(self, operands: Operands, size: int) -> bool:
        """Return whether the first `size` bytes of the zeroed workspace are zero again."""
        if not size:
            return True
        words = np.int64(-(-size // 4))
        return not any(self._totals("count_nonzero", "float32", operands.bases[ZEROED], words))

    def _totals(self, entry: str, dtype: str, *arguments: Any) -> Any:
        """Return the three float64 totals that a helper kernel computes."""
        from cuda.bindings import runtime

        address = self._buffer("totals", 24, None)
        self._buffers["totals"].fill(0, stream=self.stream)
        self._enqueue(entry, dtype, (address, *arguments))
        host = np.empty(3)
        self.stream.sync()
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        (code,) = runtime.cudaMemcpy(host.ctypes.data, address, host.nbytes, kind)
        if code != runtime.cudaError_t.cudaSuccess:
            raise LaunchError(f"reading results back failed: {code.name}")
        return host

    def _buffer(self, name: str, size: int, random: tuple[str, float, float] | None) -> int:
        """Return the address of a buffer of at least `size` bytes, which grows as needed. `random`
        fills it with numbers of a dtype, at most a scale away from a center."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            if buffer is not None:
                self.stream.sync()
                buffer.close()
            size = _aligned(max(size, _ALIGN))
            buffer = self._buffers[name] = self.cuda.allocate(size, stream=self.stream)
            self._filled.pop(name, None)
            self._computed.pop(name, None)
        if random is not None and self._filled.get(name) != random:
            dtype, scale, center = random
            seed = np.uint32(sum(name.encode()))
            words = np.int64(buffer.size // (4 if dtype == "float32" else 2))
            arguments = (int(buffer.handle), words, seed, np.float32(scale), np.float32(center))
            self._enqueue("fill_random", dtype, arguments)
            self._filled[name] = random
        return int(buffer.handle)

    def _enqueue(self, entry: str, dtype: str, arguments: tuple[Any, ...]) -> None:
        from cuda.core import LaunchConfig, launch

        spec = KernelSpec("reference.cu", entry, (("DTYPE", f"DTYPE_{dtype.upper()}"),))
        config = LaunchConfig(grid=_GRID, block=256)
        launch(self.stream, config, loaded(spec, self.ordinal).kernel, *arguments)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@lru_cache(maxsize=1)
def arena_of(ordinal: int) -> Arena:
    """Return the arena of CUDA device `ordinal`; a process measures on one device."""
    return Arena(ordinal)
