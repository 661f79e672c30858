"""The benchmark of depthwise gradients in one pass: what it asks for is there, and, with stand-ins
for the GPU, a problem goes through it."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.kernels import depthwise_both as both
from confpred.cuda import driver
from confpred.families.registry import all_families
from confpred.measure import kernels as measuring
from confpred.measure import pytorch as operator
from confpred.measure.timing import Outcome
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import get_device
from confpred.problem.gradients import GRADIENTS, Gradients
from confpred.problem.operation import Operation

H100 = get_device("h100")
LAYER = Gradients(2, 16, 9, 9, 16, 3, 3, padding=1, groups=16)
ROWS = {"both": {"depthwise_both": [0, 1]}} | {d: {f"depthwise_{d}": [2, 3]} for d in both.APART}


def test_every_layer_has_configs() -> None:
    problems = both.problems()
    assert len(problems) == len(set(problems)) == 2 * len(both.LAYERS) == 24
    for problem in problems:
        rows = {
            name: both.rows_of(all_families()[name], problem, H100, 9)
            for name in ("depthwise_both", "depthwise_banded_both")
        }
        assert sum(map(len, rows.values())) >= 9
        for name, found in rows.items():
            assert len(found) == len(set(found)) <= 9
            assert all_families()[name].legal(problem, H100)[found].all()


def test_every_kernel_is_compiled_beforehand() -> None:
    entries = {kernel.entry for kernel in both.kernels({str(LAYER): ROWS})}
    references = {"reference_in_grad", "reference_filter_grad"}
    assert entries >= {"depthwise_both", "depthwise", "depthwise_wgrad", *references}


def inputs_of(operation: Operation, problem: Gradients, copies: int) -> list[dict]:
    return [
        {o.name: torch.rand(o.shape) for o in operation.operands(problem) if not o.terms}
        for _ in range(copies)
    ]


def test_one_problem_goes_through(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def measure(problem, family, rows, *, ordinal, seed, report):
        for row in rows:
            report(row)
        good, bad = rows
        return [
            Outcome(good, "ok", time_ms=0.5, error=0.0),
            Outcome(bad, "wrong_result", message="off"),
        ]

    def call_of(family, problem, row):
        def call(tensors):
            found = GRADIENTS.pytorch(LAYER, tensors)
            place = {"both": slice(2), "dgrad": slice(1), "wgrad": slice(1, 2)}[problem.direction]
            return [t.permute(0, 2, 3, 1) for t in found[place]]

        return call

    def interleaved_ms(calls, turns, evict):
        assert [len(call(turns[0])) for call in calls] == [2] * 5
        return [0.5, 0.6, 0.52, 0.62, 2.0]

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(both, "call_of", call_of)
    monkeypatch.setattr(both, "interleaved_ms", interleaved_ms)
    monkeypatch.setattr(driver, "device_of", lambda _ordinal: H100)
    monkeypatch.setattr(operator, "operands", inputs_of)
    job = {"planned": {str(LAYER): ROWS}, "left_out": []}
    result = {"problem": str(LAYER), **both.one(LAYER, 3e12, None, job)}
    begun = [json.loads(line)["begun"] for line in capsys.readouterr().out.splitlines()]
    assert begun[-1] == [str(LAYER), "depthwise_both", 0]
    assert result["gain"] == pytest.approx(0.61 / 0.51)
    assert result["noise"] == pytest.approx(0.04)
    assert result["differences"] == [0.0, 0.0]
    assert len(result["failures"]) == 3
    assert json.loads(json.dumps(result)) == result
    found = both.summary([result, {"problem": str(LAYER), "failed": "no config"}])
    assert (found["layers"], found["chosen"], found["layers_at_goal"]) == (1, 1, 1)
    assert "1.20x" in both.table([result])
    job["left_out"] = [[str(LAYER), "depthwise_both", row] for row in (0, 1)]
    assert both.one(LAYER, 3e12, None, job)["failed"] == "no config of both is right"


def test_operands_of_the_two_directions_are_among_those_of_both() -> None:
    inputs = {o.name for o in GRADIENTS.operands(LAYER) if not o.terms}
    for direction in both.APART:
        apart = CONVOLUTION.operands(LAYER.apart(direction))
        assert {o.name for o in apart if not o.terms} <= inputs
