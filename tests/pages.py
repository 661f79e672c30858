"""Inputs for a report of made-up measurements and a small model."""

from __future__ import annotations

from pathlib import Path

from synthetic import SMALL

from confpred.report.judged import Evaluated, evaluated
from confpred.report.page import Inputs, read_inputs
from confpred.training.dataset import Dataset
from confpred.training.evaluate import evaluate


def judge(dataset: Dataset) -> Evaluated:
    """Judge `dataset` with small models."""
    return evaluated(evaluate(dataset, SMALL, folds=2, seed=0).to_json(), "made up")


def inputs_of(*paths: Path) -> Inputs:
    """Return the inputs of a page of `paths`."""
    return read_inputs(paths, None, judge)
