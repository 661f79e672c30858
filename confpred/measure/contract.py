"""Checks of a kernel family against its protocol: each member's shape, dtype and values, launches
against the kernels' parameters, and a small run (``confpred check-family``)."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from confpred.cuda.compiler import nvrtc_version, ptx_of
from confpred.errors import CompileError, ConfpredError, InvalidInput, MissingExtra
from confpred.families.kernel_text import file_text
from confpred.families.protocol import Batched, Bounded, CompiledFamily, Family, LibraryFamily
from confpred.families.table import Shaped, Tabled
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec, Launch, Operation, Step
from confpred.problem.record import Record
from confpred.triton.triton_family import TritonFamily

_MEMBERS = (
    "name", "operation", "configs", "feature_names", "legal", "estimate_s", "features", "launch",
)  # fmt: skip
#: Classes whose members a family has or may have.
_BASES = (Shaped, Tabled, Family, Batched, Bounded, CompiledFamily, LibraryFamily)
_SIZES = (1, 2, 3, 4, 8, 12, 16, 32, 64, 128, 256)
_TRIES = 400  # random problems, until enough of them have a legal config
_PROBLEMS, _LAUNCHES, _KERNELS = 8, 4, 12  # problems; launches of one; kernels that are compiled
_MOST_THREADS = 1024
#: Most multiply-adds of a problem that is made up: a GPU's reference kernel is slow.
_MOST_FLOPS = 2e8


@dataclass(frozen=True, slots=True)
class ContractReport:
    """The result of a check.

    Attributes:
        breaches: sentences that begin with the member that breaks the protocol; empty if none does.
        problems, launches, kernels, runs: how many problems had a legal config, and how many
            launches were laid out, kernels compiled, and configs run.
        skipped: sentences on checks that this machine has no software or GPU for.
    """

    breaches: tuple[str, ...]
    problems: int = 0
    launches: int = 0
    kernels: int = 0
    runs: int = 0
    skipped: tuple[str, ...] = ()


def check_family(
    family: Any, device: Device, problems: Sequence[Record] = (), ordinal: int | None = None
) -> ContractReport:
    """Check `family` on `device`.

    Args:
        family: an object that should be a `confpred.families.protocol.Family`.
        device: for legality and features, and the target of compilation.
        problems: of the family's operation; by default random ones, the same at each call.
        ordinal: number of the GPU that runs some configs; None for no run.
    """
    breaches = list(_check_members(family))
    if breaches:
        return ContractReport(tuple(breaches))
    examples = list(problems) or _random_problems(family.operation.problem)
    steps: dict[KernelSpec, tuple[Step, Record]] = {}
    grids: dict[KernelSpec, tuple[int, ...]] = {}  # the largest of all launches, by direction
    tried: list[tuple[Record, list[int]]] = []
    launches = 0
    for problem in examples:
        said, rows = _check_formulas(family, device, problem)
        breaches += said
        if not said and len(rows):
            some = random.Random(str(problem)).sample(rows.tolist(), min(_LAUNCHES, len(rows)))
            tried.append((problem, some))
            for row in some:
                launch, said = _check_launch(family, problem, row)
                breaches += said
                launches += 1
                for step in launch.steps if launch and not said else ():
                    steps.setdefault(step.kernel, (step, problem))
                    largest = grids.get(step.kernel, step.grid)
                    grids[step.kernel] = tuple(map(max, largest, step.grid))
        if breaches or len(tried) >= _PROBLEMS:
            break
    if not tried and not breaches:
        breaches.append(
            f"legal: no config is legal for any of {len(examples)} problems on {device.key}; name "
            "a problem that has one with --layer"
        )
    if breaches:
        return ContractReport(tuple(dict.fromkeys(breaches)), len(tried), launches)
    kernels, runs, skipped = 0, 0, list[str]()
    try:
        nvrtc_version()
        for step, problem in list(steps.values())[:_KERNELS]:
            kernels += 1
            breaches = _check_kernel(step, problem, device, grids[step.kernel])
            if breaches:
                break
    except MissingExtra as error:
        skipped.append(f"no kernel was compiled: {error}")
    if ordinal is None:
        skipped.append("no config was run: this machine has no such GPU")
    elif isinstance(family, TritonFamily):
        skipped.append("no config was run: confpred sample runs a Triton kernel's")
    elif not breaches:
        from confpred.measure.kernels import check

        for problem, some in tried:
            runs += len(some)
            for outcome in check(problem, family, some, ordinal=ordinal):
                if outcome.status != "ok":
                    breaches.append(
                        f"launch: config {outcome.config_id} of {problem} gives "
                        f"{outcome.status!r} on the GPU: {outcome.message or outcome.error}"
                    )
    return ContractReport(tuple(breaches), len(tried), launches, kernels, runs, tuple(skipped))


def _check_members(family: Any) -> Iterator[str]:
    """Yield the breaches of members that depend on no problem."""
    if lacking := [name for name in _MEMBERS if not hasattr(family, name)]:
        yield from (f"{name}: is missing; a family has {', '.join(_MEMBERS)}" for name in lacking)
        return
    if not isinstance(family.name, str) or not re.fullmatch(r"\w+", family.name):
        yield f"name: is {family.name!r}, not a word such as 'softmax'"
    if not isinstance(family.operation, Operation):
        yield "operation: is no confpred.problem.operation.Operation"
    configs = family.configs
    if not isinstance(configs, np.ndarray) or configs.ndim != 1 or not configs.dtype.names:
        yield "configs: is no structured NumPy array of one dimension (see config_table)"
    elif not len(configs):
        yield "configs: has no row"
    else:
        for name in configs.dtype.names:
            if configs[name].dtype.kind != "i" or configs[name].ndim != 1:
                yield f"configs: the field {name!r} is {configs.dtype[name]}, not one integer a row"
        if len(np.unique(configs)) < len(configs):
            yield "configs: some rows are equal, and a config has one row"
    yield from _find_misspelt(type(family))
    names = family.feature_names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        yield f"feature_names: is {type(names).__name__}, not a tuple of texts"
    elif again := sorted({name for name in names if names.count(name) > 1}):
        yield f"feature_names: has {', '.join(again)} more than once"


def _find_misspelt(kind: type) -> Iterator[str]:
    """Yield the members of a family's own classes that look like inherited ones."""
    classes = [c for c in kind.__mro__ if c not in (Shaped, Tabled, object)]
    own = {name for c in classes for name in vars(c) if not name.startswith("__")}
    members = {n for base in _BASES for n in dir(base) if not n.startswith(("__", "_abc", "_is_"))}
    for name in sorted(own - members):
        if near := difflib.get_close_matches(name, members - own, 1, 0.8):
            yield f"{name}: is no member of a family, and {near[0]} is not overridden: misspelt?"


