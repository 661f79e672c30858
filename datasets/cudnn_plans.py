"""Extend the list of cuDNN's plans by what cuDNN offers for the problems of the suites.

    python datasets/cudnn_plans.py [--device h200] [--jobs 8] [--layers 80] [SUITE ...]

It needs cuDNN and its Python front end (``pip install '.[gpu]'``) and no GPU, though the
engines that are compiled at run time are offered only where a driver is installed. Lines are only
added to ``confpred/cudnn/plans.csv`` and ``plans_nd.csv``, or known ones get further kinds of
problems.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import product, repeat
from pathlib import Path
from typing import Any

from confpred.cudnn.plans import Graph, front_end, release
from confpred.cudnn.table import (
    COLUMNS,
    ENGINE,
    FILE,
    FILE_ND,
    KINDS,
    KNOBS,
    NOTES,
    RELEASE,
    config_of,
    kind_of,
    read_lines,
)
from confpred.data.suites import read_suite
from confpred.errors import LaunchError
from confpred.files import write_whole
from confpred.problem.conv import LAYOUTS, ConvNd
from confpred.problem.conv2d import DIRECTIONS, DTYPES, Problem
from confpred.problem.device import KNOWN, Device, get_device

SUITES = Path(__file__).parent / "suites"
#: Where the plans of each kind of problem are.
FILES: Mapping[type, Path] = {Problem: FILE, ConvNd: FILE_ND}
#: Epilogues that engines which are compiled ahead may have.
EPILOGUES: Sequence[dict[str, Any]] = (
    {"bias": True},
    {"bias": True, "activation": "relu"},
    {"bias": True, "residual": True},
    {"bias": True, "residual": True, "activation": "relu"},
)
#: Layers of any rank that the networks of the suites lack: dilated and grouped ones.
LACKING = [
    ConvNd(4, 128, w, 128, 3, padding=spread, groups=groups, stride=step, dilation=spread, **axes)
    for w, axes in ((2048, {"rank": 1}), (28, {"d": 16, "h": 28, "t": 3, "r": 3}))
    for groups, step, spread in ((1, 1, 2), (1, 2, 2), (4, 1, 1), (4, 2, 1), (4, 1, 2), (32, 1, 1))
]
Key = tuple[str, ...]


def key_of(line: dict[str, str]) -> Key:
    """Return the key that tells plans apart."""
    return tuple(line[name] for name in (RELEASE, ENGINE, *KNOBS))


def lines_of(problem: Problem | ConvNd, device: Device) -> list[dict[str, str]]:
    """Return a line for each plan that is offered for `problem`."""
    try:
        notes = notes_of(problem, device)
    except LaunchError:
        return []
    found = []
    for name, flags in notes.items():
        config = {RELEASE: release(), **(config_of(name) or {})}
        told = dict(zip(NOTES, map(int, flags), strict=True))
        known = {**config, **told, KINDS: kind_of(problem)}
        found.append(dict.fromkeys(COLUMNS, "") | {name: str(v) for name, v in known.items()})
    return found


def notes_of(problem: Problem | ConvNd, device: Device) -> dict[str, tuple[bool, bool]]:
    """Return of each plan that is offered for `problem`, by name, whether it computes on tensor
    cores, and whether it gives the same bits each time."""
    notes = front_end().numerical_note
    every = Graph.without_gpu(problem, device)
    plain = _left(problem, device, notes.TENSOR_CORE)
    repeatable = _left(problem, device, notes.NONDETERMINISTIC)
    return {name: (name not in plain, name in repeatable) for name in every.places()}


def _left(problem: Problem | ConvNd, device: Device, note: object) -> set[str]:
    """Return the plans without this numeric `note`."""
    graph = Graph.without_gpu(problem, device)
    graph.graph.deselect_numeric_notes([note])
    left = set()
    for name, index in graph.places().items():
        # One that is deselected is refused.
        with suppress(RuntimeError, front_end().cudnnGraphNotSupportedError):
            graph.graph.build_plan_at_index(index)
            left.add(name)
    return left


def each_of(
    problems: Sequence[Problem | ConvNd], device: Device, jobs: int
) -> Iterator[list[dict[str, str]]]:
    """Yield the lines of each problem, in order."""
    if jobs == 1:
        yield from (lines_of(problem, device) for problem in problems)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(lines_of, problems, repeat(device), chunksize=8)


def variants(problem: ConvNd) -> Iterator[ConvNd]:
    """Yield the layer in each dtype, layout and direction, and with each of `EPILOGUES`."""
    for dtype, layout, direction in product(DTYPES, LAYOUTS, DIRECTIONS):
        plain = replace(problem.layer(), n=problem.n, cut=0)
        plain = replace(plain, dtype=dtype, layout=layout, direction=direction)
        yield plain
        if direction == "fprop":
            yield from (replace(plain, **epilogue) for epilogue in EPILOGUES)


def extended(
    lines: list[dict[str, str]],
    problems: Sequence[Problem | ConvNd],
    device: Device,
    jobs: int = 1,
) -> int:
    """Add to `lines` what is offered for `problems`, which `jobs` processes ask for; return for how
    many nothing is."""
    known = {key_of(line): line for line in lines}
    without = 0
    for offered in each_of(problems, device, jobs):
        without += not offered
        for line in offered:
            old = known.setdefault(key_of(line), line)
            if old is line:
                lines.append(line)
                continue
            kinds = {*old[KINDS].split("|"), *line[KINDS].split("|")}
            old[KINDS] = "|".join(sorted(kinds))
            # A numeric `note` is of the engine; where cuDNN is of two minds the worse one counts.
            old[NOTES[0]] = max(old[NOTES[0]], line[NOTES[0]])
            old[NOTES[1]] = min(old[NOTES[1]], line[NOTES[1]])
    return without


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", type=Path, metavar="SUITE")
    parser.add_argument("--device", choices=list(KNOWN), default="h200")
    parser.add_argument(
        "--layers",
        type=int,
        default=0,
        help="how many layers of any rank of a suite are also asked for in all dtypes, layouts, "
        "directions and epilogues (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    arguments = parser.parse_args()
    device = get_device(arguments.device)
    asked: dict[type, dict[str, list[Problem | ConvNd]]] = {kind: {} for kind in FILES}
    for path in arguments.suites or sorted(SUITES.rglob("*.json")):
        for entry in read_suite(path).entries:
            if isinstance(entry.problem, Problem | ConvNd):
                asked[type(entry.problem)].setdefault(str(path), []).append(entry.problem)
    if arguments.layers:
        asked[ConvNd]["layers that suites lack"] = [*LACKING]
    for kind, file in FILES.items():
        lines = read_lines(file)
        before = len(lines)
        for path, problems in asked[kind].items():
            apart = -(-len(problems) // arguments.layers) if arguments.layers else len(problems) + 1
            for problem in problems[apart - 1 :: apart]:
                problems += variants(problem) if isinstance(problem, ConvNd) else ()
            without = extended(lines, problems, device, arguments.jobs)
            print(f"{path}: {len(problems)} problems, {without} without a plan; {len(lines)} plans")
        text = StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        write_whole(file, lambda to, text=text: to.write(text.getvalue().encode("ascii")))
        print(f"{file.name}: {len(lines) - before} new plans of {len(lines)}")


if __name__ == "__main__":
    main()
