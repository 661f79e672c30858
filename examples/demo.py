"""The whole of confpred in a few minutes: retrain, judge, predict, serve; with a GPU also launch.

    make demo

Everything that this script makes goes to a temporary folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from confpred import Predictor, Problem
from confpred.cuda.driver import device_count, device_of
from confpred.data.suites import read_suite
from confpred.errors import UnknownDevice
from confpred.families.candidate import PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.predict.choice import MAX_TOP, Choice
from confpred.problem.conv2d_operation import CONVOLUTION
from confpred.problem.device import Device
from confpred.training.dataset import read_dataset

ROOT = Path(__file__).parents[1]
DEVICE = "h100"
DATA = Path("datasets") / DEVICE
SUITE = Path("datasets") / "suites" / "smoke.json"
NETWORK = "resnext50_32x4d"  # left out of the training, then predicted
SHOWN = 20

Measured = dict[Candidate, float]  # milliseconds

console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> None:
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="confpred-demo-") as folder:
        model = retrain(Path(folder) / "model")
        judge()
        layer = predict_network(model)
        ask_over_http(model, layer)
        device = gpu()
        if device is not None:
            sample(Path(folder) / "measurements")
            launch(device)


def heading(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def confpred(*arguments: str | Path) -> None:
    """Show a confpred command and run it; its failure ends the demo."""
    console.print(f"$ confpred {shlex.join(map(str, arguments))}", highlight=False, soft_wrap=True)
    finished = subprocess.run([program(), *arguments])
    if finished.returncode:
        sys.exit(finished.returncode)


def program() -> Path:
    return Path(sys.executable).with_name("confpred")


def retrain(model: Path) -> Path:
    heading(f"Retrain from the committed measurements, without {NETWORK}")
    confpred("train", DATA, "--exclude-network", NETWORK, "--out", model)
    return model


def judge() -> None:
    heading("Judge the choices on networks that were not trained on")
    confpred("evaluate", DATA)


def predict_network(model: Path) -> Problem:
    """Predict the left-out network's layers, beside what was measured; returns one of them."""
    heading(f"Predict the grouped layers of {NETWORK} for {DEVICE}")
    predictor = Predictor.load(model)
    measured = measured_of(NETWORK)
    table = Table("layer", "provider", "predicted, ms", "measured, ms", "fastest, ms", "regret")
    for column in table.columns[2:]:
        column.justify = "right"
    regrets = []
    for problem, times in measured.items():
        choice = best_measured(predictor, problem, times)
        if choice is None:
            continue
        ours, fastest = times[choice.candidate], min(times.values())
        regrets.append(ours / fastest)
        if len(regrets) <= SHOWN:
            figures = (f"{ms:.4f}" for ms in (choice.predicted_ms, ours, fastest))
            table.add_row(str(problem), choice.provider, *figures, f"{regrets[-1]:.3f}")
    console.print(table)
    mean = np.exp(np.log(regrets).mean())
    console.print(
        f"{len(regrets)} layers, {min(SHOWN, len(regrets))} shown; regret "
        f"{mean:.3f} in the geometric mean, {max(regrets):.3f} at worst"
    )
    return next(iter(measured))


def measured_of(network: str) -> dict[Problem, Measured]:
    """Every measured way to compute each problem of `network`, PyTorch's own among them."""
    dataset = read_dataset([DATA], DEVICE)
    found: dict[Problem, Measured] = {}
    for t in dataset.timings:
        if network in t.networks:
            times = found.setdefault(t.problem, {})
            pairs = zip(t.rows, t.time_ms, strict=True)
            times |= {Candidate(t.family, int(row)): ms for row, ms in pairs}
            if t.problem in dataset.pytorch_ms:
                times[PYTORCH_OPERATOR] = dataset.pytorch_ms[t.problem]
    return found


