"""Depthwise gradients in one pass against the two apart, and against PyTorch's own.

    python -m benchmarks.kernels.depthwise_both [--out FOLDER] [--seconds 85] [--configs 24]

Depthwise layers of networks at batch 32 and 128, in float16 and channels last. Configs of
`depthwise_both` and `depthwise_banded_both`, those that their estimates put first and others evenly
from the rest, are checked against the float64 reference and timed; so are the first kernels that
the shipped model names for the gradient of the input, and for that of the filter. Then the best of
both, the best of each of the two one after the other, and PyTorch's own backward pass are timed in
the same rounds, each in a CUDA graph with cold caches; the first two twice, which shows the noise.
Shares are those of the time to move every operand once at the bandwidth of a large copy.

A process of its own measures. Where a config ends it, or takes no end, the config is named in the
result, and another process goes on without it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks.kernels.batch_norm import call_of, compiled, record, say, watched
from benchmarks.kernels.conv_vs_cudnn import copy_bandwidth, interleaved_ms
from confpred.families.protocol import Family, config_dict
from confpred.families.registry import all_families, kernels_of
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.gradients import GRADIENTS, Gradients
from confpred.problem.operation import KernelSpec

NAME = "depthwise_both"
#: Window, stride, channels, height and width: of EfficientNet-B0, MNASNet, MobileNetV3 and
#: ConvNeXt.
LAYERS: tuple[tuple[int, int, int, int], ...] = (
    (3, 1, 32, 112),
    (3, 1, 144, 56),
    (3, 1, 72, 56),
    (3, 1, 480, 14),
    (3, 1, 1152, 7),
    (3, 2, 96, 112),
    (3, 2, 240, 28),
    (5, 1, 240, 28),
    (5, 1, 672, 14),
    (5, 2, 144, 56),
    (7, 1, 96, 56),
    (7, 1, 384, 14),
)
BATCHES = (128, 32)
APART = ("dgrad", "wgrad")
KNOWN = 8  # kernels of each direction apart
SHOWN = 3  # configs in the result
GOAL = 1.15


def problems() -> list[Gradients]:
    """Return the layers at both batches; in random order, so that a run that is cut short leaves a
    fair sample."""
    found = [
        Gradients(n, c, side, side, c, r, r, stride=(stride,) * 2, padding=(r // 2,) * 2, groups=c)
        for n in BATCHES
        for r, stride, c, side in LAYERS
    ]
    random.Random(0).shuffle(found)
    return found


def rows_of(family: Family, problem: Gradients, device: Device, most: int) -> list[int]:
    """Return at most so many legal configs: half by the estimate, half evenly from the rest."""
    rows = np.flatnonzero(family.legal(problem, device))
    ranked = rows[np.argsort(family.estimate_s(problem, device, rows), kind="stable")]
    first, rest = ranked[: most // 2], np.sort(ranked[most // 2 :])
    even = np.linspace(0, len(rest) - 1, min(len(rest), most - len(first))).astype(int)
    return sorted(int(row) for row in (*first, *rest[even]))


def known_rows(predictor: Predictor, problem: Problem, device: Device) -> dict[str, list[int]]:
    """Return the configs that the model puts first among this project's kernels, by family."""
    found: dict[str, list[int]] = {}
    kernels = kernels_of(problem)
    choices = [c.candidate for c in predictor.rank(problem, device, 4 * KNOWN)]
    for candidate in [c for c in choices if c.provider in kernels][:KNOWN]:
        found.setdefault(candidate.provider, []).append(candidate.config_id)
    return found


def plan(device: Device, most: int) -> dict[str, dict[str, dict[str, list[int]]]]:
    """Return what is measured: problem, then direction, then family, then its configs."""
    predictor = Predictor.load()
    return {
        str(problem): {
            "both": {
                name: rows
                for name, family in kernels_of(problem).items()
                if (rows := rows_of(family, problem, device, most))
            },
            **{d: known_rows(predictor, problem.apart(d), device) for d in APART},
        }
        for problem in problems()
    }


def of_direction(problem: Gradients, direction: str) -> Problem:
    return problem if direction == "both" else problem.apart(direction)


