"""The networks of `benchmarks.networks`, built, with inputs and a loss.

A network of four-dimensional inputs is channels last, and any other as PyTorch makes it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.networks import broad_models
from confpred.pytorch.ways import Subject, mean_square

CHECKED = 8  # images, in inference, where they do not depend on one another


@dataclass(frozen=True, slots=True)
class Setting:
    """A network's step, whoever computes its convolutions.

    Attributes:
        network: timm's name of it, or a function of `broad_models`.
        mode: ``inference`` (half precision) or ``training`` (autocast, SGD with momentum).
        batch: images a step.
        shape: of an image.
        device: ``cuda``; ``cpu`` is for trying the script out, in bfloat16.
    """

    network: str
    mode: str
    batch: int
    shape: tuple[int, ...] = (3, 224, 224)
    device: str = "cuda"

    @property
    def half(self) -> torch.dtype:
        return torch.float16 if self.device == "cuda" else torch.bfloat16

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if len(self.shape) == 3 else torch.preserve_format

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.half)


def network(setting: Setting) -> nn.Module:
    """Return the network in float32 and training mode, with random weights, the same in every
    process."""
    torch.manual_seed(0)
    import timm

    own = getattr(broad_models, setting.network, None)
    model: nn.Module = timm.create_model(setting.network) if own is None else own()
    model = model.to(setting.device)
    is_last = setting.layout is torch.channels_last
    return model.to(memory_format=setting.layout) if is_last else model


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
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean over all batches so far, here of one
    images = torch.randn(min(8, 2 * setting.batch), *setting.shape).to(setting.device)
    with torch.no_grad(), torch.random.fork_rng():
        model(images.to(memory_format=setting.layout))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def subject_of(setting: Setting, model: nn.Module) -> Subject:
    """Return the step of `model` on random inputs; a classifier's loss is of random labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(setting.batch, *setting.shape, generator=generator)
    labels = torch.randint(1000, (setting.batch,), generator=generator).to(setting.device)

    def cross_entropy(out: Tensor) -> Tensor:
        return F.cross_entropy(out.float(), labels)

    is_classifier = not hasattr(broad_models, setting.network)
    return Subject(
        model, (images.to(setting.device).to(memory_format=setting.layout),),
        training=setting.mode == "training", loss=cross_entropy if is_classifier else mean_square,
        half=setting.half, checked=CHECKED,
    )  # fmt: skip
