"""Predictors that are loaded again and again, as a service does at each reload, leave nothing."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise
from pathlib import Path

from confpred import Problem
from confpred.predict.predictor import Predictor

LAYERS = [
    Problem.parse(f"n=8 c=64 h=28 w=28 k=64 r=3 s=3 groups={groups} padding=1")
    for groups in (2, 4, 8)
]


def test_a_predictor_that_goes_takes_its_memory_along(model_folder: Path) -> None:
    sizes = []
    tracemalloc.start()  # NumPy tells it of its arrays
    try:
        for _ in range(6):
            Predictor.load(model_folder).choose_many(LAYERS, "h100")
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(after - before for before, after in pairwise(sizes[2:])) < 50_000
