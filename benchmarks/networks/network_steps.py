"""The step times of one network in one mode at one batch, measured in a process of its own.

`benchmarks.networks.networks` starts this with a task, as JSON; `confpred.pytorch.ways` has
the protocol.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._functorch import config as functorch

from benchmarks.networks.network_models import Setting, lively_network, subject_of
from benchmarks.networks.networks import PARTS
from benchmarks.networks.unknown_board import UNKNOWN, without_models
from confpred.pytorch.ways import WAYS, Start, measure


def without(part: str) -> Start:
    """Return the way that leaves out a part of another, where the model is captured. PyTorch's
    cache of graphs is off, which would answer with the graph of the whole way."""
    way, module, function = PARTS[part]

    def start(model: nn.Module) -> Any:
        forward = WAYS[way](model)

        def call(*given: Any) -> Any:
            part_is_out = patch(f"confpred.pytorch.{module}.{function}", lambda *_, **__: 0)
            with part_is_out, functorch.patch(enable_autograd_cache=False):
                return forward(*given)

        return call

    return start


ALL_WAYS: Mapping[str, Start] = {
    **WAYS, **{part: without(part) for part in PARTS},
    **{way: without_models(way) for way in UNKNOWN},
    "second optimize": WAYS["optimize"],
}  # fmt: skip


def say(way: str, what: str) -> None:
    print(f"{way}: {what}", file=sys.stderr, flush=True)


def main() -> None:
    """``network_steps.py TASK OUT``: TASK is an object with the fields that are read here."""
    task, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    import timm  # noqa: F401 - before the wait, while another process has the GPU

    import confpred  # noqa: F401

    sys.stdin.readline()  # until it is this process's turn
    random.seed(0)
    shape = tuple(task["shape"])
    setting = Setting(task["network"], task["mode"], task["batch"], shape, task["device"])
    model = lively_network(setting)
    torch.backends.cudnn.benchmark = True
    # Nothing is compiled before the ways: Dynamo leaves sizes open in which two of PyTorch's
    # containers or functions differ, and `torch.compile` ran a video decoder at half its speed.
    if "tried_plans" in task:
        torch.backends.cudnn.benchmark_limit = task["tried_plans"]
    found = measure(
        subject_of(setting, model), {way: ALL_WAYS[way] for way in task["ways"]},
        rounds=task["rounds"], turn_s=task["turn_s"], say=say,
    )  # fmt: skip
    whole = out.with_suffix(".tmp")
    whole.write_text(json.dumps(found))
    whole.replace(out)


if __name__ == "__main__":
    main()