def _check_formulas(family: Family, device: Device, problem: Record) -> tuple[list[str], Any]:
    """Return the breaches of the vectorised members on one problem, and the legal rows."""
    none, count, where = np.arange(0), len(family.configs), f"for {problem} on {device.key}"
    said, legal = _call_for_array(family, "legal", (count,), np.bool_, problem, device)
    if said:
        return [f"{said} ({where}; configs has {count} rows)"], none
    if not np.array_equal(legal, family.legal(problem, device)):
        return [f"legal: gives another answer when it is asked again ({where})"], none
    rows, breaches = np.flatnonzero(legal), []
    if not len(rows):
        return [], rows
    for name, shape, dtype in (
        ("estimate_s", (len(rows),), np.float64),
        ("features", (len(rows), len(family.feature_names)), np.float32),
    ):
        said, array = _call_for_array(family, name, shape, dtype, problem, device, rows)
        if not said and not np.isfinite(array).all():
            said = f"{name}: has a value that is no finite number"
        if not said and name == "estimate_s" and not (array > 0).all():
            said = "estimate_s: has a value that is not above 0 seconds"
        if said:
            breaches.append(f"{said} ({where}, {len(rows)} rows)")
    return breaches, rows


def _check_launch(family: Family, problem: Record, row: int) -> tuple[Launch | None, list[str]]:
    """Return the launch of one config, and its breaches."""
    launch, where = _call_member(family, "launch", problem, row), f"(config {row} of {problem})"
    if isinstance(launch, str):
        return None, [f"{launch} {where}"]
    if not isinstance(launch, Launch):
        return None, [f"launch: returns {type(launch).__name__}, not a Launch {where}"]
    breaches = []
    for step in launch.steps:
        entry = f"launch: of {step.kernel.entry},"
        for kind, size in (("grid", step.grid), ("block", step.block)):
            if len(size) != 3 or not all(isinstance(n, int) and 0 < n < 2**31 for n in size):
                breaches.append(f"{entry} {kind} is {size!r}, not three integers above 0")
        threads = np.prod(step.block)
        if not breaches and threads > _MOST_THREADS:
            breaches.append(f"{entry} block has {threads} threads, over {_MOST_THREADS}")
        for name, value in step.scalars.items():
            if not isinstance(value, int) or not -(2**31) <= value < 2**31:
                breaches.append(f"{entry} scalar {name} is {value!r}, not an integer of 32 bits")
    outputs = [o.name for o in family.operation.operands(problem) if o.terms]
    taken = {name for step in launch.steps for name in step.operands}
    if launch.steps and not launch.program and not taken.intersection(outputs):
        breaches.append(f"launch: no kernel takes the output {' or '.join(outputs)}")
    return launch, [f"{said} {where}" for said in breaches]


