"""Host time of a call of small layers, end to end, with and without confpred.

The layers are so small that the GPU is never waited for. The modes are those that a network meets:

inference             float16, ``torch.inference_mode``
autocast              float32 weights, without gradients
forward               the same with gradients
forward + backward    the same, and the gradients of the input and the weight

Under autocast the weight is cast anew at each call, because a network uses each weight once in a
step: autocast's cache of weights is emptied before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from host_timing import Turn, interleaved_us
from torch import Tensor

import confpred

CALLS, RUNS = 100, 40
CHANNELS = 64
#: Groups of each layer of `CHANNELS` channels, 14 x 14, window 3 x 3, batch 1.
LAYERS = {"depthwise": 64, "grouped, width 8": 8, "dense": 1}
MODES = ("inference", "autocast", "forward", "forward + backward")
BASES = ("F.conv2d", "nn.Conv2d")
AGAIN = "F.conv2d again"


@contextmanager
def _mode(mode: str, helped: bool) -> Iterator[None]:
    with (
        confpred.enabled() if helped else nullcontext(),  # type: ignore[attr-defined]
        torch.inference_mode(mode == "inference"),
        torch.set_grad_enabled(mode.startswith("forward")),
        torch.autocast("cuda", torch.float16, enabled=mode != "inference"),
    ):
        yield


def turns(groups: int, mode: str) -> dict[str, Turn]:
    """What is timed of one layer in one mode."""
    dtype = torch.float16 if mode == "inference" else torch.float32
    x = torch.randn(1, CHANNELS, 14, 14, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last).requires_grad_(mode.startswith("forward"))
    out_grad = torch.randn_like(x)
    module = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups, bias=False)
    module = module.to("cuda", dtype, memory_format=torch.channels_last)
    weight = module.weight
    ways: dict[str, tuple[Callable[[], Tensor], bool]] = {
        "F.conv2d": (lambda: F.conv2d(x, weight, padding=1, groups=groups), False),
        "F.conv2d, enabled": (lambda: F.conv2d(x, weight, padding=1, groups=groups), True),
        "confpred.conv2d": (lambda: confpred.conv2d(x, weight, padding=1, groups=groups), False),
        "nn.Conv2d": (lambda: module(x), False),
        "nn.Conv2d, enabled": (lambda: module(x), True),
    }
    ways[AGAIN] = ways["F.conv2d"]

    def cast_anew(call: Callable[[], Tensor]) -> None:
        torch.clear_autocast_cache()
        call()

    def both(call: Callable[[], Tensor]) -> None:
        torch.clear_autocast_cache()
        torch.autograd.grad(call(), (x, weight), out_grad)

    wrapped: dict[str, Callable[..., object]] = {"autocast": cast_anew, "forward": cast_anew}
    wrapped["forward + backward"] = both
    return {
        who: Turn(
            partial(wrapped[mode], call) if mode in wrapped else call, partial(_mode, mode, helped)
        )
        for who, (call, helped) in ways.items()
    }


def rows_of(layer: str, mode: str, times: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each of `times`, with its ratio to the same call without confpred."""
    return [
        {
            "layer": layer,
            "mode": mode,
            "who": who,
            "us": us,
            "ratio": us / times[next((b for b in BASES if who.startswith(b)), BASES[0])],
        }
        for who, us in times.items()
    ]


def layers_us(calls: int = CALLS, runs: int = RUNS) -> list[dict[str, Any]]:
    """Rows of ``layer``, ``mode``, ``who``, ``us`` (median microseconds a call) and ``ratio``."""
    rows = []
    for layer, groups in LAYERS.items():
        for mode in MODES:
            times = interleaved_us(
                turns(groups, mode), calls=calls, runs=runs, synchronize=torch.cuda.synchronize
            )
            rows += rows_of(layer, mode, times)
    return rows
