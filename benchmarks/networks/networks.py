"""Whole networks with and without confpred: wall time, GPU time, first step, peak memory.

    python -m benchmarks.networks.networks [--suite tuned|broad] [--networks A,B]
        [--modes inference,training] [--batches 1,16,128] [--ways eager,again,optimize]
        [--budget SECONDS] [--resume] [--gpus N] [--ahead N]

The suite *tuned* is of timm's networks on images of 224 x 224, which confpred was developed with;
*broad* is of many kinds of networks that it was not (`benchmarks.networks.broad_models`), with
batches of their own. Weights and inputs are random; what is four-dimensional is channels last.
*Inference* is the model in float16 under ``torch.no_grad``; *training* is forward under autocast to
float16, loss, backward, and SGD with momentum (``foreach``). cuDNN's benchmark mode is on.

Each network, mode and batch has a process of its own; the next one imports meanwhile. All ways are
timed in it, in turns (`confpred.pytorch.ways`). *Wall time* is of the step as a user runs the
way; *GPU time* is that of one CUDA graph of the whole step. ``again`` is eager once more: its ratio
is the noise. Each way's first output, in training all gradients, is compared with float32; a way
that is much further from it than eager PyTorch is recorded as an error. *First step* is the first
call, compilation included; a way finds what those before it compiled and imported. So ``--first``
measures first steps alone, each way in two processes of its own: with empty caches of kernels
(``cold_s``), and with what the first one compiled (``first_s``, and memory). Both include what a
process's first compilation imports.

Most of a run's time is compilation, so ``--ahead N`` fills the caches alone, by N processes at once
on each GPU. A run after it says ``--compiled``: its first steps find full caches. It forgets what
Inductor chose meanwhile by timing, as the processes disturbed one another.

Results are merged: rows that are measured again are replaced, and each row names its run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.provenance import RESULTS, is_published, provenance, write

PROGRAM = (sys.executable, "-m", "benchmarks.networks.network_steps")
NETWORKS = (
    "rexnet_150", "mnasnet_100", "densenet121", "seresnext26t_32x4d", "xception41",
    "inception_next_tiny", "ghostnet_100", "resnet18", "resnet50", "efficientnet_b0",
    "convnext_tiny", "mobilenetv3_large_100", "mobilenetv4_conv_medium", "regnety_040",
    "regnetx_016", "resnext50_32x4d", "fastvit_sa12",
)  # fmt: skip
INFERENCE, TRAINING = MODES = ("inference", "training")
BATCHES = (1, 16, 32, 128)
#: Ways of running a network. ``again`` is eager once more: the two differ by the noise.
WAYS = (
    "eager", "again", "optimize", "inductor=False", "freeze", "compile", "reduce-overhead",
)  # fmt: skip
STOPPED = "stopped for want of time"
LEAST_S = 20  # less than this left of the budget, and no new process is started
#: Ways that show what a part of another way brings, and a module with its function that they do
#: without; measured where they are asked for.
PARTS = {
    "without convert": ("inductor=False", "rewrite.passes", "convert_together"),
    "without norms": ("inductor=False", "rewrite.normalising", "lower_norms"),
    "optimize without norms": ("optimize", "rewrite.normalising", "lower_norms"),
    "without volumes": ("optimize", "rewrite.layouts", "_saved_ms"),
    "without recomputing": ("optimize", "rewrite.normalising", "recompute_norms"),
}
KEY = ("network", "mode", "batch", "way")


@dataclass(frozen=True, slots=True)
class Kind:
    """A network of the broad suite: what such networks are for, up to a comma, by which a table
    groups; the shape of an input without its batch; modes with their batches."""

    kind: str
    shape: tuple[int, ...]
    steps: tuple[tuple[str, int], ...]


_IMAGE, _LARGE = (3, 224, 224), (3, 512, 512)
#: The broad suite, listed before anything is tuned by it: batches fill the GPU where such networks
#: are run so, and are 1 where they are served so. Functions of these names in
#: `benchmarks.networks.broad_models` make them; the others are timm's.
BROAD = {
    "mobilenetv4_conv_medium": Kind(
        "classification, depthwise", _IMAGE, ((INFERENCE, 128), (TRAINING, 128))
    ),
    "fastvit_sa12": Kind("classification, depthwise", _IMAGE, ((INFERENCE, 64), (TRAINING, 64))),
    "regnety_016": Kind("classification, grouped", _IMAGE, ((INFERENCE, 128), (TRAINING, 64))),
    "seresnext50_32x4d": Kind("classification, grouped", _IMAGE, ((INFERENCE, 64), (TRAINING, 64))),
    "hrnet_w18": Kind("classification, dense", _IMAGE, ((INFERENCE, 128),)),
    "repvgg_a2": Kind("classification, dense", _IMAGE, ((INFERENCE, 128), (TRAINING, 128))),
    "resnet50": Kind("classification, dense", _IMAGE, ((INFERENCE, 1),)),
    "eca_nfnet_l0": Kind(
        "classification, normaliser-free", _IMAGE, ((INFERENCE, 64), (TRAINING, 64))
    ),
    "detector": Kind("detection", (3, 640, 640), ((INFERENCE, 1), (INFERENCE, 16), (TRAINING, 16))),
    "pyramid_detector": Kind("detection", _LARGE, ((INFERENCE, 4),)),
    "unet": Kind("segmentation", _LARGE, ((INFERENCE, 8), (TRAINING, 8))),
    "dilated_pyramid": Kind("segmentation", _LARGE, ((INFERENCE, 8), (TRAINING, 8))),
    "diffusion_unet": Kind("diffusion", (4, 64, 64), ((INFERENCE, 2), (TRAINING, 8))),
    "latent_decoder": Kind("diffusion", (4, 64, 64), ((INFERENCE, 1),)),
    "large_latent_decoder": Kind("diffusion", (4, 128, 128), ((INFERENCE, 1),)),
    "edsr": Kind("super-resolution", (3, 256, 256), ((INFERENCE, 1), (TRAINING, 16))),
    "separable_sr": Kind("super-resolution", (3, 256, 256), ((INFERENCE, 1),)),
    "replknet": Kind("large filters", _IMAGE, ((INFERENCE, 32), (TRAINING, 16))),
    "inception_next_tiny": Kind("large filters", _IMAGE, ((INFERENCE, 64),)),
    "x3d": Kind("video", (3, 13, 160, 160), ((INFERENCE, 8), (TRAINING, 8))),
    "r2plus1d": Kind("video", (3, 16, 112, 112), ((INFERENCE, 4),)),
    "video_decoder": Kind("video", (16, 3, 30, 52), ((INFERENCE, 1),)),
    "unet_volumes": Kind("volumes", (1, 96, 96, 96), ((INFERENCE, 1), (TRAINING, 2))),
    "conformer": Kind("speech", (500, 256), ((INFERENCE, 16), (TRAINING, 16))),
    "conv_tasnet": Kind("speech", (1, 32000), ((TRAINING, 4),)),
    "hifigan": Kind("speech", (80, 128), ((INFERENCE, 1), (TRAINING, 16))),
    "short_lines": Kind("sequences", (2048, 1024), ((INFERENCE, 4), (TRAINING, 4))),
}


class Started:
    """A process of ``network_steps.py`` that imports, and waits for its turn at the GPU."""

    def __init__(self, task: dict[str, Any], gpu: int = 0) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.out = Path(self.folder.name) / "out.json"
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if gpu else {})
        environment |= task.get("environment", {})
        command = [*PROGRAM, json.dumps(task), str(self.out)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def finish(self, seconds: float) -> tuple[Any, str]:
        """Let it run, and return what it wrote, None if nothing, and its last words.

        With no seconds it does not run.
        """
        with self.folder:
            try:
                if seconds <= 0:
                    raise subprocess.TimeoutExpired("", seconds)
                _, errors = self.process.communicate("go\n", timeout=seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                _, errors = self.process.communicate()
                return None, f"{STOPPED}: {_last(errors)}".rstrip(": ")
            print(errors[-3000:], file=sys.stderr, end="")
            return (
                json.loads(self.out.read_text()) if self.out.exists() else None
            ), f"exit {self.process.returncode}: {_last(errors) or 'no message'}"


def _last(errors: str) -> str:
    return (errors.strip().splitlines() or [""])[-1][-200:]


def rows_of(task: dict[str, Any], found: Any, error: str) -> list[dict[str, Any]]:
    """Return one row a way."""
    where = {key: task[key] for key in ("network", "mode", "batch")}
    found = found or {way: {"error": error} for way in task["ways"]}
    return [where | {"way": way} | what for way, what in found.items()]


def merged(
    old: dict[str, Any], new: Sequence[dict[str, Any]], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return `old` with the rows of `new` in place of those of the same key; `facts` is the
    provenance of the new ones."""
    runs = dict(old.get("runs", {}))
    free = str(1 + max(map(int, runs), default=0))  # not their count: some runs have no row left
    name = next((n for n, known in runs.items() if known == facts), free)
    runs[name] = facts
    rows = {tuple(row[k] for k in KEY): row for row in old.get("rows", ())}
    rows |= {tuple(row[k] for k in KEY): row | {"run": name} for row in new}
    used = {row["run"] for row in rows.values()}
    return facts | {
        "runs": {n: f for n, f in runs.items() if n in used},
        "rows": [rows[key] for key in sorted(rows)],
    }


