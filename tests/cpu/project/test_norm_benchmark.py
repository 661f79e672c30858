"""The benchmark of batch norm: what it asks for is there, and a process that ends is survived."""

from __future__ import annotations

import sys
import time

from benchmarks.kernels import batch_norm
from confpred.families.registry import kernels_of
from confpred.problem.device import get_device

H100 = get_device("h100")
#: A process that measures each problem, dies of config 7 and takes no end with config 8.
WORKER = """
import json, os, sys, time
job = json.loads(sys.stdin.readline())
print("a library's words", flush=True)
print(json.dumps({"bandwidth": 3e12}), flush=True)
for problem in job["problems"]:
    for row in (7, 8, 9):
        if [problem, "family", row] in job["left_out"] or problem != "b" and row < 9:
            continue
        print(json.dumps({"begun": [problem, "family", row]}), flush=True)
        if row == 7:
            os.abort()
        if row == 8:
            time.sleep(60)
    print(json.dumps({"result": {"problem": problem}}), flush=True)
"""


def test_every_layer_has_configs_of_every_family():
    problems = batch_norm.problems()
    assert len(problems) == len(set(problems)) == 2 * 12
    for problem in problems:
        families = {
            name: batch_norm.rows_of(family, problem, H100, 5, ())
            for name, family in kernels_of(problem).items()
            if family.direction == problem.direction
        }
        assert len(families) == 2
        assert all(len(rows) == 5 for rows in families.values())


def test_every_kernel_is_compiled_beforehand():
    entries = {kernel.entry for kernel in batch_norm.kernels(H100, 2)}
    assert len(entries) == 8
    kernel = next(k for k in batch_norm.kernels(H100, 1) if k.entry == "batch_norm_apply")
    assert batch_norm.compile_one(kernel, H100.arch) == ""
    assert "batch_norm_apply" in batch_norm.compile_one(kernel, "sm_12345")


def test_a_config_that_ends_its_process_is_left_out_and_named():
    job = {"problems": ["a", "b", "c"], "end": time.time() + 60, "configs": 1}
    found = batch_norm.watched(job, [sys.executable, "-c", WORKER], silent_s=2.0)
    assert [result["problem"] for result in found["results"]] == ["a", "b", "c"]
    assert found["ended"] == [["b", "family", 7], ["b", "family", 8]]
    assert found["bandwidth"] == 3e12


def test_a_process_that_begins_nothing_costs_a_problem():
    job = {"problems": ["a", "b"], "end": time.time() + 60, "configs": 1}
    found = batch_norm.watched(job, [sys.executable, "-c", "raise SystemExit(3)"])
    assert [r["failed"] for r in found["results"]] == ["the process ended with 3"] * 2


def test_results_are_summed_up():
    row = {
        "problem": "n=1", "direction": "forward", "tensor_bytes": 2**27, "pytorch_ms": 0.4,
        "ours_ms": 0.2, "speedup": 2.0, "share": 0.9, "pytorch_share": 0.5, "noise": 0.01,
        "family": "batch_norm_one_pass", "config": {"vector": 8},
    }  # fmt: skip
    small = row | {"tensor_bytes": 2**20, "share": 0.1, "speedup": 0.5}
    rows = [row, small, {"problem": "n=2", "failed": "no config is right"}]
    assert batch_norm.summary(rows) == {
        "forward": {
            "layers": 2, "speedup": 1.0, "least": 0.5, "share": 0.9, "least_share": 0.9,
        }
    }  # fmt: skip
    text = batch_norm.table(rows)
    assert "2.00x" in text
    assert "failed: no config is right" in text
