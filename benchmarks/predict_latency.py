"""How long an answer takes on one CPU core: unseen problem, repeated problem, cold process.

    python benchmarks/predict_latency.py [--model FOLDER] [--device h200] [--out FOLDER]

Unseen problems are layers of random sizes, depthwise and grouped, in each direction; for each of
them, legality, features and trees have to be worked out. The process pins itself to one core. The
cold figure is the wall time of the installed ``confpred predict`` command from start to exit, with
its files in the page cache.

It also counts how often the cascade (the first trees pick finalists, the whole ensemble orders
them) ends at another config than the whole ensemble over all candidates would.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from provenance import RESULTS, provenance, write

from confpred.model.folder import Model
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import ACTIVATIONS, DIRECTIONS, Problem
from confpred.problem.device import Device

KINDS = [f"{kind}, {direction}" for kind in ("depthwise", "grouped") for direction in DIRECTIONS]
PROBLEMS, REPEATS, COLD_RUNS = 100, 20, 20
BUDGETS = {"unseen_p50_ms": 2.0, "repeated_p50_us": 10.0, "cold_p50_s": 0.4}


def random_problems(kind: str, seed: int) -> Iterator[Problem]:
    """Layers of the sizes that networks have."""
    rng = random.Random(f"{kind} {seed}")
    operation, _, direction = kind.partition(", ")
    while True:
        width = 1 if operation == "depthwise" else rng.choice((8, 16, 32, 64))
        step = max(width, 8)
        c = step * rng.randint(2, 1024 // step)
        size, r = rng.randint(7, 64), rng.choice((3, 3, 3, 5, 7) if width == 1 else (3, 3, 3, 5))
        forward = direction == "fprop"
        yield Problem(
            n=rng.randint(1, 256),
            c=c,
            h=size,
            w=size,
            k=c,
            r=r,
            s=r,
            stride=rng.choice((1, 1, 2)),
            padding=r // 2,
            groups=c // width,
            dtype=rng.choice(("float16", "bfloat16")),
            direction=direction,
            activation=rng.choice(ACTIVATIONS) if forward else "none",
        )


def unseen(model: Model, kind: str) -> list[Problem]:
    """Problems that are not in the data and have candidates."""
    drawn = (
        problem
        for problem in random_problems(kind, seed=0)
        if str(problem) not in model.measured and candidates(model, problem)
    )
    return list(dict.fromkeys(islice(drawn, PROBLEMS)))


def candidates(model: Model, problem: Problem) -> list[tuple[str, int]]:
    return [
        (name, int(row))
        for name, learned in model.families.items()
        for row in learned.candidates(problem, model.device)
    ]


def seconds(call: Callable[[Problem], object], problems: Sequence[Problem]) -> list[float]:
    times = []
    for problem in problems:
        start = time.perf_counter()
        call(problem)
        times.append(time.perf_counter() - start)
    return times


def quantiles(times: Sequence[float], scale: float, unit: str) -> dict[str, float]:
    return {
        f"{q}_{unit}": float(np.quantile(times, p)) * scale
        for q, p in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def first_answers(predictor: Predictor, model: Model, kind: str) -> dict[str, float]:
    """Seconds that first answers take once the trees are parsed."""
    problems = unseen(model, kind)
    predictor.choose(next(random_problems(kind, seed=1)), model.device)
    times = seconds(lambda p: predictor.choose(p, model.device), problems)
    counts = [len(candidates(model, p)) for p in problems]
    return {"candidates": float(np.mean(counts)), **quantiles(times, 1e3, "ms")}


def cascade_exceptions(model: Model, device: Device, problems: Sequence[Problem]) -> dict[str, Any]:
    """Share of problems where the cascade misses the ensemble's own best, and what that costs."""
    cost = []
    for problem in problems:
        for learned in model.families.values():
            rows = learned.candidates(problem, device)
            if not len(rows):
                continue
            whole = learned.order.predict(learned.features(problem, device, rows))
            chosen = learned.rank(problem, device, rows)[0][0]
            cost.append(float(np.exp(whole[rows == chosen][0] - whole.min())))
    return {"share": float(np.mean(np.array(cost) > 1)), "worst_predicted_regret": max(cost)}


def cold(model: Path | None, problem: Problem, device: str) -> list[float]:
    command = [str(Path(sys.executable).with_name("confpred")), "predict", "--device", device]
    command += ["--layer", str(problem), *(["--model", str(model)] if model else [])]
    times = []
    for _ in range(COLD_RUNS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="model folder; default: the newest that ships")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    predictor = Predictor.load(arguments.model)
    model = predictor.models[arguments.device]
    problems = {kind: unseen(model, kind) for kind in KINDS}
    every = [problem for of_kind in problems.values() for problem in of_kind]
    result = {
        "model": model.version,
        "problems": len(every),
        "unseen": {kind: first_answers(predictor, model, kind) for kind in KINDS},
        "repeated": quantiles(
            seconds(lambda p: predictor.choose(p, arguments.device), every * REPEATS), 1e6, "us"
        ),
        "cold": quantiles(cold(arguments.model, every[0], arguments.device), 1.0, "s"),
        "cascade_exceptions": cascade_exceptions(model, model.device, every),
        "budgets": BUDGETS,
        **provenance("numpy", "lightgbm", "click", gpu=False),
    }
    print(json.dumps(result, indent=1))
    print(f"written to {write('predict_latency', result, arguments.out)}")
    measured = {
        "unseen_p50_ms": max(times["p50_ms"] for times in result["unseen"].values()),
        "repeated_p50_us": result["repeated"]["p50_us"],
        "cold_p50_s": result["cold"]["p50_s"],
    }
    missed = [name for name, budget in BUDGETS.items() if measured[name] > budget]
    if missed:
        sys.exit(f"over budget: {', '.join(missed)}")


if __name__ == "__main__":
    main()
