"""The losses of training with confpred beside those of PyTorch with other cuDNN algorithms.

``benchmarks/networks.py --losses`` starts this file with a task, and this file starts itself, once
a way of training; all of them run at once. Weights, images and their order are the same, so what
differs is rounding. The images can be learned: each class has a pattern of its own, under noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from network_models import Setting
from network_results import curve_difference

BATCH = 32
CLASSES = 10
RATE = 0.02
BASE = "cuDNN heuristics"
#: What ``torch.backends.cudnn`` is set to; confpred is on in the last.
WAYS: dict[str, dict[str, bool]] = {
    BASE: {},
    "cuDNN heuristics again": {},
    "cuDNN benchmark": {"benchmark": True},
    "cuDNN deterministic": {"deterministic": True},
    "enable": {},
}


def losses(way: str, setting: Setting, steps: int) -> list[float]:
    """The loss of each step, of training in this process."""
    import torch
    import torch.nn.functional as F
    from network_models import network

    for flag, value in WAYS[way].items():
        setattr(torch.backends.cudnn, flag, value)
    if way == "enable":
        import confpred

        confpred.enable()  # type: ignore[attr-defined]
    model = network(setting).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, foreach=True)
    generator = torch.Generator(setting.device).manual_seed(2)
    drawn: dict[str, Any] = {"generator": generator, "device": setting.device}
    coarse = torch.randn(CLASSES, 3, 7, 7, **drawn)
    patterns = F.interpolate(coarse, size=(setting.size, setting.size), mode="bilinear")
    curve = []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (setting.batch,), **drawn)
        noise = torch.randn(setting.batch, 3, setting.size, setting.size, **drawn)
        images = patterns[labels] + 0.5 * noise
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            out = model(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(out.float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.detach())
    return [float(loss) for loss in torch.stack(curve)]


def measure(setting: Setting, steps: int) -> dict[str, Any]:
    """All curves, and how far each is from `BASE`'s in the mean."""
    running = {
        way: subprocess.Popen(
            [sys.executable, __file__, "--once", way, json.dumps(asdict(setting)), str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way in WAYS
    }
    curves, errors = {}, []
    for way, process in running.items():
        printed, complaints = process.communicate()
        if process.returncode:
            errors.append(f"{way}: {complaints.strip()[-300:]}")
        else:
            curves[way] = json.loads(printed.splitlines()[-1])
    found: dict[str, Any] = {"batch": setting.batch, "steps": steps}
    if BASE in curves:
        found["mean_difference"] = {
            way: curve_difference(curve, curves[BASE])
            for way, curve in curves.items()
            if way != BASE
        }
        found["first"], found["last"] = curves[BASE][0], curves[BASE][-1]
        found["every_20th"] = {way: curve[::20] for way, curve in curves.items()}
    return found | ({"error": "; ".join(errors)} if errors else {})


def main() -> None:
    if sys.argv[1] == "--once":
        setting = Setting(**json.loads(sys.argv[3]))
        print(json.dumps(losses(sys.argv[2], setting, int(sys.argv[4]))))
        return
    task, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    sizes = {"size": task["size"], "device": task["device"]}
    batch = BATCH if task["device"] == "cuda" else 2
    setting = Setting(task["network"], "training", batch, **sizes)
    out.write_text(json.dumps(measure(setting, task["steps"])))


if __name__ == "__main__":
    main()
