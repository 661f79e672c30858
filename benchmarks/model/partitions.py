"""How order, time and bound of the whole GPU's model hold on parts of its multiprocessors.

    python -m benchmarks.model.partitions                    # about five minutes of an H100
    python -m benchmarks.model.partitions --sms 64 --problems 12    # a rough look
    python -m benchmarks.model.partitions --sms 32 --learn runs/part --budget 100

A *green context* of CUDA has some of the multiprocessors, and all of the cache and the memory. Each
part is described as a device of its own (its rates are measured in it), and layers of the hold-out
are sampled on it: of each kernel family the first configs in the model's order, and random ones.
Times over the fastest that was measured, PyTorch's operator included, of

- PyTorch's operator;
- the transferred order's first, which is launched without a measurement;
- the faster of PyTorch's operator and the best of the first eight, as tuning measures.

Everything that the sampler enqueues runs on a stream of the part; its processes set that up
(`partition_job`).

With ``--learn`` a model is trained instead, of forward layers of the training suites that were
measured on such a part of every GPU at hand (`benchmarks.networks.unknown_board` uses it).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.networks.unknown_board import DESCRIPTION
from benchmarks.provenance import DATASETS, RESULTS, provenance, write
from confpred.cuda import driver
from confpred.cuda.discovery import Facts, device_with, measure_rates
from confpred.data.suites import Suite, join, read_suite
from confpred.families.protocol import PYTORCH_OPERATOR, Family, Rows
from confpred.measure.timing import Outcome
from confpred.predict.choice import MAX_TOP
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record
from confpred.sampler import kept
from confpred.sampler.jobs import MeasureJob, measure_job
from confpred.sampler.run import Here, Sampling, find_gpus, sample
from confpred.training.dataset import read_dataset
from confpred.training.train import train

SIZES, PROBLEMS = (32, 64, 96), 60
PICKED, RANDOM, MEASURED = 8, 16, 8
#: Times of PyTorch's operator that count as slower: two measurements differ by less.
SLOWER = 1.02
#: Suites to learn from.
TRAINING = (
    "fprop.json", "further/fprop.json", "any_width/training.json", "dense/training.json",
)  # fmt: skip
_JOB = "benchmarks.model.partitions:partition_job"
#: For the sampler's processes: how many multiprocessors, and the key of the device.
_SMS, _KEY = "PARTITION_SMS", "PARTITION_DEVICE"


class Part:
    """A `cuda.core` device whose new streams are of some of its multiprocessors."""

    def __init__(self, device: Any, count: int) -> None:
        from cuda.core import ContextOptions, SMResourceOptions

        (group,), _ = device.resources.sm.split(SMResourceOptions(count=count))
        self._device, self._context = device, device.create_context(ContextOptions([group]))
        self.count = int(group.sm_count)  # the driver rounds it up

    def create_stream(self) -> Any:
        return self._context.create_stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@cache
def part_of(count: int, ordinal: int = 0) -> Part:
    return Part(driver.make_current(ordinal), count)


def described(count: int) -> Device:
    """Return the device that a part is, with rates that are measured in it."""
    part = part_of(count)
    facts = replace(Facts.of(part, driver.describe(0)[1]), sm_count=part.count)
    return device_with(facts, lambda _: measure_rates(part, facts))


@cache
def enter(count: int, key: str, ordinal: int) -> None:
    """Let all that this process measures run on a part of its GPU."""
    import torch

    part, device = part_of(count, ordinal), get_device(key)
    driver.make_current, driver.device_of = lambda _: part, lambda _: device  # type: ignore
    stream = part.create_stream()
    torch.cuda.graph.default_capture_stream = torch.cuda.ExternalStream(int(stream.handle))
    _streams.append(stream)


_streams: list[Any] = []  # that have to live


def partition_job(job: MeasureJob, report: Callable[[int], None]) -> list[Outcome]:
    """Measure a task on the part that the environment names."""
    enter(int(os.environ[_SMS]), os.environ[_KEY], job.ordinal)
    return measure_job(job, report)


@dataclass(frozen=True, slots=True)
class Answer:
    """Milliseconds of a problem's candidates, the fastest first, and the predictor's answer: its
    order, and its bound on the whole GPU."""

    times: Mapping[Any, float]
    order: Sequence[Any]
    expected_ms: float | None
    bound: float | None

    def regrets(self) -> dict[str, float] | None:
        """Return times over the fastest one; None where PyTorch's or the first's is missing."""
        order = [c for c in self.order if c in self.times]
        ours = [c for c in order if c != PYTORCH_OPERATOR]
        if not ours or PYTORCH_OPERATOR not in self.times:
            return None
        best, pytorch = min(self.times.values()), self.times[PYTORCH_OPERATOR]
        fastest = min(ms for c, ms in self.times.items() if c != PYTORCH_OPERATOR)
        measured = min(self.times[c] for c in ours[:MEASURED])
        return {
            "pytorch": pytorch / best,
            "first": self.times[order[0]] / best,
            "tuned": min(measured, pytorch) / best,
            "order": self.times[ours[0]] / fastest,
            f"order, {MEASURED} measured": measured / fastest,
        }


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return how far the answers are off."""
    rows = [(a, regrets) for a in answers if (regrets := a.regrets()) is not None]
    found: dict[str, Any] = {"problems": len(rows)}
    for name in rows[0][1] if rows else ():
        values = np.array([regrets[name] for _, regrets in rows])
        found[name] = {
            "geomean": float(np.exp(np.log(values).mean())),
            "p95": float(np.quantile(values, 0.95)),
            "worst": float(values.max()),
        }
    slower = sum(regrets["first"] > SLOWER * regrets["pytorch"] for _, regrets in rows)
    found["first slower than pytorch"] = slower / max(len(rows), 1)
    ratios = [
        a.times[a.order[0]] / a.expected_ms
        for a, _ in rows
        if a.expected_ms and a.order[0] in a.times
    ]
    if ratios:
        logs = np.log(ratios)
        spread = np.exp(np.quantile(np.abs(logs - np.median(logs)), 0.5))
        found["time"] = {"median_ratio": float(np.exp(np.median(logs))), "spread": float(spread)}
    bounded = [(regrets["first"], a.bound) for a, regrets in rows if a.bound is not None]
    held = sum(regret <= bound for regret, bound in bounded)
    found["bound"] = {"problems": len(bounded), "held": held / max(len(bounded), 1)}
    return found


