"""How choices for kinds of layers compare with PyTorch's operator, by the hold-outs of any group
width, of large filters and of depthwise layers with a multiplier.

    nice python -m benchmarks.model.layer_kinds    # some minutes

A model of a suite's families is trained as the shipped ones are, without any network of its
hold-out. A row is a kind of layer in one direction: how many times as fast the model's answers are
as PyTorch's operator in cuDNN's benchmark mode, how many are more than 5 % slower, and their regret
over the fastest that was measured, PyTorch's operator included.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.provenance import (
    HOLDOUT,
    RESULTS,
    measured,
    measured_devices,
    provenance,
    write,
)
from confpred.families.anywidth import depth_of
from confpred.model.folder import load_model
from confpred.problem.record import Record
from confpred.training.dataset import read_dataset
from confpred.training.holdout import (
    BENCHMARK,
    check_unseen,
    judge_holdout,
    read_holdout,
    without_holdout,
)
from confpred.training.train import train

SUITES = ("any_width", "large_filters", "multiplied")


def kind_of(problem: Any) -> str:
    """Return the kind of layer that `problem` is counted with."""
    width = problem.group_width
    if width == 1 < depth_of(problem):
        return "depthwise with a multiplier"
    if width == 1:
        is_square = problem.r == problem.s and problem.r <= 31
        return "depthwise, 13x13 to 31x31" if is_square else "depthwise, strips and 51x51"
    if width != depth_of(problem):
        return "groups with more or fewer outputs than inputs"
    if width <= 64:
        return "groups of 2 to 64, no power of two"
    return "groups of 65 to 127" if width < 128 else "groups of 128 to 512"


def judged(device: str) -> list[dict[str, Any]]:
    """Return a row for each kind and direction, on `device`."""
    everything = read_dataset([measured(d) for d in measured_devices()], device)
    rows = []
    for suite in SUITES:
        paths = [measured(device, HOLDOUT / suite)]
        held = read_holdout(read_dataset(paths, device), paths)
        families = {timed.family for timed in held.dataset.timings}
        known = without_holdout(everything, held.dataset)
        with tempfile.TemporaryDirectory() as folder:
            train(known, Path(folder) / suite, families=families)
            model = load_model(Path(folder) / suite)
        checked = check_unseen(model, known, held.dataset)
        kinds: dict[tuple[str, str], set[Record]] = defaultdict(set)
        for timed in held.dataset.timings:
            problem: Any = timed.problem
            for kind in (kind_of(problem), f"all of {suite}"):
                kinds[kind, problem.direction].add(problem)
            kinds[f"all of {suite}", "all"].add(problem)
        for (kind, direction), problems in sorted(kinds.items()):
            part = replace(held, dataset=held.dataset.restricted(problems))
            verdict = judge_holdout(model, part, checked, seed=0)
            rows.append({
                "kind": kind, "direction": direction,
                "problems": verdict.problems, "speed": verdict.speed[BENCHMARK],
                "slower": verdict.slower[BENCHMARK], "left_to_pytorch": verdict.pytorch,
                "whole": asdict(verdict.whole), "first": dict(verdict.whole_first),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    told = parser.parse_args()
    for device in measured_devices(HOLDOUT / SUITES[0]):
        result = {**provenance("lightgbm", gpu=False), "rows": judged(device)}
        write("layer_kinds", result, told.out / device)


if __name__ == "__main__":
    main()