def kernels(planned: Mapping[str, Mapping[str, Mapping[str, Iterable[int]]]]) -> list[KernelSpec]:
    """Return every kernel that a run needs."""
    found: dict[KernelSpec, None] = {}
    for words, directions in planned.items():
        problem = Gradients.parse(words)
        for direction, families in directions.items():
            for name, rows in families.items():
                for row in rows:
                    launch = all_families()[name].launch(of_direction(problem, direction), row)
                    found.update(dict.fromkeys(launch.kernels))
        for output in GRADIENTS.operands(problem):
            if output.terms:
                found[GRADIENTS.reference(problem, output.name).kernel] = None
    return list(found)


# The process that measures; it prints a line for each thing that it begins, and for each result.


def work(job: Mapping[str, Any]) -> None:
    """Measure the problems of `job`, and print each result."""
    import torch

    from confpred.cuda import driver
    from confpred.measure import pytorch as operator

    driver.make_current(0)
    torch.cuda.set_device(0)
    torch.backends.cudnn.benchmark = True
    bandwidth, evict = copy_bandwidth(), operator.Evictor(driver.device_of(0).l2_bytes)
    say(bandwidth=bandwidth)
    for words in job["problems"]:
        if time.time() > job["end"]:
            break
        try:
            result = one(Gradients.parse(words), bandwidth, evict, job)
        except Exception as error:  # the others still count
            result = {"failed": f"{type(error).__name__}: {error}"[:300]}
        say(result={"problem": words, **result})
        torch.cuda.empty_cache()


