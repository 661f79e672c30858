"""Compiles every kernel of every family for every target: ``make kernels``.

The layers are those of `layers.representative`, which meet every group width, window, stride,
dilation, dtype and epilogue that a family has kernels for; of each, all legal configs.
"""

from __future__ import annotations

import os
import random
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from layers import H100, representative
from ptxas import ARCHS, resources
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from confpred.families import Family, KernelSource, all_families

SHOWN = 5  # failures


@dataclass(frozen=True, slots=True)
class Result:
    """Of one kernel and target: registers and stack of a thread, or the compiler's `error`."""

    family: str
    source: KernelSource
    arch: str
    registers: int = 0
    stack_bytes: int = 0
    error: str = ""


def kernels_of(family: Family) -> tuple[list[KernelSource], int]:
    """The distinct kernels of `family`, and how many of its configs need one of them."""
    kernels: dict[KernelSource, None] = {}
    met: set[int] = set()
    for problem in representative(family):
        for row in np.flatnonzero(family.legal(problem, H100)).tolist():
            met.add(row)
            kernels.update((step.source, None) for step in family.launch(problem, row).steps)
    return list(kernels), len(met)


def compile_one(family: str, source: KernelSource, arch: str) -> Result:
    try:
        return Result(family, source, arch, *resources(source, arch))
    except Exception as error:  # whatever the compiler raises is a result here
        return Result(family, source, arch, error=str(error))


def results(work: list[tuple[str, KernelSource, str]], processes: int) -> Iterator[Result]:
    """`work` in parallel: NVRTC scales with processes, not with threads."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, *one) for one in work]
        with Progress(
            *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()
        ) as bar:
            for job in bar.track(as_completed(jobs), total=len(jobs), description="kernels"):
                yield job.result()


def report(found: list[Result], console: Console) -> int:
    """Print what became of the kernels, with the stacks that spilled registers go to; returns how
    many do not compile."""
    table = Table("family", "target", "kernels", "most registers", "with a stack", "most bytes")
    for family, arch in dict.fromkeys((r.family, r.arch) for r in found):
        good = [r for r in found if (r.family, r.arch) == (family, arch) and not r.error]
        stacks = [r.stack_bytes for r in good if r.stack_bytes]
        registers = max((r.registers for r in good), default=0)
        cells = (len(good), registers, len(stacks), max(stacks, default=0))
        table.add_row(family, arch, *map(str, cells))
    console.print(table)
    failed = [r for r in found if r.error]
    for result in failed[:SHOWN]:
        console.print(f"{result.source} for {result.arch}:\n{result.error}", style="red")
    console.print(f"{len(found) - len(failed)} kernels compiled, {len(failed)} did not")
    return len(failed)


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(all_families()))
    parser.add_argument("--arch", action="append", help=f"instead of {', '.join(ARCHS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample", type=int, help="a random choice of so many kernels a family")
    options = parser.parse_args()
    console = Console()
    work = []
    for name in options.family or all_families():
        family = all_families()[name]
        kernels, met = kernels_of(family)
        console.print(f"{name}: {len(kernels)} kernels; {met} of {len(family.configs)} configs")
        if options.sample:
            kernels = random.Random(0).sample(kernels, min(options.sample, len(kernels)))
        work += [(name, kernel, arch) for kernel in kernels for arch in options.arch or ARCHS]
    return 1 if report(list(results(work, options.jobs)), console) else 0


if __name__ == "__main__":
    sys.exit(main())