def _check_kernel(step: Step, problem: Record, device: Device, grid: Sequence[int]) -> list[str]:
    """Return the breaches between a step and its kernel as NVRTC compiles it; `grid` has the most
    blocks of its launches in each direction."""
    spec = step.kernel
    try:
        text = ptx_of(spec, device.arch)
    except (FileNotFoundError, CompileError) as error:
        return [f"launch: {error} (for {problem})"]
    signature = re.search(rf"\.entry\s+{re.escape(spec.entry)}\s*\(([^)]*)\)", text)
    if signature is None:
        return [f'launch: {spec.file} has no extern "C" kernel called {spec.entry}']
    kernel = re.findall(r"\.param\s+\.(?:align \d+ \.)?[a-z](\d+)", signature[1])
    wanted = [("64", f"pointer {n}") for n in step.operands]
    wanted += [("32", f"int {n}") for n in step.scalars]
    where = f"the kernel {spec.entry} of {spec.file}"
    for number, (bits, (expected, name)) in enumerate(zip(kernel, wanted, strict=False)):
        if bits != expected:
            passed = f"and the launch passes {name}, of {expected}"
            return [f"launch: parameter {number} of {where} has {bits} bits, {passed}"]
    if len(kernel) != len(wanted):
        return [f"launch: {where} has {len(kernel)} parameters, and the launch {len(wanted)}"]
    for axis, blocks in zip("xyz", grid, strict=True):
        if blocks > 1 and f"%ctaid.{axis}" not in text:
            return [
                f"launch: grid has {blocks} blocks in {axis}, and {where} reads no blockIdx.{axis}"
            ]
    source = re.search(rf"\b{re.escape(spec.entry)}\s*\(([^)]*)\)", file_text(spec.file))
    pointers = re.findall(r"\*\s*(?:__restrict__\s+)?(\w+)", source[1]) if source else []
    taken = [pointers.index(name) for name in step.operands if name in pointers]
    if taken != sorted(taken):
        names = ", ".join(pointers[place] for place in sorted(taken))
        return [f"launch: operands are {', '.join(step.operands)}, and {where} takes {names}"]
    return []


def _call_member(family: Family, name: str, *arguments: Any) -> Any:
    """Return the answer of a member, or the breach that it raised an error."""
    try:
        return getattr(family, name)(*arguments)
    except ConfpredError:
        raise
    except Exception as error:
        return f"{name}: raises {type(error).__name__}: {error}"


def _call_for_array(
    family: Family, name: str, shape: tuple[int, ...], dtype: Any, *arguments: Any
) -> tuple[str, Any]:
    """Return the breach of a member that should answer with an array, and that array."""
    answer, said = _call_member(family, name, *arguments), ""
    if isinstance(answer, str):
        said = answer
    elif not isinstance(answer, np.ndarray):
        said = f"{name}: returns {type(answer).__name__}, not a NumPy array"
    elif answer.shape != shape:
        said = f"{name}: returns an array of shape {answer.shape}, not {shape}"
    elif answer.dtype != dtype:
        said = f"{name}: returns {answer.dtype}, not {np.dtype(dtype)}"
    return said, answer


def _random_problems(kind: type[Record]) -> list[Record]:
    """Return small random problems of a class, the same at each call."""
    rng, problems = random.Random(kind.__name__), list[Record]()
    for _ in range(_TRIES):
        values: dict[str, Any] = {}
        for field in fields(kind):
            if field.name in kind.LIMITS:
                low, high = kind.LIMITS[field.name]
                plain = field.default is not MISSING and rng.random() < 0.5
                drawn = rng.choice([size for size in _SIZES if low <= size <= high] or [low])
                values[field.name] = field.default if plain else drawn
            elif field.name in kind.CHOICES:
                values[field.name] = rng.choice(kind.CHOICES[field.name])
            else:
                values[field.name] = rng.random() < 0.3
        if kind is ConvNd:  # depthwise lines and volumes have kernels, the others libraries' plans
            rank, c, s = rng.choice((1, 3)), rng.choice((8, 32, 96)), rng.choice((3, 5))
            sizes = {"d": 4, "h": 7, "t": 3, "r": s} if rank == 3 else dict.fromkeys("dhtr", 1)
            values |= {
                "rank": rank,
                "c": c,
                "k": c,
                "groups": rng.choice((1, c, c)),
                "w": 14,
                "s": s,
            }
            values |= {"padding": s // 2, "stride": 1, "dilation": 1, "cut": 0, **sizes}
        if kind is Problem:
            c, r = rng.choice((8, 48, 64, 96, 128)), rng.choice((1, 3, 3, 5, 17))
            groups = rng.choice((1, c // 8, c, c)) if c % 48 or rng.random() < 0.5 else c // 12
            values |= {"c": c, "k": c * rng.choice((1, 1, 2)), "groups": groups, "r": r, "s": r}
            values |= {"padding": r // 2, "stride": rng.choice((1, 1, 2)), "dilation": 1}
            values |= {"n": rng.choice((1, 2, 4)), "h": rng.choice((7, 14)), "w": 14}
        if kind in (ConvNd, Problem):
            if values["direction"] != "fprop":
                values |= {"activation": "none", "residual": False, "bias": False}
            values["deterministic"] = False
        try:
            problem = kind(**values)
        except InvalidInput:
            continue
        if problem.flops <= _MOST_FLOPS:
            problems.append(problem)
    return problems
