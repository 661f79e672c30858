"""How long an answer takes on one CPU core: unseen problem, network of unseen layers, repeated
problem, cold process.

    python -m benchmarks.host.predict_latency [--model FOLDER] [--device h200] [--out FOLDER]
        [--before PYTHON]

Unseen problems are layers of random sizes, depthwise and grouped, in each direction; for each of
them, legality, features and trees have to be worked out. A network is 50 of them in one call, of
one kind or of each in turn. All this is measured in turns, each in a process of its own that pins
itself to one core, and a problem's time is the least of its turns, as whatever else runs on the
machine can only lengthen it; the processor's time is beside the clock's. With ``--before`` the
turns alternate with those of another checkout, whose interpreter this is. The cold figure is the
time of the installed ``confpred predict`` command from start to exit, with its files in the page
cache and its modules compiled; the least is the machine's, the median is as loaded as it was.

It also counts how often the short cuts (a gate that leaves families out, an estimate and first
trees that leave candidates out) end at another config than the whole ensembles over all candidates
of all families would, and what these expect of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from confpred.families.protocol import Candidate
from confpred.model.folder import Model
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import ACTIVATIONS, DIRECTIONS, Problem

KINDS = [f"{kind}, {direction}" for kind in ("depthwise", "grouped") for direction in DIRECTIONS]
PROBLEMS, REPEATS, COLD_RUNS, TURNS = 100, 20, 20, 7
LAYERS = 50  # of a network
WARM = 20  # problems that parse the trees of all families of a kind
Turn = dict[str, Any]
#: Limits, since every legal config is ranked (decision 166).
BUDGETS = {
    "unseen_p50_ms": 3.0,
    "unseen_p99_over_p50": 2.0,
    "network_ms": 60.0,
    "repeated_p50_us": 2.2,
    "cold_p50_s": 0.25,
}


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
        for row in learned.legal(problem, model.device)
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
        for q, p in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
    }


def networks(problems: Mapping[str, Sequence[Problem]]) -> dict[str, list[Problem]]:
    """`LAYERS` problems of each kind, and as many of all kinds in turn."""
    mixed = [problem for some in zip(*problems.values(), strict=False) for problem in some]
    return {
        **{kind: list(some)[:LAYERS] for kind, some in problems.items()},
        "mixed": mixed[:LAYERS],
    }


def turn(model: Path | None, device: str, problems: Mapping[str, Sequence[Problem]]) -> Turn:
    """Seconds by the clock and of the processor that each unseen problem takes, in order, and those
    of each network, once the trees are parsed."""
    pin()
    models = Predictor.load(model).models
    result: Turn = {"unseen": {}, "network": {}, "repeated": []}
    for kind, some in problems.items():
        for warm in islice(random_problems(kind, seed=1), WARM):
            Predictor(models).choose(warm, device)
        predictor = Predictor(models)
        found = []
        for problem in some:
            start, processor = time.perf_counter(), time.thread_time()
            predictor.choose(problem, device)
            found.append((time.perf_counter() - start, time.thread_time() - processor))
        result["unseen"][kind] = found
        result["repeated"] += seconds(
            lambda p, own=predictor: own.choose(p, device), [*some] * REPEATS
        )
    for kind, some in networks(problems).items():
        predictor = Predictor(models)
        start, processor = time.perf_counter(), time.thread_time()
        predictor.choose_many(some, device)
        result["network"][kind] = (time.perf_counter() - start, time.thread_time() - processor)
    return result


def pin() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def run_turns(
    python: str, arguments: argparse.Namespace, problems: Mapping[str, Sequence[Problem]]
) -> Turn:
    """One turn in a process of `python`, which gets the same problems for both checkouts."""
    told = {kind: [str(problem) for problem in some] for kind, some in problems.items()}
    command = [python, __file__, "--turn", "--device", arguments.device]
    if arguments.model and python == sys.executable:
        command += ["--model", str(arguments.model)]
    done = subprocess.run(
        command, input=json.dumps(told), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"a turn of {python} failed:\n{done.stderr}")
    result: Turn = json.loads(done.stdout)
    return result


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the figures of some turns: of each problem, and each network, the least."""
    unseen = {}
    for kind in turns[0]["unseen"]:
        clock, processor = np.min([each["unseen"][kind] for each in turns], axis=0).T
        unseen[kind] = {
            **quantiles(clock, 1e3, "ms"),
            **{f"processor_{k}": v for k, v in quantiles(processor, 1e3, "ms").items()},
        }
    network = {}
    for kind in turns[0]["network"]:
        clock, processor = np.array([each["network"][kind] for each in turns]).T * 1e3
        network[kind] = {
            "least_ms": float(clock.min()),
            "median_ms": float(np.median(clock)),
            "processor_least_ms": float(processor.min()),
        }
    repeated = np.min([each["repeated"] for each in turns], axis=0)
    return {"unseen": unseen, "network": network, "repeated": quantiles(repeated, 1e6, "us")}


