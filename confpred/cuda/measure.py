"""Checking and timing configs on a GPU: what a sampler's worker process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from confpred.cuda import driver
from confpred.cuda.compiler import compile_kernel
from confpred.cuda.timing import launches_a_replay, time_interleaved
from confpred.errors import CompileError, LaunchError
from confpred.families.base import Family, KernelSource, Launch
from confpred.measurement import Status
from confpred.problem import ACTIVATIONS, Problem

_ALIGN = 256
_L2_MULTIPLE = 3  # operands cycle through this many times the L2 cache
#: Largest relative error of one rounding to the dtype (half a unit in the last place), doubled for
#: a sum that rounds to the neighbour.
_ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_POISON = 0xFF  # every byte: NaN in float16 and bfloat16
_GRID = 132 * 8


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
    bench = _bench(ordinal)
    operands = bench.operands(problem)
    candidates, outcomes = _check(bench, problem, family, rows, operands, report)
    outcomes |= bench.time(candidates, operands, seed)
    return [outcomes[row] for row in rows]


def check(problem: Problem, family: Family, rows: Sequence[int], *, ordinal: int) -> list[Outcome]:
    """The first half of `measure`: are the configs correct? Outcomes have no times."""
    bench = _bench(ordinal)
    operands = bench.operands(problem)
    candidates, outcomes = _check(bench, problem, family, rows, operands, lambda _row: None)
    outcomes |= {c.row: Outcome(c.row, "ok", error=c.error) for c in candidates}
    return [outcomes[row] for row in rows]


def _check(
    bench: _Bench,
    problem: Problem,
    family: Family,
    rows: Sequence[int],
    operands: _Operands,
    report: Callable[[int], None],
) -> tuple[list[_Candidate], dict[int, Outcome]]:
    """The correct configs, and what became of the others."""
    reference = bench.reference(problem, operands)
    candidates: list[_Candidate] = []
    failures: dict[int, Outcome] = {}
    for row in rows:
        report(row)
        try:
            candidates.append(bench.check(problem, family, row, operands, reference))
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


@dataclass(frozen=True, slots=True)
class _Operands:
    """Addresses of slice i: ``base + i * stride``; `slots` slices."""

    bases: tuple[int, int, int, int]  # out, in, filter, bias (0 if absent)
    strides: tuple[int, int, int, int]
    slots: int
    out_bytes: int

    def slot(self, index: int) -> tuple[int, ...]:
        index %= self.slots
        return tuple(b + index * s for b, s in zip(self.bases, self.strides, strict=True))


class _Bench:
    """Device memory, stream and helper kernels of one GPU, kept between problems."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.cuda = driver.make_current(ordinal)
        self.device = driver.device_of(ordinal)
        self.stream = self.cuda.create_stream()
        self.handle = int(self.stream.handle)
        self._arenas: dict[str, Any] = {}
        self._filled: dict[str, str] = {}
        self._kernels: dict[KernelSource, driver.LoadedKernel] = {}
        self._slot = 0

    def operands(self, problem: Problem) -> _Operands:
        """Random inputs, sliced so that successive slices do not fit in L2 together."""
        sizes = [
            -(-2 * elements // _ALIGN) * _ALIGN
            for elements in (
                problem.output_elements,
                problem.input_elements,
                problem.filter_elements,
                problem.k if problem.bias else 0,
            )
        ]
        slots = -(-_L2_MULTIPLE * self.device.l2_bytes // sum(sizes))
        names = ("out", "in", "filter", "bias")
        bases = [
            self._arena(name, slots * size, None if name == "out" else problem.dtype)
            for name, size in zip(names, sizes, strict=True)
        ]
        if not problem.bias:
            bases[3] = 0
        return _Operands(
            tuple(bases),  # type: ignore[arg-type]
            tuple(sizes),  # type: ignore[arg-type]
            slots,
            2 * problem.output_elements,
        )

    def reference(self, problem: Problem, operands: _Operands) -> int:
        """Address of the float64 output of slice 0."""
        out = self._arena("reference", 8 * problem.output_elements, None)
        blocks = -(-problem.output_elements // 256)
        scalars = (
            *(ACTIVATIONS.index(problem.activation), problem.n, problem.c, problem.h, problem.w),
            *(problem.k, problem.r, problem.s, problem.p, problem.q),
            *(*problem.stride, *problem.padding, *problem.dilation, problem.groups),
        )
        kernel = self._helper("reference_fprop", problem.dtype)
        launch = Launch((blocks, 1, 1), (256, 1, 1), 0, scalars)
        driver.BoundLaunch(kernel, launch).enqueue(self.handle, out, *operands.slot(0)[1:])
        return out

    def check(
        self, problem: Problem, family: Family, row: int, operands: _Operands, reference: int
    ) -> _Candidate:
        """Launch one config once on poisoned output and compare it with the reference.

        Raises:
            CompileError, LaunchError: it cannot run.
            _WrongResult: an element is outside the dtype's rounding of the reference.
        """
        launch = family.launch(problem, row)
        source = family.source(problem, row)
        loaded = self._load(source, launch.smem_bytes)
        bound = driver.BoundLaunch(loaded.kernel, launch)
        self._arenas["out"].fill(_POISON, stream=self.stream)
        start, end = (self.cuda.create_event({"timing_enabled": True}) for _ in range(2))
        self.stream.record(start)
        bound.enqueue(self.handle, *operands.slot(0))
        self.stream.record(end)
        error, outside = self._compare(problem, operands.bases[0], reference)
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

    def time(
        self, candidates: Sequence[_Candidate], operands: _Operands, seed: int
    ) -> dict[int, Outcome]:
        graphs, launches = [], []
        for candidate in candidates:
            count = launches_a_replay(candidate.seconds)
            builder = self.stream.create_graph_builder().begin_building()
            capturing = int(builder.stream.handle)
            for _ in range(count):
                candidate.bound.enqueue(capturing, *operands.slot(self._slot))
                self._slot += 1
            graphs.append(builder.end_building().complete())
            launches.append(count)
        timings = time_interleaved(self.cuda, self.stream, graphs, launches, seed)
        clock = driver.sm_clock_mhz(self.ordinal)
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

    def _compare(self, problem: Problem, out: int, reference: int) -> tuple[float, int]:
        """Relative error in the 2-norm, and how many elements are outside the bound."""
        totals = self._arena("totals", 24, None)
        self._arenas["totals"].fill(0, stream=self.stream)
        # Products of values in [-1, 1) summed in float32: the error grows with their number.
        terms = problem.group_width * problem.r * problem.s
        arguments = (
            *(totals, out, reference, np.int64(problem.output_elements)),
            *(np.float64(_ROUNDING[problem.dtype]), np.float64(1e-5 + 2e-6 * terms)),
        )
        self._enqueue("compare", problem.dtype, arguments)
        host = np.empty(3)
        self._read(host)
        error, norm, outside = host
        return float(np.sqrt(error / norm)) if norm else float(np.sqrt(error)), int(outside)

    def _read(self, host: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        from cuda.bindings import runtime

        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        address = int(self._arenas["totals"].handle)
        self.stream.sync()
        (code,) = runtime.cudaMemcpy(host.ctypes.data, address, host.nbytes, kind)
        if code != runtime.cudaError_t.cudaSuccess:
            raise LaunchError(f"reading results back failed: {code.name}")

    def _arena(self, name: str, size: int, random_dtype: str | None) -> int:
        """Address of at least `size` bytes, grown as needed; random numbers in it if asked."""
        arena = self._arenas.get(name)
        if arena is None or arena.size < size:
            if arena is not None:
                self.stream.sync()
                arena.close()
            arena = self._arenas[name] = self.cuda.allocate(max(size, _ALIGN), stream=self.stream)
            self._filled.pop(name, None)
        if random_dtype is not None and self._filled.get(name) != random_dtype:
            seed = np.uint32(sum(name.encode()))
            arguments = (int(arena.handle), np.int64(arena.size // 2), seed)
            self._enqueue("fill_random", random_dtype, arguments)
            self._filled[name] = random_dtype
        return int(arena.handle)

    def _load(self, source: KernelSource, smem_bytes: int) -> driver.LoadedKernel:
        """A kernel is loaded once; windows and epilogues may share it across problems."""
        loaded = self._kernels.get(source)
        if loaded is None:
            compiled = compile_kernel(source, self.device.arch)
            loaded = driver.load(compiled, self.device.smem_per_block)
            self._kernels[source] = loaded
        return loaded

    def _helper(self, entry: str, dtype: str) -> Any:
        defines = (("DTYPE", f"DTYPE_{dtype.upper()}"),)
        return self._load(KernelSource("reference.cu", entry, defines), 0).kernel

    def _enqueue(self, entry: str, dtype: str, arguments: tuple[Any, ...]) -> None:
        from cuda.core import LaunchConfig, launch

        launch(self.stream, LaunchConfig(_GRID, 256), self._helper(entry, dtype), *arguments)


@lru_cache(maxsize=1)
def _bench(ordinal: int) -> _Bench:
    return _Bench(ordinal)
