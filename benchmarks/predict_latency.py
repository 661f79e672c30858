"""How long an answer takes on one CPU core: unseen problem, repeated problem, cold process.

    python benchmarks/predict_latency.py [--model FOLDER] [--out FOLDER]

Unseen problems are drawn at random among those that the model has about 200 candidates for, so each
costs legality, features and trees. The process pins itself to one core. The cold figure is the wall
time of the installed ``confpred predict`` command, from start to exit, files in the page cache.

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

from confpred.device import Device
from confpred.model import Model
from confpred.predictor import Predictor
from confpred.problem import ACTIVATIONS, DTYPES, Problem

CANDIDATES = range(190, 211)
DRAWN, PROBLEMS, REPEATS, COLD_RUNS = 20_000, 300, 20, 20
BUDGETS = {"unseen_p50_ms": 2.0, "repeated_p50_us": 10.0, "cold_p50_s": 0.4}


def random_problems(seed: int) -> Iterator[Problem]:
    """Grouped layers of the sizes that networks have."""
    rng = random.Random(seed)
    while True:
        width, size = rng.choice((8, 16, 32)), rng.randint(7, 64)
        c, r = width * rng.randint(4, 64), rng.choice((3, 3, 3, 5))
        yield Problem(
            n=rng.randint(1, 256),
            c=c,
            h=size,
            w=size,
            k=c,
            r=r,
            s=r,
            padding=r // 2,
            groups=c // width,
            dtype=rng.choice(DTYPES),
            activation=rng.choice(ACTIVATIONS),
        )


def unseen(model: Model) -> list[Problem]:
    """Problems that are not in the data and have about 200 candidates."""
    drawn = dict.fromkeys(islice(random_problems(seed=0), DRAWN))
    found = [
        problem
        for problem in drawn
        if len(candidates(model, problem)) in CANDIDATES and str(problem) not in model.measured
    ]
    if len(found) < PROBLEMS:
        sys.exit(f"only {len(found)} of {DRAWN} problems have {CANDIDATES} candidates")
    return found[:PROBLEMS]


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


def quantiles(times: Sequence[float], scale: float, unit: str, name: str) -> dict[str, float]:
    return {
        f"{name}_{q}_{unit}": float(np.quantile(times, p)) * scale
        for q, p in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def cascade_exceptions(model: Model, device: Device, problems: Sequence[Problem]) -> dict[str, Any]:
    """Share of problems where the cascade misses the ensemble's own best, and what that costs."""
    cost = []
    for problem in problems:
        for learned in model.families.values():
            rows = learned.candidates(problem, device)
            whole = learned.order.predict(
                learned.pool.features(learned.family, problem, device, rows)
            )
            chosen = learned.rank(problem, device, rows)[0][0]
            cost.append(float(np.exp(whole[rows == chosen][0] - whole.min())))
    return {"share": float(np.mean(np.array(cost) > 1)), "worst_predicted_regret": max(cost)}


def cold(model: Path | None, problem: Problem, device: str) -> list[float]:
    command = [str(Path(sys.executable).with_name("confpred")), "predict", "--gpu", device]
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
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    predictor = Predictor.load(arguments.model)
    model = predictor.models[arguments.gpu]
    problems = unseen(model)
    warm = next(p for p in random_problems(seed=1) if p not in problems)
    predictor.choose(warm, arguments.gpu)

    first = seconds(lambda p: predictor.choose(p, arguments.gpu), problems)
    again = seconds(lambda p: predictor.choose(p, arguments.gpu), problems * REPEATS)
    result = {
        "model": model.version,
        "problems": len(problems),
        "candidates": float(np.mean([len(candidates(model, p)) for p in problems])),
        **quantiles(first, 1e3, "ms", "unseen"),
        **quantiles(again, 1e6, "us", "repeated"),
        **quantiles(cold(arguments.model, problems[0], arguments.gpu), 1.0, "s", "cold"),
        "cascade_exceptions": cascade_exceptions(model, model.device, problems),
        "budgets": BUDGETS,
        **provenance("numpy", "lightgbm", "click", gpu=False),
    }
    print(json.dumps(result, indent=1))
    print(f"written to {write('predict_latency', result, arguments.out)}")
    missed = [name for name, budget in BUDGETS.items() if result[name] > budget]
    if missed:
        sys.exit(f"over budget: {', '.join(missed)}")


if __name__ == "__main__":
    main()
