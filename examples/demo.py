"""The whole of confpred in a minute: retrain, judge, predict, serve; with a GPU also launch.

    make demo

Everything that this script makes goes to a temporary folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from confpred import Predictor, Problem
from confpred.cli.learn import show_steps
from confpred.cuda.driver import device_count, device_of
from confpred.data.suites import read_suite
from confpred.errors import UnknownDevice
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.model.folder import model_folders
from confpred.predict.choice import MAX_TOP, Choice
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import Device
from confpred.training.dataset import read_dataset

ROOT = Path(__file__).parents[1]
DEVICE = "h100"
DATA = Path("datasets") / DEVICE
HOLDOUT = Path("datasets") / "holdout" / DEVICE
SHIPPED = model_folders(ROOT / "models")[DEVICE].relative_to(ROOT)
SUITE = Path("datasets") / "suites" / "smoke.json"
FAMILIES = ("grouped_fprop", "depthwise_fprop")  # that the demo trains; there are more
PROBLEMS = 120  # ... and on so many problems of them
NETWORK = "resnext50_32x4d"  # left out of the training, then predicted
SHOWN = 8
SUMMARY = "Summary"
CONFPRED = (sys.executable, "-m", "confpred")

Measured = dict[Candidate, float]  # milliseconds

console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> None:
    os.chdir(ROOT)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="confpred-demo-") as name:
        folder = Path(name)
        lines = [retrain(folder / "model"), judge(folder / "verdict.json")]
        layer, line = predict_network(folder / "model")
        lines += [line, ask_over_http(folder / "model", layer)]
        device = gpu()
        if device is not None:
            sample(folder / "measurements")
            lines += [launch(device), *time_network()]
        else:
            lines += ["GPU        none that confpred knows here: nothing was sampled or launched"]
            lines += [optimize_here()]
    heading(f"{SUMMARY}: {time.monotonic() - began:.0f} s; regret is time / time of the fastest")
    next_steps = (
        "Next: confpred.explain(model, images) of a network of yours, then optimize and status",
        "      (docs/programs.md), and on a GPU: confpred benchmark FILE.py:FUNCTION",
    )
    for line in (*lines, *next_steps):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def heading(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def confpred(*arguments: str | Path | int) -> None:
    """Show a confpred command and run it; its failure ends the demo."""
    words = list(map(str, arguments))
    console.print(f"$ confpred {shlex.join(words)}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    finished = subprocess.run([*CONFPRED, *words], env={**wide(), **os.environ})
    if finished.returncode:
        sys.exit(finished.returncode)


def wide() -> dict[str, str]:
    """Environment of a command whose output no terminal gives a width."""
    return {} if sys.stdout.isatty() else {"COLUMNS": str(console.width)}


def retrain(model: Path) -> str:
    heading(f"1. Retrain on a part of the committed measurements, without {NETWORK}")
    families = [word for name in FAMILIES for word in ("--family", name)]
    part = (*families, "--problems", PROBLEMS, "--exclude-network", NETWORK)
    confpred("train", DATA, *part, "--out", model)
    card = json.loads((model / "card.json").read_text())
    rows, regret = card["data"]["rows"], card["metrics"]["regret"]
    return (
        f"Retrained  on {rows:,} timed configs; regret on networks held out: "
        f"{regret['geomean']:.3f}"
    )


def judge(verdict: Path) -> str:
    heading("2. Judge the shipped model on layers that it has not seen, all configs measured")
    told = ("--holdout", HOLDOUT, "--model", SHIPPED, "--holdout-only", "--json", verdict)
    confpred("evaluate", DATA, *told)
    found = json.loads(verdict.read_text())["holdout"]
    return (
        f"Judged     {found['model']}: regret {found['whole']['geomean']:.3f} on "
        f"{found['problems']} layers of {found['networks']} networks, "
        f"{found['speed']['benchmark']:.2f}x as fast as PyTorch"
    )


def predict_network(model: Path) -> tuple[Problem, str]:
    """Predict the left-out network's layers, beside what was measured; returns one of them."""
    heading(f"3. Predict layers of {NETWORK} for {DEVICE} by the model of step 1")
    predictor = Predictor.load(model)
    with show_steps() as say:
        say("reading measurements", 0, 1)
        measured = measured_of(NETWORK)
        say("reading measurements", 1, 1)
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
    console.print(f"{len(regrets)} layers, {min(SHOWN, len(regrets))} shown")
    mean = np.exp(np.log(regrets).mean())
    return list(measured)[-1], (
        f"Predicted  {len(regrets)} layers of {NETWORK}, left out of training: regret {mean:.3f}, "
        f"{max(regrets):.2f} at worst"
    )