def measure(told: argparse.Namespace) -> None:
    """Measure the suite that is asked for, compile it, or draw its results."""
    name = "broad" if told.suite == "broad" else "networks"
    if told.plot:
        from benchmarks.networks.network_tables import plot

        plot(json.loads((told.out / "broad.json").read_text()), told.out / "broad.png")
    elif told.ahead:
        path = told.out / f"{name}.json"
        compile_ahead(tasks_of(told, json.loads(path.read_text()) if path.exists() else {}), told)
    elif told.first:
        with tempfile.TemporaryDirectory() as folder:
            run(f"{name}_first", partial(first_steps_of, folder), told)
    else:
        run(name, tasks_of, told)


def compile_ahead(tasks: Sequence[dict[str, Any]], told: argparse.Namespace) -> None:
    """Run each task's compiled ways once."""
    deadline = time.time() + told.budget

    def once(index: int, task: dict[str, Any]) -> None:
        ways = [way for way in task["ways"] if way not in ("eager", "again")]
        alone = task | {"ways": ways, "rounds": 1, "turn_s": 0.0, "tried_plans": 1}
        left = deadline - time.time()
        if left < LEAST_S:
            return
        begun = time.time()
        found, error = Started(alone, index % told.gpus).finish(left)
        print(*(task[k] for k in KEY[:3]), f"{time.time() - begun:.0f} s", not found and error)

    with ThreadPoolExecutor(told.ahead * told.gpus) as threads:
        for done in [threads.submit(once, *numbered) for numbered in enumerate(tasks)]:
            done.result()