def best_measured(predictor: Predictor, problem: Problem, times: Measured) -> Choice | None:
    """The best-ranked config with a time to compare; None where no such config was measured."""
    ranked = predictor.rank(problem, DEVICE, top=MAX_TOP)
    return next((c for c in ranked if c.candidate in times), None)


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """The address of `confpred serve` on a free port, stopped at the end."""
    command = [program(), "serve", "--port", "0", "--no-access-log", "--model", str(model)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        said = []
        try:
            for line in process.stderr or ():
                said.append(line)
                if found := re.search(r"running on (http://\S+)", line):
                    yield found[1]
                    break
            else:
                sys.exit("".join([*said, "demo: the service did not start"]))
        finally:
            process.terminate()


def ask_over_http(model: Path, layer: Problem) -> None:
    heading("Ask the service")
    body = json.dumps({"device": DEVICE, "problem": layer.to_json()})
    with serving(model) as address:
        console.print(f"POST {address}/v1/predict\n{body}", highlight=False)
        header = {"content-type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/predict", body.encode(), header)
        with urllib.request.urlopen(request, timeout=30) as reply:
            console.print(f"{reply.status} {reply.reason}")
            console.print(reply.read().decode(), highlight=False)


def gpu() -> Device | None:
    """This machine's first GPU; None, saying why, where there is none that confpred knows."""
    if not device_count():
        console.print("No CUDA device here, so nothing is sampled or launched.")
        return None
    try:
        return device_of(0)
    except UnknownDevice as error:
        console.print(f"Nothing is sampled or launched: {error}")
        return None


def sample(out: Path) -> None:
    heading("Sample a small suite on this machine's GPU")
    confpred("sample", "--suite", SUITE, "--out", out, "--configs", "50", "--budget", "2m")


def launch(device: Device) -> None:
    """Run the suite's layers through the library's own operator, and time the chosen kernels beside
    PyTorch's operator in cuDNN's benchmark mode."""
    import torch

    from confpred.families.registry import all_families
    from confpred.measure import pytorch as operator
    from confpred.measure.kernels import measure

    heading("Launch the chosen kernels, beside PyTorch's operator in cuDNN's benchmark mode")
    predictor = Predictor.load()
    table = Table("layer", "source", "confpred, ms", "PyTorch, ms", "speed-up", "difference")
    for entry in read_suite(SUITE).entries:
        problem = entry.problem
        choice = predictor.choose(problem, device)
        theirs = operator.measure_pytorch(CONVOLUTION, problem, ordinal=0, seed=0)
        provider, config_id = choice.provider, choice.candidate.config_id
        if provider == PYTORCH:
            table.add_row(str(problem), provider, "", f"{theirs.time_ms:.4f}", "", "")
            continue
        family = all_families()[provider]
        (ours,) = measure(problem, family, [config_id], ordinal=0, seed=0, report=lambda row: None)
        (tensors,) = operator.operands(CONVOLUTION, problem, 1)
        out = library_call(problem, tensors).double()
        expected = CONVOLUTION.pytorch(problem, tensors).double()
        difference = torch.linalg.norm(out - expected) / torch.linalg.norm(expected)
        times = (f"{ours.time_ms:.4f}", f"{theirs.time_ms:.4f}")
        ratio = f"{theirs.time_ms / ours.time_ms:.2f}x"
        table.add_row(str(problem), choice.source, *times, ratio, f"{difference.item():.1e}")
    console.print(table)


def library_call(p: Problem, tensors: Mapping[str, Any]) -> Any:
    """What a user of confpred writes for the forward problem `p`."""
    from confpred import conv2d

    t = {name: x.permute(0, 3, 1, 2) if x.dim() == 4 else x for name, x in tensors.items()}
    return conv2d(
        t["in"],
        t["filter"],
        t.get("bias"),
        stride=p.stride,
        padding=p.padding,
        dilation=p.dilation,
        groups=p.groups,
        activation=None if p.activation == "none" else p.activation,
        residual=t.get("residual"),
    )


if __name__ == "__main__":
    main()