def measured_of(network: str) -> dict[Problem, Measured]:
    """Every measured way to compute each problem of `network` that one of ``FAMILIES`` computes,
    PyTorch's operator among them."""
    dataset = read_dataset([DATA], DEVICE)
    asked = {t.problem for t in dataset.timings if network in t.networks and t.family in FAMILIES}
    found: dict[Problem, Measured] = {}
    for t in dataset.timings:
        if t.problem in asked:
            times = found.setdefault(t.problem, {})
            pairs = zip(t.rows, t.time_ms, strict=True)
            times |= {Candidate(t.family, int(row)): ms for row, ms in pairs}
            if t.problem in dataset.pytorch_ms:
                times[PYTORCH_OPERATOR] = dataset.pytorch_ms[t.problem]
    return found


def best_measured(predictor: Predictor, problem: Problem, times: Measured) -> Choice | None:
    """Return the best-ranked config with a time to compare; None where no such config was
    measured."""
    ranked = predictor.rank(problem, DEVICE, top=MAX_TOP)
    return next((c for c in ranked if c.candidate in times), None)


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Serve on a free port until the block ends; the value is the address."""
    command = [*CONFPRED, "serve", "--port", "0", "--no-access-log", "--model", str(model)]
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


def ask_over_http(model: Path, layer: Problem) -> str:
    heading("4. Ask for one of them over HTTP")
    body = json.dumps({"device": DEVICE, "problem": layer.to_json()})
    console.print(f"$ confpred serve --port 0 --model {model}", highlight=False)
    with serving(model) as address:
        console.print(f"POST {address}/v1/predict\n{body}", highlight=False)
        header = {"content-type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/predict", body.encode(), header)
        asked = time.monotonic()
        with urllib.request.urlopen(request, timeout=30) as reply:
            answer, took = reply.read().decode(), time.monotonic() - asked
            console.print(f"{reply.status} {reply.reason}\n{answer}", highlight=False)
    ((choice,),) = json.loads(answer)["choices"]
    return (
        f"Asked      confpred serve over HTTP: {choice['provider']} for one of them, "
        f"{took * 1e3:.0f} ms"
    )


def gpu() -> Device | None:
    """Return this machine's first GPU; None, saying why, where there is none that confpred
    knows."""
    if not device_count():
        console.print("No CUDA device here, so nothing is sampled or launched.")
        return None
    try:
        return device_of(0)
    except UnknownDevice as error:
        console.print(f"Nothing is sampled or launched: {error}")
        return None


def sample(out: Path) -> None:
    heading("5. Sample a few problems on this machine's GPU")
    confpred("sample", "--suite", SUITE, "--out", out, "--configs", 10, "--budget", "20s")


def launch(device: Device) -> str:
    """Run the suite's layers through the library's own operator, and time the chosen kernels beside
    PyTorch's operator in cuDNN's benchmark mode."""
    import torch

    from confpred.families.registry import all_families
    from confpred.measure import pytorch as operator
    from confpred.measure.kernels import measure

    heading("6. Launch the chosen kernels, beside PyTorch's operator in cuDNN's benchmark mode")
    predictor, ratios = Predictor.load(), []
    table = Table("layer", "source", "confpred, ms", "PyTorch, ms", "speed-up", "difference")
    for entry in read_suite(SUITE).entries:
        problem = entry.problem
        console.print(f"timing {problem}", highlight=False)
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
        ratios.append(theirs.time_ms / ours.time_ms)
        table.add_row(
            str(problem), choice.source, *times, f"{ratios[-1]:.2f}x", f"{difference.item():.1e}"
        )
    console.print(table)
    best = f", {max(ratios):.2f}x PyTorch at best" if ratios else ""
    return f"Launched   {len(ratios)} of {table.row_count} layers as confpred kernels{best}"


def library_call(p: Problem, tensors: Mapping[str, Any]) -> Any:
    """Return confpred's call for the forward problem `p`."""
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


