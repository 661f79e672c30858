"""The figures of groups of layers, from an evaluation's JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confpred.errors import DataError
from confpred.report.judged import Group, evaluated, groups_of, read_evaluation

LAYER = "n={} c=64 h=14 w=14 k=64 r=3 s=3 groups=8 padding=1"


def entry(problem: str, regret: float, *networks: str, family: str = "grouped_fprop") -> dict:
    return {
        "problem": problem,
        "networks": list(networks),
        "family": family,
        "oracle_ms": 0.02,
        "regret": regret,
        "candidates": 7,
    }


WGRAD = LAYER.format(9) + " direction=wgrad dtype=bfloat16"
FIGURES: dict[str, Any] = {
    "format": "confpred-evaluation/3",
    "device": "h100",
    "folds": [{"networks": ["a", "b"]}, {"networks": ["c"]}],
    "judged": [
        entry(LAYER.format(1), 1.0, "a", "c"),
        entry(LAYER.format(4), 1.2, "b"),
        entry(WGRAD, 1.5, "c", family="grouped_wgrad"),
        entry(LAYER.format(300), 1.1, "c"),
    ],
}


def test_a_groups_figures_are_of_its_layers():
    spread = Group.of("all", evaluated(FIGURES, "here").layers).regret
    regret = np.array([1.0, 1.2, 1.5, 1.1])
    assert (spread.problems, spread.worst) == (4, 1.5)
    assert spread.geomean == pytest.approx(math.prod(regret) ** 0.25)
    assert spread.p95 == pytest.approx(np.quantile(regret, 0.95))
    assert spread.far == 0.5  # 1.1 is no more than a tenth off
    assert spread.efficiency_mean == pytest.approx((1 / regret).mean())
    assert spread.efficiency_p10 == pytest.approx(np.quantile(1 / regret, 0.1))


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("family", {"grouped_fprop": 3, "grouped_wgrad": 1}),
        ("direction", {"fprop": 3, "wgrad": 1}),
        ("dtype", {"bfloat16": 1, "float16": 3}),
        ("batch", {"1": 1, "2 to 4": 1, "9 to 16": 1, "129 and more": 1}),
        # A layer counts in each of its networks; the network that loses most comes first.
        ("network", {"b": 1, "c": 3, "a": 1}),
    ],
)
def test_layers_are_grouped_by_what_they_are(subject: str, expected: dict[str, int]):
    groups = groups_of(evaluated(FIGURES, "here").layers, subject)
    assert [(group.name, group.regret.problems) for group in groups] == [*expected.items()]


def test_a_bound_is_calibrated_on_the_other_folds():
    found = evaluated(FIGURES, "here")
    first, second = np.quantile([1.5, 1.1], 0.95), np.quantile([1.0, 1.2], 0.95)
    assert [x.bound for x in found.layers] == pytest.approx([first, first, second, second])
    group = Group.of("all", found.layers)
    assert group.covered == 0.75  # 1.5 is above what the first fold's layers would have set
    assert group.bound == pytest.approx(math.sqrt(first * second))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "device='tpu' is not allowed"),
        ({"judged": []}, "judges no layer"),
        ({"judged": [entry(LAYER.format(0), 1.0, "a")]}, "n=0 is not allowed"),
        ({"judged": [entry(LAYER.format(1), 0.5, "a")]}, "impossible figures"),
        ({"judged": [entry(LAYER.format(1), float("nan"), "a")]}, "impossible figures"),
        ({"judged": [entry(LAYER.format(1), 1.0, "a", family="gemm")]}, "KeyError"),
        ({"judged": [{}]}, "KeyError"),
        ({"judged": 7}, "TypeError"),
        ({"format": "confpred-suite/1"}, "is not an evaluation"),
    ],
)
def test_a_damaged_evaluation_is_named(tmp_path: Path, change, message):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(FIGURES | change))
    with pytest.raises(DataError, match=rf"evaluation\.json.*{message}"):
        read_evaluation(path)
