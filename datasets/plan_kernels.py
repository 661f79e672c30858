"""See which kernels cuDNN's plans launch, and keep what their names and launches tell.

    python datasets/plan_kernels.py [--device h200] [--data FOLDER] [--problems 3] [--jobs 12]

It needs a GPU, and cuDNN and its front end (``pip install '.[gpu]'``). Each plan that
the measurements have is launched once for a few problems under PyTorch's profiler; what its main
kernel's name, threads, registers and shared memory are becomes its line of
``confpred/cudnn/tiles.csv``. Lines of other plans stay as they are.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import random
import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

from confpred.cudnn.family import PLAN, TILE_FIELDS, TILES_FILE
from confpred.cudnn.table import read_lines
from confpred.files import write_whole
from confpred.problem.conv2d import Problem
from confpred.training.dataset import read_dataset

DATA = Path(__file__).parent / "h200"
#: Rows, columns and terms of the tile in the names of NVIDIA's generators of kernels. The first
#: is that of kernels compiled ahead, then CUTLASS's two, cuBLAS's, and those of run time.
TILES = (
    r"_tilesize(\d+)x(\d+)x(\d+)_",
    r"_tensorop_\w+?_(\d+)x(\d+)_(\d+)x\d+_",
    r"GemmShapeILi(\d+)ELi(\d+)ELi(\d+)E",
    r"nvjet_\w+?_(\d+)x(\d+)_(\d+)x\d+_",
    r"_knob_\d+_(\d+)x(\d+)x(\d+)_",
)
MARK = "CUDAFunctorOnSelf_add"  # in the name of the kernel before and after each plan's
CHUNK = 8  # problems that are profiled together

Task = tuple[str, tuple[int, ...]]
Launch = tuple[int, list[dict[str, Any]]]  # a plan, and what the profiler says of its kernels


def tile_of(name: str) -> tuple[int, ...] | None:
    """Return rows, columns and terms of the tile of a kernel by its name; None if it lacks them."""
    found = next((match for tile in TILES if (match := re.search(tile, name))), None)
    return None if found is None else tuple(map(int, found.groups()))


def facts_of(kernels: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Return the values of ``TILE_FIELDS`` of the kernels that one launch of a plan has, as a
    Chrome trace describes them: those of the longest with a tile in its name; None if there is
    none."""
    tiled = [(k["dur"], tile, k["args"]) for k in kernels if (tile := tile_of(k["name"]))]
    if not tiled:
        return None
    _, tile, given = max(tiled, key=lambda each: each[0])
    return (*tile, prod(given["block"]), given["registers per thread"], given["shared memory"])


def lines_of(launches: Sequence[Launch]) -> dict[int, dict[str, int]]:
    """Return a line of the table for each plan: the medians over its launches, which hardly ever
    differ."""
    found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for plan, kernels in launches:
        if (facts := facts_of(kernels)) is not None:
            found[plan].append(facts)
    medians = {p: map(statistics.median_low, zip(*each, strict=True)) for p, each in found.items()}
    return {plan: dict(zip(TILE_FIELDS, each, strict=True)) for plan, each in medians.items()}


def table_text(known: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the table, sorted by plan."""
    text = StringIO()
    writer = csv.DictWriter(text, (PLAN, *TILE_FIELDS), lineterminator="\n")
    writer.writeheader()
    writer.writerows({PLAN: plan, **known[plan]} for plan in sorted(known))
    return text.getvalue()


def wanted(data: Path, device: str, most: int, seed: int) -> list[Task]:
    """Return problems with the plans to launch for them: each plan is launched for `most`."""
    timings = [t for t in read_dataset([data], device).timings if t.family == "cudnn"]
    random.Random(seed).shuffle(timings)
    seen: Counter[int] = Counter()
    found = []
    for t in timings:
        rows = [row for row in t.rows.tolist() if seen[row] < most]
        seen.update(rows)
        if rows:
            found.append((str(t.problem), tuple(rows)))
    return found


def launched(tasks: Sequence[Task]) -> list[Launch]:
    """Return the kernels of each plan that can be launched."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    mark = torch.zeros(1, device="cuda")
    plans: list[int] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for text, rows in tasks:
            for row, launch in _launches(Problem.parse(text), rows):
                plans.append(row)
                mark.add_(1)
                launch()
                mark.add_(1)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    parts: list[list[dict[str, Any]]] = []
    kernels = (event for event in events if event.get("cat") == "kernel")
    for event in sorted(kernels, key=lambda e: float(e["ts"])):
        if MARK in event["name"]:
            parts.append([])
        elif parts:
            parts[-1].append(event)
    return list(zip(plans, parts[::2], strict=True))  # between them, plans are loaded


def _launches(problem: Problem, rows: Sequence[int]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Return a launch of each plan that can be built, after one launch of it."""
    import torch

    from confpred.cudnn.family import FAMILY
    from confpred.cudnn.plans import Plans
    from confpred.errors import LaunchError
    from confpred.measure.kernels import MAX_WORKSPACE_BYTES
    from confpred.problem.conv2d import CONVOLUTION
    from confpred.problem.operation import SCRATCH

    plans = Plans(problem, 0)
    allocate = partial(torch.zeros, dtype=torch.uint8, device="cuda")
    tensors = {o.name: allocate(o.bytes) for o in CONVOLUTION.operands(problem)}
    stream = torch.cuda.current_stream().cuda_stream
    for row in rows:
        plan = FAMILY.launch(problem, row).plan
        try:
            built = plans.build(plan)  # type: ignore[arg-type]  # each has one
            if built.workspace_bytes > MAX_WORKSPACE_BYTES:
                continue
            scratch = allocate(max(built.workspace_bytes, 1))
            addresses = [t.data_ptr() for t in (*tensors.values(), scratch)]
            launch = partial(built.bind([*tensors, SCRATCH]), stream, addresses)
            launch()
            torch.cuda.synchronize()
        except LaunchError:
            continue
        yield row, launch
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="measurements that have the plans")
    parser.add_argument("--device", default="h200", help="of the measurements")
    parser.add_argument("--problems", type=int, default=3, help="of each plan")
    parser.add_argument("--jobs", type=int, default=12, help="processes at once")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tasks = wanted(arguments.data, arguments.device, arguments.problems, arguments.seed)
    chunks = [tasks[i : i + CHUNK] for i in range(0, len(tasks), CHUNK)]
    launches: list[Launch] = []
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(launched, chunk) for chunk in chunks]):
            launches += future.result()
    lines = read_lines(TILES_FILE) if TILES_FILE.exists() else []
    known: dict[int, Mapping[str, Any]] = {int(line.pop(PLAN)): line for line in lines}
    new = lines_of(launches)
    text = table_text(known | new)
    write_whole(TILES_FILE, lambda file: file.write(text.encode()))
    print(
        f"{len(launches)} launches; {len(new)} plans say how they tile, {TILES_FILE.name} has all"
    )


if __name__ == "__main__":
    main()
