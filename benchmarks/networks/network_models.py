"""The networks of `benchmarks.networks.networks`: built, and made into steps that can be timed.

A step is what a user's loop does once: a forward pass in inference, and forward, backward and the
optimizer's update in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """A network's step, whoever computes its convolutions.

    Attributes:
        network: timm's name of it.
        mode: ``inference`` (half precision) or ``training`` (autocast, SGD with momentum).
        batch: images a step.
        size: height and width of an image.
        device: ``cuda``; ``cpu`` is for trying the script out, in bfloat16.
    """

    network: str
    mode: str
    batch: int
    size: int = 224
    device: str = "cuda"

    @property
    def half(self) -> torch.dtype:
        return torch.float16 if self.device == "cuda" else torch.bfloat16

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.half)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def network(setting: Setting) -> nn.Module:
    """Return the network in float32 and training mode, with random weights, the same in every
    process."""
    torch.manual_seed(0)
    import timm

    model: nn.Module = timm.create_model(setting.network, pretrained=False)
    return model.to(setting.device, memory_format=torch.channels_last)


def lively_network(setting: Setting) -> nn.Module:
    """Return the network with every layer taking part in its output.

    timm starts many networks with branches that are multiplied by zero, or nearly so, and with
    statistics of norms that are not those of any data. A comparison of outputs would be blind to
    the layers there, so scales are drawn anew, and the statistics are those of a random batch.
    """
    model = network(setting)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() == max(parameter.shape, default=1):  # a value a channel
                if name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                else:
                    parameter.uniform_(0.1, 0.4)
    _set_statistics(model, setting)
    return model


def _set_statistics(model: nn.Module, setting: Setting) -> None:
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean over all batches so far, here of one
    images = torch.randn(8, 3, setting.size, setting.size).to(setting.device)
    with torch.no_grad(), torch.random.fork_rng():
        model(images.to(memory_format=torch.channels_last))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def prepared(model: nn.Module, setting: Setting) -> nn.Module:
    """Return a copy of `model` as the setting's mode wants it; every variant gets its own."""
    model = copy.deepcopy(model)
    return model.train() if setting.mode == "training" else model.eval().to(setting.half)


def images_and_labels(setting: Setting) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(setting.batch, 3, setting.size, setting.size, generator=generator)
    labels = torch.randint(1000, (setting.batch,), generator=generator)
    if setting.mode == "inference":
        images = images.to(setting.half)
    images = images.to(setting.device, memory_format=torch.channels_last)
    return images, labels.to(setting.device)


def step_of(model: nn.Module, forward: Any, setting: Setting, data: tuple[Tensor, Tensor]) -> Step:
    """One step of `model`, which is called by `forward` (itself, or what it was compiled to).

    Returns:
        A function without arguments that returns the output, or the loss in training.
    """
    images, labels = data

    def infer() -> Tensor:
        with torch.no_grad():
            out: Tensor = forward(images)
        return out

    if setting.mode == "inference":
        return infer
    # A small rate: the figures are of time, and the loss must stay finite however many steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, foreach=True)

    def train() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            out = forward(images)
        loss = F.cross_entropy(out.float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train