def short_cuts(model: Model, problems: Sequence[Problem]) -> dict[str, Any]:
    """Share of problems where the short cuts miss the best of all candidates, by the ensembles'
    own word, and what that costs by it; and how many families are compared."""
    from confpred.model.rank import rank_families  # which another checkout may lack

    shortened = rank_families(model.families, model.gate, problems, model.device)
    cost, missed, compared, serving = [], [], 0, 0
    for problem, ranking in zip(problems, shortened, strict=True):
        expected: dict[Candidate, float] = {}
        for name, learned in model.families.items():
            rows = learned.legal(problem, model.device)
            if not len(rows) or not learned.serves(problem):
                continue
            serving += 1
            features = learned.features(problem, model.device, rows)
            whole = learned.order.predict(features)
            best = int(np.lexsort((rows, whole))[0])
            log_s = learned.time.predict(features[best : best + 1])[0] + whole - whole[best]
            expected |= {
                Candidate(name, row): value
                for row, value in zip(rows.tolist(), log_s.tolist(), strict=True)
            }
        if not expected:  # nothing of what it was measured on is legal
            continue
        compared += len({candidate.provider for _, candidate in ranking})
        lost = expected[ranking[0][1]] - min(expected.values())
        missed.append(lost > 0)
        cost.append(lost)
    return {
        "share": float(np.mean(missed)),
        "mean_predicted_regret": float(np.exp(np.mean(cost))),
        "worst_predicted_regret": float(np.exp(max(cost))),
        "families_compared": compared / len(problems),
        "families_with_candidates": serving / len(problems),
    }


def cold(python: str, model: Path | None, problem: Problem, device: str) -> float:
    """Seconds of the installed command."""
    command = [str(Path(python).with_name("confpred")), "predict", "--device", device]
    command += ["--layer", str(problem), *(["--model", str(model)] if model else [])]
    # As an installed package has them, modules are compiled once.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=kept)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", type=Path, help="model folder; default: the newest that ships")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--out", type=Path, help="folder of the result")
    parser.add_argument("--before", help="interpreter of another checkout, to take turns with")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--turn", action="store_true", help="one turn of problems from stdin")
    arguments = parser.parse_args()
    if arguments.turn:
        told = json.load(sys.stdin)
        some = {kind: [Problem.parse(each) for each in words] for kind, words in told.items()}
        print(json.dumps(turn(arguments.model, arguments.device, some)))
        return
    pin()
    model = Predictor.load(arguments.model).models[arguments.device]
    problems = {kind: unseen(model, kind) for kind in KINDS}
    every = [problem for of_kind in problems.values() for problem in of_kind]
    from benchmarks.provenance import RESULTS, provenance, write  # absent where a turn runs

    sides = [sys.executable, *([arguments.before] if arguments.before else [])]
    turns: dict[str, list[Turn]] = {python: [] for python in sides}
    colds: dict[str, list[float]] = {python: [] for python in sides}
    for _ in range(arguments.turns):
        for python in sides:
            turns[python].append(run_turns(python, arguments, problems))
    for _ in range(COLD_RUNS + 1):
        for python in sides:
            own = arguments.model if python == sys.executable else None
            colds[python].append(cold(python, own, every[0], arguments.device))
    found = {
        python: {
            **summary(turns[python]),
            "cold": {**quantiles(colds[python][1:], 1.0, "s"), "least_s": min(colds[python])},
        }
        for python in sides
    }
    result = {
        "model": model.version,
        "problems": len(every),
        "turns": arguments.turns,
        **found[sys.executable],
        "short_cuts": short_cuts(model, every),
        "budgets": BUDGETS,
        **({"before": found[arguments.before]} if arguments.before else {}),
        **provenance("numpy", "lightgbm", "click", gpu=False),
    }
    for kind, some in problems.items():
        result["unseen"][kind]["candidates"] = float(
            np.mean([len(candidates(model, problem)) for problem in some])
        )
    print(json.dumps(result, indent=1))
    print(f"written to {write('predict_latency', result, arguments.out or RESULTS)}")
    measured = {
        "unseen_p50_ms": max(times["p50_ms"] for times in result["unseen"].values()),
        "unseen_p99_over_p50": max(
            times["p99_ms"] / times["p50_ms"] for times in result["unseen"].values()
        ),
        "network_ms": max(times["least_ms"] for times in result["network"].values()),
        "repeated_p50_us": result["repeated"]["p50_us"],
        "cold_p50_s": result["cold"]["p50_s"],
    }
    missed = [f"{name} {measured[name]:.3g}" for name in BUDGETS if measured[name] > BUDGETS[name]]
    if missed:
        sys.exit(f"over budget: {', '.join(missed)}")


if __name__ == "__main__":
    main()