def forget_timings() -> None:
    """Forget which of Inductor's configs were fastest."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for kept in Path(cache_dir()).rglob("*.best_config"):
        kept.unlink()


def run(
    name: str, tasks_of: Callable[..., list[dict[str, Any]]], told: argparse.Namespace,
    summed: Callable[[dict[str, Any]], dict[str, Any]] = lambda result: result,
) -> None:  # fmt: skip
    """Measure the tasks that are left of a result, and write it, as `summed` makes it, after each
    process, so that a run that is cut off loses one. Each GPU takes the next task; they share the
    host. The last tasks wait for whichever GPU is free."""
    path = told.out / f"{name}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    deadline = time.time() + told.budget
    facts = provenance("torch", "timm", gpu=told.device == "cuda")
    facts |= {"gpus": told.gpus} if told.gpus > 1 else {}
    if told.compiled:
        facts |= {"compiled": "ahead"}
        forget_timings()
    waiting, lock = deque(tasks_of(told, result)), Lock()

    def start(gpu: int) -> tuple[dict[str, Any], Started] | None:
        with lock:
            task = waiting.popleft() if waiting else None
        return None if task is None else (task, Started(task, gpu))

    def work(gpu: int) -> None:
        nonlocal result
        ahead: tuple[dict[str, Any], Started] | None = None
        while (ready := ahead or start(gpu)) is not None:
            task, process = ready
            ahead = start(gpu) if len(waiting) >= told.gpus else None
            left = deadline - time.time()
            if left < LEAST_S:
                print("left out for want of time:", *(task[k] for k in KEY[:3]))
                process.finish(0)
                continue
            found, error = process.finish(left)
            if told.first and found:
                cold, (found, error) = found, Started(task, gpu).finish(deadline - time.time())
                for way, figures in (found or {}).items():
                    figures["cold_s"] = cold[way].get("first_s")
            if error.startswith(STOPPED):
                print(*(task[k] for k in KEY[:3]), error)
                continue
            rows = rows_of(task, found, error)
            with lock:
                for row in rows:
                    print(json.dumps(row), flush=True)
                result = summed(merged(result, rows, facts))
                write(name, result, told.out)

    with ThreadPoolExecutor(told.gpus) as threads:
        for done in [threads.submit(work, gpu) for gpu in range(told.gpus)]:
            done.result()


def tasks_of(told: argparse.Namespace, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a task a process: each batch, network and mode, of first steps each way, without what
    `result` has."""
    known = {tuple(row[k] for k in KEY) for row in result.get("rows", ()) if told.resume}
    steps: list[tuple[str, str, int, tuple[int, ...]]]
    if told.suite == "broad":
        steps = [
            (n, m, batch, BROAD[n].shape) for n in told.networks for m, batch in BROAD[n].steps
        ]
    else:
        shape = (3, told.size, told.size)
        each = ((b, n, m) for b in told.batches for n in told.networks for m in MODES)
        steps = [(n, m, b, shape) for b, n, m in each]
    tasks = []
    for network, mode, batch, shape in steps:
        if mode not in told.modes:
            continue
        where = {"network": network, "mode": mode, "batch": batch, "shape": shape}
        where |= {"device": told.device, "rounds": told.rounds, "turn_s": told.turn}
        ways = [w for w in told.ways if w != "freeze" or mode == INFERENCE]
        for some_ways in [[way] for way in ways] if told.first else [ways]:
            if not any((network, mode, batch, way) in known for way in some_ways):
                tasks.append(where | {"ways": some_ways})
    return tasks


