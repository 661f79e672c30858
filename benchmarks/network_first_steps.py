"""The first step of a network in a new process, in seconds, of PyTorch and of confpred.

``benchmarks/networks.py --first-step`` starts this file with a task, and this file starts itself,
once a measurement. The clock starts when the model and the images are on the GPU and ends when the
GPU is done with the first step. So it holds the loading of cuDNN and cuBLAS and the choice of their
algorithms, and of confpred everything, from its import on: its model, what it compiles, and the
time of ``confpred.optimize()``. *Cold* is with an empty kernel cache, *warm* with the one that a
process before it has filled. With confpred, cuDNN's heuristics choose for all other layers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from network_models import Setting

BATCH = 32
THEIRS = {"cuDNN heuristics": False, "cuDNN benchmark": True}
OURS = ("enable", "optimize")


def first_step_s(who: str, setting: Setting) -> float:
    """Seconds of the first step in this process, which must be new."""
    import torch
    from network_models import images_and_labels, network, optimized, prepared, step_of

    torch.backends.cudnn.benchmark = THEIRS.get(who, False)
    model = prepared(network(setting), setting)
    data = images_and_labels(setting)
    setting.synchronize()
    start = time.perf_counter()
    if who == "enable":
        import confpred

        confpred.enable()  # type: ignore[attr-defined]
    elif who == "optimize":
        model = optimized(model, data[0], setting)
    step_of(model, model, setting, data)()
    setting.synchronize()
    return time.perf_counter() - start


def in_new_process(who: str, setting: Setting, cache: str) -> float:
    command = [sys.executable, __file__, "--once", who, json.dumps(asdict(setting))]
    environment = os.environ | {"CONFPRED_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{who}: {done.stderr.strip()[-300:]}")
    return float(done.stdout.split()[-1])


def measure(setting: Setting, processes: int) -> dict[str, Any]:
    """Median seconds of each kind of start, and all of them; the errors of those that failed."""
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for _ in range(processes):
        for who in (*THEIRS, *OURS):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm") if who in OURS else ("",):
                    name = f"{who}, {state}" if state else who
                    try:
                        times.setdefault(name, []).append(in_new_process(who, setting, cache))
                    except RuntimeError as error:
                        errors[name] = str(error)
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    found: dict[str, Any] = {"batch": setting.batch, "seconds": medians, "all_seconds": times}
    return found | ({"error": "; ".join(errors.values())[:1000]} if errors else {})


def main() -> None:
    if sys.argv[1] == "--once":
        print(first_step_s(sys.argv[2], Setting(**json.loads(sys.argv[3]))))
        return
    task, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    sizes = {"size": task["size"], "device": task["device"]}
    batch = BATCH if task["device"] == "cuda" else 2
    setting = Setting(task["network"], task["mode"], batch, **sizes)
    out.write_text(json.dumps(measure(setting, task["processes"])))


if __name__ == "__main__":
    main()
