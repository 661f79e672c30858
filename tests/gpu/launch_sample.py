"""Launches a few configs of every family on small layers; run under compute-sanitizer.

Imports no PyTorch: its libraries would take the sanitizer minutes.
"""

from __future__ import annotations

import random

import numpy as np

from confpred.cuda import driver
from confpred.cuda.measure import check
from confpred.families import all_families
from confpred.problem import Problem

LAYERS = (
    "n=3 c=24 h=13 w=9 k=24 r=3 s=3 padding=1 groups=3 bias=1 activation=silu",
    "n=2 c=48 h=17 w=30 k=48 r=3 s=3 padding=1 groups=3 dtype=bfloat16",
    "n=1 c=96 h=11 w=15 k=96 r=5 s=4 padding=2x1 groups=3",
    "n=2 c=64 h=8 w=8 k=64 r=7 s=7 padding=3 groups=2 activation=gelu",
    "n=5 c=8 h=6 w=7 k=8 r=1 s=1",
)


def main() -> None:
    device = driver.device_of(0)
    launched = 0
    for layer in LAYERS:
        problem = Problem.parse(layer)
        for family in all_families().values():
            rows = np.flatnonzero(family.legal(problem, device)).tolist()
            rows = random.Random(0).sample(rows, min(8, len(rows)))
            for outcome in check(problem, family, rows, ordinal=0):
                if outcome.status != "ok":
                    raise SystemExit(f"{problem}: {outcome}")
                launched += 1
    print(f"launched {launched}")


if __name__ == "__main__":
    main()
