"""Needs of programs with the kernels of ``tuned_kernels.py``; one that leaves measurements."""

from __future__ import annotations

from pathlib import Path

KNOWN = {
    "CONFPRED_FAMILIES": "tuned_kernels",
    "PYTHONPATH": str(Path(__file__).parent),
    "TRITON_INTERPRET": "1",
}
#: Twelve sizes, all configs of each.
TRIALS = """
from tuned_kernels import CONFIGS, add, adding, made_up_ms, torch, tried
for size in (40, 75, 100, 130, 200, 260, 300, 520, 600, 777, 1000, 1100):
    x, out = torch.randn(size), torch.randn(size)
    tried.clear()
    add(x, torch.zeros(size))
    assert len(tried) == 16
    times = {c: made_up_ms(size, c.kwargs["BLOCK"], c.num_warps) for c in CONFIGS}
    assert adding.best_config == min(times, key=times.get)
    before = out.clone()
    add(x, out)  # as it is remembered, it runs once
    assert len(tried) == 16 and torch.equal(out, before + x)
"""