def answers_in(folder: Path, device: Device, whole: Device, predictor: Predictor) -> list[Answer]:
    """Return what was measured into `folder`, and what the predictor says of it."""
    found = []
    for problem, timed in kept.times_in(folder, CONVOLUTION).items():
        ranked = predictor.rank(problem, device, MAX_TOP)
        bound = predictor.choose(problem, whole).regret_bound
        order = [choice.candidate for choice in ranked]
        times = {each.candidate: each.ms for each in timed if each.ms < np.inf}
        found.append(Answer(times, order, ranked[0].predicted_ms, bound))
    return found


def sampled(
    suite: Suite, device: Device, count: int, folder: Path, predictor: Predictor, whole: Device,
    gpus: str = "0", budget_s: float | None = None,
) -> None:  # fmt: skip
    """Measure the layers of `suite` on a part of each of `gpus`."""
    model = predictor.own_model(type(suite.entries[0].problem), whole)

    def pick(family: Family, problem: Record, rows: Rows) -> Rows | None:
        learned = model.families.get(family.name) if model else None
        return None if learned is None else learned.rank(problem, device, rows, len(rows))[0]

    os.environ[_SMS], os.environ[_KEY] = str(count), device.key
    runs = {i: replace(run, device=device.key) for i, run in find_gpus(gpus).items()}
    settings = Sampling(
        configs=RANDOM, picked=PICKED, pick=pick, measure=_JOB, budget_s=budget_s,
        processes=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    tally = sample(suite, folder, Here(runs, settings), settings)
    print(f"{device.key}: {dict(tally.statuses)} in {tally.elapsed_s:.0f} s", flush=True)


def layers(count: int, seed: int) -> Suite:
    """Return some problems of networks that are held out, of all directions alike."""
    suites = [read_suite(p) for p in sorted((DATASETS / "suites" / "holdout").glob("*.json"))]
    suite = join(suites)
    entries = random.Random(seed).sample(suite.entries, min(count, len(suite.entries)))
    return replace(suite, entries=tuple(entries))


def learned(count: int, budget_s: float, out: Path) -> None:
    """Train a model on a part of the GPU: its folder and the device's description in `out`."""
    device = described(count)
    suites = [read_suite(DATASETS / "suites" / name) for name in TRAINING]
    every: list[Any] = [entry for suite in suites for entry in suite.entries]
    forward = dict.fromkeys(entry for entry in every if entry.problem.direction == "fprop")
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / device.key
        suite = replace(suites[0], entries=tuple(forward))
        sampled(suite, device, count, measured, Predictor({}), device, "all", budget_s)
        train(read_dataset([measured], device.key), out / device.key)
    (out / DESCRIPTION).write_text(json.dumps(asdict(device)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sms", type=int, nargs="+", default=SIZES)
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learn", type=Path, help="folder to make for a model of the first --sms")
    parser.add_argument("--budget", type=float, default=100, help="seconds of measuring for it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    told = parser.parse_args()
    if told.learn:
        learned(told.sms[0], told.budget, told.learn)
        return
    suite, predictor, whole = (
        layers(told.problems, told.seed),
        Predictor.load(),
        driver.device_of(0),
    )
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in told.sms:
            device = described(count)
            into = Path(folder) / device.key
            sampled(suite, device, count, into, predictor, whole)
            found = summary(answers_in(into, device, whole, predictor))
            rates = ("sm_count", "dram_bytes_per_s", "tensor_flops", "simt_flops")
            parts[device.key] = {name: getattr(device, name) for name in rates} | found
            print(device.key, parts[device.key], flush=True)
    result = {
        "provenance": provenance("cuda-core", "torch", gpu=True),
        "device": whole.key, "seed": told.seed, "parts": parts,
    }  # fmt: skip
    print(write("partitions", result, told.out))


if __name__ == "__main__":
    main()
