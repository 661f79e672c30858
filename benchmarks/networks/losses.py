"""Losses of 200 steps of training: how far `optimize` takes a network from eager PyTorch,
beside how far PyTorch takes it from itself.

    python -m benchmarks.networks.losses [--networks A,B] [--steps 200] [--seeds 3] [--out FOLDER]

Each seed gives weights, with which every run starts, and images: eight batches of random patterns,
one a class, under noise. *deterministic* is eager with cuDNN's deterministic algorithms, and
*channels first* with the algorithms of that layout. A
distance is the mean over the steps of the difference between two losses, relative to eager's.
Autocast to float16, SGD with momentum; the rate rises over the first 20 steps.
"""

from __future__ import annotations

import argparse
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
WAYS = ("eager", "deterministic", "channels first", "optimize", "inductor=False")
OPTIMIZED: dict[str, dict[str, Any]] = {"optimize": {}, "inductor=False": {"inductor": False}}
BATCHES, CLASSES, RATE, RISE = 8, 10, 0.01, 20


def layout_of(way: str) -> torch.memory_format:
    return torch.contiguous_format if way == "channels first" else torch.channels_last


def batches(way: str, setting: Setting, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(CLASSES, 3, 8, 8, generator=generator)
    patterns = F.interpolate(coarse, setting.shape[1:], mode="bilinear")
    made = []
    for _ in range(BATCHES):
        labels = torch.randint(CLASSES, (setting.batch,), generator=generator)
        images = patterns[labels]
        images = images + 2 * torch.randn(images.shape, generator=generator)
        images = images.to(setting.device, memory_format=layout_of(way))
        made.append((images, labels.to(setting.device)))
    return made


def losses(way: str, model: nn.Module, setting: Setting, seed: int, steps: int) -> list[float]:
    """Return the loss of each step of training `model`."""
    torch.backends.cudnn.deterministic = way == "deterministic"
    torch.backends.cudnn.benchmark = way != "deterministic"
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    scaler = torch.amp.GradScaler(setting.device, enabled=setting.device == "cuda")
    data, found = batches(way, setting, seed), []
    for step in range(steps):
        images, labels = data[step % len(data)]
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / RISE)
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            out = model(images)
        loss = F.cross_entropy(out.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def started(way: str, setting: Setting) -> nn.Module:
    """Return the network of `setting`, as `way` runs it."""
    import timm

    import confpred

    model = timm.create_model(setting.network, num_classes=CLASSES, drop_rate=0.0).train()
    model = model.to(setting.device, memory_format=layout_of(way))
    if way in OPTIMIZED:
        confpred.optimize(model, **OPTIMIZED[way])
    return model


def rows_of(network: str, told: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each seed the losses of each way, and their distances from eager's."""
    setting = Setting(network, "training", told.batch, (3, told.size, told.size), told.device)
    weights = []
    for seed in range(told.seeds):
        torch.manual_seed(seed)
        weights.append(started("eager", setting).state_dict())
    runs: dict[str, list[list[float]]] = {}
    for way in WAYS:
        model, runs[way] = started(way, setting), []
        for seed, state in enumerate(weights):
            model.load_state_dict(state)
            runs[way].append(losses(way, model, setting, seed, told.steps))
    rows = []
    for seed in range(told.seeds):
        of_seed = {way: found[seed] for way, found in runs.items()}
        eager = of_seed["eager"]
        distances = {
            way: fmean(abs(a - b) for a, b in zip(run, eager, strict=True)) / fmean(eager)
            for way, run in of_seed.items()
        }
        rows.append({"network": network, "seed": seed, "distances": distances, "losses": of_seed})
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
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
        found = rows_of(network, told)
        for way in WAYS[1:]:
            each = (f"{row['distances'][way]:.4f}" for row in found)
            print(f"{network:16} {way:16}", *each, flush=True)
        rows += found
        write("losses", facts | {"rows": rows}, out)


if __name__ == "__main__":
    main()
