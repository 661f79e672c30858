"""Checks and times configs of Triton kernels, by the calls that their authors' examples make."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from confpred.cuda import driver
from confpred.errors import InvalidInput, first_line, nearest
from confpred.measure.kernels import HOPELESS_FACTOR, HOPELESS_SECONDS, Report
from confpred.measure.pytorch import Evictor, TorchGraph
from confpred.measure.timing import Outcome, Timing, launches_a_replay, time_interleaved
from confpred.triton.triton_family import ExampleCall, TritonFamily

#: Largest relative error of an output in the 2-norm, against another config's: both round sums in
#: float32, of other orders, to the dtype. Integers must be equal.
LARGEST_ERROR = {
    "float8_e4m3fn": 0.1, "float8_e5m2": 0.2, "bfloat16": 1.6e-2, "float16": 2e-3,
    "float32": 1e-4, "float64": 1e-10,
}  # fmt: skip
#: The same against the author's reference: Triton multiplies float32 as TF32 unless it is asked not
#: to.
REFERENCE_ERROR = {**LARGEST_ERROR, "float32": 2e-3}
_L2_MULTIPLE = 3  # the tensors of all calls are this many times the L2 cache


def measure_calls(
    problem: Any,
    family: TritonFamily,
    rows: Sequence[int],
    *,
    ordinal: int,
    seed: int,
    report: Report,
) -> list[Outcome]:
    """Compile the configs `rows` side by side, compare their results with those of the first that
    runs, and time the others together, under the protocol of all kernels.

    Takes and returns what `confpred.measure.kernels.measure` does.

    Raises:
        InvalidInput: the kernel has no example that calls it for `problem`.
        RuntimeError: CUDA cannot be used in this process any more.
    """
    torch.cuda.set_device(ordinal)
    device = driver.make_current(ordinal)
    call = family.example(problem)
    compile_all(call, rows, partial(torch.cuda.set_device, ordinal))
    outcomes = check_calls(call, rows, report)
    seconds = {row: _once(call, row) for row, outcome in outcomes.items() if outcome.status == "ok"}
    limit = max(HOPELESS_SECONDS, HOPELESS_FACTOR * min(seconds.values(), default=0.0))
    for row in [row for row, taken in seconds.items() if taken > limit]:
        outcomes[row] = outcomes[row].timed(Timing(1e3 * seconds.pop(row), 0.0, 1))
    l2_bytes = driver.device_of(ordinal).l2_bytes
    launches = [launches_a_replay(taken) for taken in seconds.values()]
    size = sum(tensor.nbytes for tensor in call.tensors.values())
    copies = min(max(launches, default=1), -(-_L2_MULTIPLE * l2_bytes // max(size, 1)))
    calls = [call, *(family.example(problem) for _ in range(copies - 1))]
    graphs = [
        TorchGraph([partial(one.launch, row) for one in islice(cycle(calls), count)])
        for row, count in zip(seconds, launches, strict=True)
    ]
    torch.cuda.synchronize()
    evict = Evictor(l2_bytes)
    timings = time_interleaved(device, device.create_stream(), graphs, launches, seed, evict)
    clock = driver.sm_clock_mhz(ordinal)
    for row, timing in zip(seconds, timings, strict=True):
        outcomes[row] = outcomes[row].timed(timing, clock)
    return [outcomes[row] for row in rows]


def compile_all(call: ExampleCall, rows: Iterable[int], begin: Callable[[], object]) -> None:
    """Compile configs into Triton's cache, in threads that each call `begin` first. A config that
    does not compile fails when it is launched."""

    def compiled(row: int) -> None:
        try:
            call.compile(row)
        except (CompilationError, OutOfResources, PTXASError):
            return

    with ThreadPoolExecutor(os.cpu_count(), initializer=begin) as threads:
        list(threads.map(compiled, rows))


def check_calls(call: ExampleCall, rows: Iterable[int], report: Report) -> dict[int, Outcome]:
    """Launch each config once, on the example's tensors, and compare the tensors that it changes
    with those of the first config that ran and is right. The author's reference names those that
    are results, and they are compared with it first; without one, all are.

    Returns:
        An outcome of each row, without its time.

    Raises:
        InvalidInput: the reference returns a tensor of another name or shape.
    """
    before = {name: tensor.clone() for name, tensor in call.tensors.items()}
    reference = _reference(call)
    expected: dict[str, Tensor] = {}
    outcomes: dict[int, Outcome] = {}
    for row in rows:
        report(row)
        for name, tensor in call.tensors.items():
            tensor.copy_(before[name])
        try:
            kernel = call.launch(row)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except (CompilationError, PTXASError) as error:
            outcomes[row] = Outcome(row, "compile_error", message=str(error))
            continue
        except OutOfResources as error:
            outcomes[row] = Outcome(row, "launch_error", message=first_line(error))
            continue
        errors, faults = _compared(call, reference, REFERENCE_ERROR, "the reference's")
        if not expected and not faults:
            changed = {n: t for n, t in call.tensors.items() if not t.equal(before[n])}
            expected = {n: t.clone() for n, t in changed.items() if n in (reference or changed)}
            if not expected:
                faults.append("it changes none of its tensors")
        by_first = _compared(call, expected, LARGEST_ERROR, "the first config's")
        faults += by_first[1]
        outcomes[row] = Outcome(
            row,
            "wrong_result" if faults else "ok",
            error=max(errors + by_first[0], default=float("nan")),
            message="; ".join(faults),
            **_facts(kernel),
        )
    return outcomes


def _reference(call: ExampleCall) -> Mapping[str, Tensor]:
    """Return the right contents of tensors, as far as the author gives them."""
    reference = call.expected() if call.expected else {}
    for name, tensor in reference.items():
        if name not in call.tensors:
            raise InvalidInput("reference", name, nearest(name, call.tensors))
        if tensor.shape != (shape := call.tensors[name].shape):
            raise InvalidInput("reference", tuple(tensor.shape), f"{name} of shape {tuple(shape)}")
    return reference


def _compared(
    call: ExampleCall, expected: Mapping[str, Tensor], limits: Mapping[str, float], whose: str
) -> tuple[list[float], list[str]]:
    """Return the errors of tensors, and words on those that are too large."""
    errors = {name: relative_error(call.tensors[name], right) for name, right in expected.items()}
    dtypes = {name: str(call.tensors[name].dtype).removeprefix("torch.") for name in errors}
    faults = [
        f"the error of {name} is {error:.2g}, against {whose}"
        for name, error in errors.items()
        if not error <= limits.get(dtypes[name], 0.0)
    ]
    return [*errors.values()], faults


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||; NaN at the same indices is equal."""
    both = actual.double(), expected.double()
    if not both[0].isnan().equal(both[1].isnan()):
        return float("inf")
    one, other = (t.nan_to_num() for t in both)
    norm, difference = float(other.norm()), float((one - other).norm())
    return difference / norm if norm else difference


def _facts(kernel: Any) -> dict[str, Any]:
    """Return the registers, spilled bytes (4 a spill) and shared memory of a compiled kernel; empty
    for Triton's interpreter."""
    if kernel is None:
        return {}
    spilled = 4 * int(kernel.n_spills or 0)
    facts = {"registers": int(kernel.n_regs or 0), "local_bytes": spilled}
    return {**facts, "smem_bytes": int(kernel.metadata.shared)}


def _once(call: ExampleCall, row: int) -> float:
    """Return the seconds of one launch, which has ended."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call.launch(row)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