def one(problem: Gradients, bandwidth: float, evict: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of one problem."""
    from confpred.measure.kernels import measure

    found: dict[str, Any] = {"failures": []}
    best: dict[str, Callable[[Mapping[str, Any]], list[Any]]] = {}
    chosen = ("", -1)
    for direction, families in job["planned"][str(problem)].items():
        asked, timed = of_direction(problem, direction), []
        for name, rows in families.items():
            family = all_families()[name]
            left_out = [row for p, f, row in job["left_out"] if (p, f) == (str(problem), name)]
            rows = [row for row in rows if row not in left_out]
            if not rows:
                continue

            def report(row: int, name: str = name) -> None:
                say(begun=[str(problem), name, row])

            outcomes = measure(asked, family, rows, ordinal=0, seed=0, report=report)
            timed += [(o, family) for o in outcomes if o.status == "ok"]
            found["failures"] += [
                f"{name} {config_dict(family, o.config_id)}: {o.status} {o.message}"[:300]
                for o in outcomes
                if o.status != "ok"
            ][:SHOWN]
        timed.sort(key=lambda pair: pair[0].time_ms)
        found[direction] = [
            {
                "ms": o.time_ms,
                "error": o.error,
                "registers": o.registers,
                "local_bytes": o.local_bytes,
                "family": family.name,
                **config_dict(family, o.config_id),
            }
            for o, family in timed[:SHOWN]
        ]
        if not timed:
            return found | {"failed": f"no config of {direction} is right"}
        outcome, family = timed[0]
        best[direction] = call_of(family, asked, outcome.config_id)
        if direction == "both":
            chosen = family.name, outcome.config_id
    say(begun=[str(problem), *chosen])  # left out if it ends the process now
    return found | compared(problem, best, bandwidth, evict)


def compared(
    problem: Gradients, best: Mapping[str, Callable[..., Any]], bandwidth: float, evict: Any
) -> dict[str, Any]:
    """Time one pass, two passes and PyTorch's, in the same rounds on the same inputs."""
    from confpred.cuda import driver
    from confpred.measure import pytorch as operator
    from confpred.measure import timing

    facts = driver.device_of(0)
    launches = timing.launches_a_replay(2 * facts.roofline_s(problem))
    # Two sets at least: the next launch must not find what the last one left in the L2 cache.
    copies = max(2, operator.copies_for(problem, launches, facts.l2_bytes))
    sets = operator.operands(GRADIENTS, problem, min(copies, launches))
    turns = [sets[i % len(sets)] for i in range(launches)]
    both, theirs = best["both"], partial(GRADIENTS.pytorch, problem)

    def apart(tensors: Mapping[str, Any]) -> list[Any]:
        return [out for direction in APART for out in best[direction](tensors)]

    images = [
        (o.permute(0, 3, 1, 2), t) for o, t in zip(both(sets[0]), theirs(sets[0]), strict=True)
    ]
    differences = [float((o.float() - t.float()).norm() / t.float().norm()) for o, t in images]
    names = ("both_ms", "apart_ms", "both_again_ms", "apart_again_ms", "pytorch_ms")
    times = interleaved_ms((both, apart, both, apart, theirs), turns, evict)
    ms = dict(zip(names, times, strict=True))
    one, two = ((ms[f"{name}_ms"] + ms[f"{name}_again_ms"]) / 2 for name in ("both", "apart"))
    floor_ms = 1e3 * problem.minimum_bytes / bandwidth
    noise = [abs(ms[f"{name}_again_ms"] / ms[f"{name}_ms"] - 1) for name in ("both", "apart")]
    return ms | {
        "differences": differences,
        "noise": max(noise),
        "gain": two / one,
        "gain_over_pytorch": ms["pytorch_ms"] / one,
        "floor_ms": floor_ms,
        "share": floor_ms / one,
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the gains of one pass over two by window and stride, and where it would be chosen."""
    good = [(Gradients.parse(r["problem"]), r) for r in results if "gain" in r]
    found: dict[str, Any] = {}
    for p, r in good:
        found.setdefault(f"{p.r}x{p.s} stride {p.stride[0]}", []).append(r["gain"])
    kinds = {
        kind: {"layers": len(gains), "gain": geometric_mean(gains), "least": min(gains)}
        for kind, gains in sorted(found.items())
    }
    won = [r["gain"] for _, r in good if r["gain"] > 1 + r["noise"]]
    return {
        "kinds": kinds,
        "layers": len(good),
        "chosen": len(won),
        "gain_where_chosen": geometric_mean(won) if won else None,
        "layers_at_goal": sum(gain >= GOAL for gain in won),
        # One pass where it wins, two elsewhere.
        "gain_as_a_choice": geometric_mean([max(r["gain"], 1.0) for _, r in good])
        if good
        else None,
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as Markdown."""
    heads = ("layer", "apart, ms", "both, ms", "gain", "PyTorch, ms", "share of the floor", "noise")
    lines = [f"| {' | '.join(heads)} | config |", f"|---|{'---:|' * (len(heads) - 1)}---|"]
    for r in sorted(results, key=lambda r: str(r["problem"])):
        if "gain" not in r:
            lines.append(f"| {r['problem']} | failed: {r.get('failed')} |")
            continue
        p, config = Gradients.parse(r["problem"]), dict(r["both"][0])
        kept = {k: v for k, v in config.items() if k not in ("ms", "error")}
        cells = [
            f"{p.n} x {p.c}, {p.h}², {p.r}x{p.s} / {p.stride[0]}", f"{r['apart_ms']:.4f}",
            f"{r['both_ms']:.4f}", f"{r['gain']:.2f}x", f"{r['pytorch_ms']:.4f}",
            f"{r['share']:.2f}", f"{r['noise']:.1%}", " ".join(f"{k}={v}" for k, v in kept.items()),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="default: the device's folder of results")
    parser.add_argument("--seconds", type=float, default=85.0, help="begin nothing after these")
    parser.add_argument(
        "--configs", type=int, default=24, help="at most so many a layer and family"
    )
    parser.add_argument("--compile", action="store_true", help="compile the kernels, and stop")
    parser.add_argument("--device", default="h100", help="whose configs are compiled beforehand")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(json.loads(sys.stdin.readline()))
        return
    start = time.time()
    device = get_device(arguments.device)
    planned = plan(device, arguments.configs)
    specs = kernels(planned)
    errors = compiled(specs, device.arch)
    print(f"{len(specs)} kernels after {time.time() - start:.0f} s", *errors, sep="\n")
    if arguments.compile:
        return
    job = {
        "problems": list(planned),
        "planned": planned,
        "end": start + arguments.seconds,
    }
    found = watched(job, [sys.executable, "-m", "benchmarks.kernels.depthwise_both", "--work"])
    results = found["results"]
    print(table(results))
    record(NAME, found, summary(results), errors, arguments.out)


if __name__ == "__main__":
    main()
