"""Compiles every kernel of every family for every target: ``make kernels``.

The layers are those of `layers.representative`, which meet every group width, window, stride,
dilation, dtype and epilogue that a family has kernels for; of each, all legal configs.

That takes CPU-hours; ``--each 2`` compiles every config for two random ones of these layers, which
takes some tens of minutes. With ``--out`` each result becomes a line of a file as soon as it is
there, and a second run leaves out what the file has of the same sources and compiler.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from layers import CONVOLUTIONS, H100, representative
from ptxas import ARCHS, resources
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from confpred.cuda.compiler import nvrtc_version
from confpred.families.kernel_text import source_digest
from confpred.families.protocol import Family
from confpred.problem.operation import KernelSpec

SHOWN = 5  # failures


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compilation: everything that changes its result.

    Attributes:
        family: the family that launches it.
        spec: file, entry and macros.
        digest: digest of the file as it is today.
        arch: the target.
        nvrtc: the compiler's version.
    """

    family: str
    spec: KernelSpec
    digest: str
    arch: str
    nvrtc: str


@dataclass(frozen=True, slots=True)
class Result:
    """Registers and stack of a thread of `kernel`, or the compiler's `error`."""

    kernel: Kernel
    registers: int = 0
    stack_bytes: int = 0
    error: str = ""


def kernels_of(family: Family) -> tuple[list[KernelSpec], int]:
    """Return the distinct kernels of `family`, and how many of its configs need one of them."""
    kernels: dict[KernelSpec, None] = {}
    met: set[int] = set()
    for problem in representative(family):
        for row in np.flatnonzero(family.legal(problem, H100)).tolist():
            met.add(row)
            kernels.update((step.kernel, None) for step in family.launch(problem, row).steps)
    return list(kernels), len(met)


def of_each_config(family: Family, kernels: Sequence[KernelSpec], count: int) -> list[KernelSpec]:
    """Return a random choice of `count` kernels, or fewer, for each config: of those that differ
    only in what the layer asks for."""
    fields = {name.upper() for name in family.configs.dtype.names or ()}
    of_config: dict[tuple[object, ...], list[KernelSpec]] = {}
    for kernel in random.Random(0).sample(kernels, len(kernels)):
        config = (kernel.file, *(define for define in kernel.defines if define[0] in fields))
        of_config.setdefault(config, []).append(kernel)
    return [kernel for same in of_config.values() for kernel in same[:count]]


def compile_one(kernel: Kernel) -> Result:
    try:
        return Result(kernel, *resources(kernel.spec, kernel.arch))
    except Exception as error:  # whatever the compiler raises is a result here
        return Result(kernel, error=str(error))


def results(kernels: Sequence[Kernel], processes: int) -> Iterator[Result]:
    """Compile `kernels` in parallel: NVRTC scales with processes, not with threads."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        jobs = [pool.submit(compile_one, kernel) for kernel in kernels]
        with Progress(
            *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()
        ) as bar:
            for job in bar.track(as_completed(jobs), total=len(jobs), description="kernels"):
                yield job.result()
    finally:
        pool.shutdown(cancel_futures=True)  # for a run that is interrupted


def read_results(path: Path) -> dict[Kernel, Result]:
    """Return the results in a file, if there is one, the last one of each kernel. Kernels that did
    not compile are left out, to be tried again, and so is a line that a kill cut short."""
    found = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            spec = fields["kernel"].pop("spec")
            defines = tuple((name, value) for name, value in spec.pop("defines"))
            kernel = Kernel(spec=KernelSpec(**spec, defines=defines), **fields.pop("kernel"))
            found[kernel] = Result(kernel, **fields)
    return {kernel: result for kernel, result in found.items() if not result.error}


def report(found: Sequence[Result], console: Console) -> int:
    """Print what became of the kernels, with the stacks that spilled registers go to; returns how
    many do not compile."""
    table = Table("family", "target", "kernels", "most registers", "with a stack", "most bytes")
    for family, arch in dict.fromkeys((r.kernel.family, r.kernel.arch) for r in found):
        here = [r for r in found if (r.kernel.family, r.kernel.arch) == (family, arch)]
        good = [r for r in here if not r.error]
        stacks = [r.stack_bytes for r in good if r.stack_bytes]
        registers = max((r.registers for r in good), default=0)
        cells = (len(good), registers, len(stacks), max(stacks, default=0))
        table.add_row(family, arch, *map(str, cells))
    console.print(table)
    failed = [r for r in found if r.error]
    for result in failed[:SHOWN]:
        kernel = result.kernel
        console.print(f"{kernel.spec} for {kernel.arch}:\n{result.error}", style="red")
    console.print(f"{len(found) - len(failed)} kernels compiled, {len(failed)} did not")
    return len(failed)


def main(words: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(CONVOLUTIONS))
    parser.add_argument("--arch", action="append", help=f"instead of {', '.join(ARCHS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--each", type=int, help="so many kernels a config, instead of all")
    parser.add_argument("--sample", type=int, help="a random choice of so many kernels a family")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="keep results here")
    options = parser.parse_args(words)
    console = Console()
    wanted: list[Kernel] = []
    for name in options.family or CONVOLUTIONS:
        family = CONVOLUTIONS[name]
        sources, met = kernels_of(family)
        console.print(f"{name}: {len(sources)} kernels; {met} of {len(family.configs)} configs")
        if options.each:
            sources = of_each_config(family, sources, options.each)
        if options.sample:
            sources = random.Random(0).sample(sources, min(options.sample, len(sources)))
        wanted += [
            Kernel(name, spec, source_digest(spec.file), arch, nvrtc_version())
            for spec in sources
            for arch in options.arch or ARCHS
        ]
    known = read_results(options.out)
    found = {kernel: known[kernel] for kernel in wanted if kernel in known}
    left = [kernel for kernel in wanted if kernel not in found]
    console.print(f"{len(left)} of {len(wanted)} results are not in {options.out} yet")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.write("\n")  # ends a line that a kill cut short
        for result in results(left, options.jobs):
            found[result.kernel] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
    return 1 if report(list(found.values()), console) else 0


if __name__ == "__main__":
    sys.exit(main())