def optimize_here() -> str:
    """Optimize a small network without a GPU, and say what that does."""
    import torch

    from confpred import optimize

    heading("5. Optimize a network, and ask whether it is on")
    model, images = network().eval(), torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        optimize(model)(images)
    return show_status(model)


def show_status(model: Any) -> str:
    from confpred import status

    console.print("$ python: confpred.status(model)", highlight=False)
    console.print(str(status(model)), highlight=False, markup=False, soft_wrap=True)
    return f"Status     {status(model).short}"


def time_network() -> tuple[str, str]:
    """Time a small network in inference, before and after `confpred.optimize`."""
    import torch

    from confpred import optimize

    heading("7. Time a network before and after confpred.optimize")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    shape = {"device": "cuda", "dtype": torch.float16}
    model = network().to(**shape, memory_format=torch.channels_last).eval()
    images = torch.randn(32, 3, 224, 224, **shape).to(memory_format=torch.channels_last)
    expected, before = forward(model, images)
    console.print(f"before: {before:.3f} ms a forward of {len(images)} images")
    optimize(model, images)
    found, after = forward(model, images)
    console.print(f"after:  {after:.3f} ms")
    error = torch.linalg.norm((found - expected).float()) / torch.linalg.norm(expected.float())
    line = (
        f"Optimized  a small ResNeXt: {before:.2f} -> {after:.2f} ms a forward, "
        f"{before / after:.2f}x (difference {error.item():.0e})"
    )
    return line, show_status(model)


def network() -> Any:
    """Return a small ResNeXt: twelve residual blocks of grouped 3x3 layers, 32 groups of width 4 to
    16."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, c: int, k: int, stride: int) -> None:
            super().__init__()
            grouped = nn.Conv2d(k, k, 3, stride, 1, groups=32, bias=False)
            self.first = nn.Sequential(nn.Conv2d(c, k, 1, bias=False), nn.BatchNorm2d(k), nn.ReLU())
            self.second = nn.Sequential(grouped, nn.BatchNorm2d(k), nn.ReLU())
            self.third = nn.Sequential(nn.Conv2d(k, k, 1, bias=False), nn.BatchNorm2d(k))
            self.skip = nn.Conv2d(c, k, 1, stride, bias=False) if c != k else nn.Identity()
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.relu(self.third(self.second(self.first(x))) + self.skip(x))

    layers = [nn.Conv2d(3, 64, 7, 4, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for c, k, stride in ((64, 128, 1), (128, 256, 2), (256, 512, 2)):
        layers += [Block(c, k, stride), *(Block(k, k, 1) for _ in range(3))]
    return nn.Sequential(*layers)


def forward(model: Any, images: Any) -> tuple[Any, float]:
    """Return the outputs, and the median of 20 forwards by CUDA events, in milliseconds, after 5
    that do not count."""
    import torch

    times = []
    with torch.inference_mode():
        for _ in range(25):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            outputs = model(images)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return outputs, statistics.median(times[5:])


if __name__ == "__main__":
    main()