def first_steps_of(
    folder: str, told: argparse.Namespace, result: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the tasks, each with caches of its own in `folder`."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "CONFPRED_CACHE_DIR")
    return [
        task | {"environment": {name: f"{folder}/{number}/{name}" for name in names}}
        for number, task in enumerate(tasks_of(told, result))
    ]


def some(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of an option that names some of `allowed`, separated by commas."""

    def words(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",")]
        for word in found:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
        return found

    return words


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", choices=("tuned", "broad"), default="tuned")
    parser.add_argument("--networks", type=some((*NETWORKS, *BROAD)), help="default: the suite's")
    parser.add_argument("--modes", type=some(MODES), default=list(MODES))
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=list(BATCHES)
    )
    parser.add_argument("--ways", type=some((*WAYS, *PARTS)), default=list(WAYS))
    parser.add_argument("--budget", type=float, default=86400, help="seconds; then nothing starts")
    parser.add_argument("--gpus", type=int, default=1, help="processes side by side, one on each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=0.05, help="seconds of a turn")
    parser.add_argument("--resume", action="store_true", help="leave out what is recorded")
    parser.add_argument(
        "--ahead", type=int, default=0, metavar="N", help="only compile, by N processes on a GPU"
    )
    parser.add_argument("--compiled", action="store_true", help="record that caches are full")
    parser.add_argument("--plot", action="store_true", help="only draw the broad suite's results")
    parser.add_argument("--first", action="store_true", help="first steps alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial")
    parser.add_argument("--size", type=int, default=224, help="of images; other sizes are a trial")
    parser.add_argument("--out", type=Path, default=RESULTS, help="as in benchmarks/results/h100")
    told = parser.parse_args(words)
    if told.first:
        told.rounds, told.turn = 1, 0.001
    of_suite = BROAD if told.suite == "broad" else NETWORKS
    told.networks = [n for n in told.networks or of_suite if n in of_suite]
    trial = told.device == "cpu" or told.size != 224
    if trial and is_published(told.out):
        parser.error("a trial is written somewhere else: name a folder with --out")
    return told


if __name__ == "__main__":
    measure(parsed())
