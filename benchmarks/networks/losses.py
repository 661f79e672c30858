"""Losses of 200 steps of training: how far `optimize` takes a network from eager PyTorch,
beside how far PyTorch takes it from itself.

    python -m benchmarks.networks.losses [--networks A,B] [--steps 200] [--out FOLDER]

Every run starts with the same weights and sees the same images: eight batches of random patterns,
one a class, under noise. *again* is eager once more, as some of its sums are atomic; *others* is
eager with cuDNN's deterministic algorithms (without benchmark mode alone, PyTorch would take those
that it has found before); *inductor* is `optimize` with that option. A distance is the mean over
the steps of the difference between two losses, relative to eager's. Autocast to float16, SGD with
momentum.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.network_models import Setting
from benchmarks.provenance import folder_of, is_published, provenance, write

NETWORKS = ("resnet18", "mnasnet_100", "efficientnet_b0", "rexnet_150")
WAYS = ("eager", "again", "others", "optimize", "inductor")
BATCHES, CLASSES, RATE = 8, 10, 0.05


def batches(setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(CLASSES, 3, 8, 8, generator=generator)
    patterns = F.interpolate(coarse, (setting.size, setting.size), mode="bilinear")
    made = []
    for _ in range(BATCHES):
        labels = torch.randint(CLASSES, (setting.batch,), generator=generator)
        images = patterns[labels]
        images = images + 2 * torch.randn(images.shape, generator=generator)
        images = images.to(setting.device, memory_format=torch.channels_last)
        made.append((images, labels.to(setting.device)))
    return made


def losses(way: str, base: nn.Module, setting: Setting, steps: int) -> list[float]:
    """Return the loss of each step."""
    model = copy.deepcopy(base).train()
    if way in ("optimize", "inductor"):
        import confpred

        confpred.optimize(model, inductor=way == "inductor")
    torch.backends.cudnn.benchmark = way != "others"
    torch.backends.cudnn.deterministic = way == "others"
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    scaler = torch.amp.GradScaler(setting.device, enabled=setting.device == "cuda")
    data, found = batches(setting), []
    for step in range(steps):
        images, labels = data[step % len(data)]
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            out = model(images)
        loss = F.cross_entropy(out.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def row_of(network: str, told: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of each way, and their distances from eager's."""
    import timm

    setting = Setting(network, "training", told.batch, told.size, told.device)
    torch.manual_seed(0)
    base = timm.create_model(network, num_classes=CLASSES, drop_rate=0.0)
    base = base.to(setting.device, memory_format=torch.channels_last)
    runs = {way: losses(way, base, setting, told.steps) for way in WAYS}
    eager = runs["eager"]
    distances = {
        way: fmean(abs(a - b) for a, b in zip(run, eager, strict=True)) / fmean(eager)
        for way, run in runs.items()
    }
    tail = max(1, told.steps // 10)
    last = {way: fmean(run[-tail:]) for way, run in runs.items()}
    return {"network": network, "distances": distances, "last": last, "losses": runs}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=128, help="of images")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial")
    parser.add_argument("--out", type=Path, help="default: the device's folder of results")
    told = parser.parse_args(words)
    on_gpu = told.device == "cuda"
    if not on_gpu and (told.out is None or is_published(told.out)):
        parser.error("a trial is written somewhere else: name a folder with --out")
    out = folder_of(told.out)
    facts = provenance("torch", "timm", gpu=on_gpu) | {"steps": told.steps, "batch": told.batch}
    rows: list[dict[str, Any]] = []
    for network in told.networks:
        rows.append(row_of(network, told))
        shown = {name: round(value, 4) for name, value in rows[-1]["distances"].items()}
        print(network, shown, rows[-1]["last"], flush=True)
        write("losses", facts | {"rows": rows}, out)


if __name__ == "__main__":
    main()
