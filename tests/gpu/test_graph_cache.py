"""Graphs that PyTorch's cache keeps, found by a second process on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters
import confpred

training = sys.argv[1] == "training"
torch.manual_seed(0)
layers = [nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.ReLU(),
          nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.BatchNorm2d(64), nn.SiLU()]
model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last).train(training)
model = model if training else model.half()
x = torch.randn(8, 32, 56, 56, device="cuda", dtype=torch.float32 if training else torch.half)
x = x.contiguous(memory_format=torch.channels_last)
confpred.optimize(model)
for _ in range(4):  # the first captures, the second records a CUDA graph
    model.zero_grad()
    with torch.set_grad_enabled(training), torch.autocast("cuda", enabled=training):
        out = model(x)
    if training:
        out.float().square().mean().backward()
tensors = [out, *(p.grad for p in model.parameters() if p.grad is not None)]
found = confpred.status(model)
print(json.dumps({
    "sums": [t.double().abs().sum().item() for t in tensors], "layers": found.providers,
    "replay": found.replay, "hits": counters["aot_autograd"].get("autograd_cache_hit", 0),
    "counts": dict(counters["aot_autograd"]),
}))
"""


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_a_second_process_finds_the_graph_and_computes_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # Measurements that other tests keep meanwhile would make another key.
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path / "confpred"))
    runs: list[dict[str, Any]] = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM, kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = runs
    assert (first["hits"], second["hits"]) == (0, 1), [run["counts"] for run in runs]
    assert first["layers"] == second["layers"]
    assert any(name not in ("pytorch", "cudnn") for name in second["layers"])
    assert all("replayed" in text for text in second["replay"]), second["replay"]
    assert second["sums"] == pytest.approx(first["sums"], rel=1e-3)
