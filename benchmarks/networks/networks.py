"""Whole networks with and without confpred: wall time, GPU time, first step, peak memory.

    python -m benchmarks.networks.networks [--networks A,B] [--modes inference,training]
        [--batches 1,16,128] [--ways eager,again,optimize] [--budget SECONDS] [--resume]

timm's networks with random weights on random images of 224 x 224, channels last. *Inference* is the
model in float16 under ``torch.no_grad``; *training* is forward under autocast to float16,
cross-entropy, backward, and SGD with momentum (``foreach``). cuDNN's benchmark mode is on.

Each network, mode and batch has a process of its own; the next one imports meanwhile. All ways are
timed in it, in random order in rounds. A turn is one step that is not timed, a synchronisation, and
as many steps as take ``--turn`` seconds, until the device is done with the last. *Wall time* is
that, as a user runs the way; *GPU time* is that of one CUDA graph of the whole step. A figure is
the median over the rounds, a ratio the median of the rounds' ratios. ``again`` is eager once more:
its ratio is the noise. Each way's first output, in training all gradients, is compared with
float32; a way that is much further from it than eager PyTorch is recorded as an error. *First step*
is the first call, compilation included. Kernels that an earlier process compiled are in the caches;
with ``--cold`` the caches are empty, and the result is ``networks_cold.json``.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, is_published, provenance, write

STEPS = (sys.executable, "-m", "benchmarks.networks.network_steps")
NETWORKS = (
    "rexnet_150", "mnasnet_100", "densenet121", "seresnext26t_32x4d", "xception41",
    "inception_next_tiny", "ghostnet_100", "resnet18", "resnet50", "efficientnet_b0",
    "convnext_tiny", "mobilenetv3_large_100", "mobilenetv4_conv_medium", "regnety_040",
    "regnetx_016", "resnext50_32x4d", "fastvit_sa12",
)  # fmt: skip
MODES, BATCHES = ("inference", "training"), (1, 16, 32, 128)
#: Ways of running a network. ``again`` is eager once more: the two differ by the noise.
WAYS = ("eager", "again", "optimize", "freeze", "compile", "reduce-overhead", "inductor")
LEAST_S = 20  # less than this left of the budget, and no new process is started
#: Ways that show what a part of `optimize` brings, a module and its function that they do without;
#: measured where they are asked for.
PARTS = {
    "without convert": ("rewrite.passes", "convert_together"),
    "without norms": ("rewrite.training", "serve_norms"),
}
KEY = ("network", "mode", "batch", "way")


class Started:
    """A process of ``network_steps.py`` that imports, and waits for its turn at the GPU."""

    def __init__(self, task: dict[str, Any], cold: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.out = Path(self.folder.name) / "out.json"
        environment = dict(os.environ)
        if cold:
            environment |= {
                "TORCHINDUCTOR_CACHE_DIR": f"{self.folder.name}/inductor",
                "CONFPRED_CACHE_DIR": f"{self.folder.name}/kernels",
            }
        command = [*STEPS, json.dumps(task), str(self.out)]
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
                self.process.communicate()
                return None, "stopped for want of time"
            if errors:
                print(errors[-3000:], file=sys.stderr)
            last = (errors.strip().splitlines() or ["no message"])[-1]
            return (
                json.loads(self.out.read_text()) if self.out.exists() else None
            ), f"exit {self.process.returncode}: {last[-200:]}"


def started_ahead(
    tasks: Sequence[dict[str, Any]], cold: bool
) -> Iterator[tuple[dict[str, Any], Started]]:
    """Yield each task with its process, after the next one has been started."""
    ready: deque[tuple[dict[str, Any], Started]] = deque()
    for task in tasks:
        ready.append((task, Started(task, cold)))
        if len(ready) > 1:
            yield ready.popleft()
    yield from ready


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
    name = next((n for n, known in runs.items() if known == facts), str(len(runs) + 1))
    runs[name] = facts
    rows = {tuple(row[k] for k in KEY): row for row in old.get("rows", ())}
    rows |= {tuple(row[k] for k in KEY): row | {"run": name} for row in new}
    used = {row["run"] for row in rows.values()}
    return facts | {
        "runs": {n: f for n, f in runs.items() if n in used},
        "rows": [rows[key] for key in sorted(rows)],
    }


def measure(told: argparse.Namespace) -> None:
    """Measure, writing after each process, so that a run that is cut off loses one."""
    name = "networks_cold" if told.cold else "networks"
    path = told.out / f"{name}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    deadline = time.time() + told.budget
    facts = provenance("torch", "timm", gpu=told.device == "cuda")
    tasks = tasks_of(told, result)
    for task, process in started_ahead(tasks, told.cold):
        left = deadline - time.time()
        if left < LEAST_S:
            print("left out for want of time:", *(task[k] for k in KEY[:3]))
            process.finish(0)
            continue
        rows = rows_of(task, *process.finish(left))
        for row in rows:
            print(json.dumps(row), flush=True)
        result = merged(result, rows, facts)
        write(name, result, told.out)


def tasks_of(told: argparse.Namespace, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a task a process: each batch, network and mode, without what `result` has."""
    known = {tuple(row[k] for k in KEY[:3]) for row in result.get("rows", ())}
    return [
        {
            "network": network,
            "mode": mode,
            "batch": batch,
            "ways": [w for w in told.ways if w != "freeze" or mode == "inference"],
            "device": told.device,
            "size": told.size,
            "rounds": told.rounds,
            "turn_s": told.turn,
        }
        for batch in told.batches
        for network in told.networks
        for mode in told.modes
        if not (told.resume and (network, mode, batch) in known)
    ]


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""

    def some(allowed: Sequence[str]) -> Any:
        def words(text: str) -> list[str]:
            found = [word.strip() for word in text.split(",")]
            for word in found:
                if word not in allowed:
                    raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
            return found

        return words

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", type=some(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--modes", type=some(MODES), default=list(MODES))
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=list(BATCHES)
    )
    parser.add_argument("--ways", type=some((*WAYS, *PARTS)), default=list(WAYS))
    parser.add_argument("--budget", type=float, default=86400, help="seconds; then nothing starts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=0.05, help="seconds of a turn")
    parser.add_argument("--resume", action="store_true", help="leave out what is recorded")
    parser.add_argument("--cold", action="store_true", help="with empty caches of kernels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial")
    parser.add_argument("--size", type=int, default=224, help="of images; other sizes are a trial")
    parser.add_argument("--out", type=Path, default=RESULTS, help="as in benchmarks/results/h100")
    told = parser.parse_args(words)
    trial = told.device == "cpu" or told.size != 224
    if trial and is_published(told.out):
        parser.error("a trial is written somewhere else: name a folder with --out")
    return told


if __name__ == "__main__":
    measure(parsed())
