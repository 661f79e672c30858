"""The benchmark of norms: what it asks for is there, and a process that ends is survived."""

from __future__ import annotations

import random
import sys
import time

import torch
from layers import GROUP_NORMS, random_group_norm
from norms import expected, inputs_of

from benchmarks.kernels import norms
from confpred.families.registry import kernels_of
from confpred.problem.device import get_device
from confpred.problem.norm_of_groups import NORM, Norm

STATISTICS = ("mean", "invstd")
GROUP_BACKWARD = torch.ops.aten.native_group_norm_backward.default

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
    problems = norms.problems()
    assert len(problems) == len(set(problems)) == 2 * 12
    for problem in problems:
        families = {
            name: norms.rows_of(family, problem, H100, 5, ())
            for name, family in kernels_of(problem).items()
            if family.direction == problem.direction
        }
        assert len(families) == 2
        assert all(len(rows) == 5 for rows in families.values())


def test_what_inductor_is_given_is_the_norm(monkeypatch):
    """Here by PyTorch's decompositions, of which Inductor makes its code."""
    group = torch._decomp.decomposition_table[GROUP_BACKWARD]
    # A stand-in, as Inductor needs a compiler, and the CPU's kernel reads channels first alone.
    monkeypatch.setattr(torch.ops.aten, "native_group_norm_backward", group)
    # And its function as it is.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    rng = random.Random(0)
    for family in GROUP_NORMS.values():
        problem = random_group_norm(rng, family, 8_000)
        while problem.is_backward and not problem.centred:
            problem = random_group_norm(rng, family, 8_000)
        problem = Norm(**problem.to_json() | {"dtype": "float32", "weights": "float32"})
        inputs = inputs_of(problem, 0)
        found, right = norms.by_inductor(problem)(inputs), expected(problem, inputs)
        outputs = [o for o in NORM.operands(problem) if o.terms and o.name not in STATISTICS]
        found = found if problem.is_backward else (found,)
        for output, tensor in zip(outputs, found, strict=True):
            apart = (tensor.double() - right[output.name]).norm()
            assert apart < 3e-5 * right[output.name].norm(), (problem, output.name)


def test_every_norm_is_compiled(monkeypatch):
    """Dynamo compiles a function for so many problems, and would run it as it is for the others."""
    graphs, compiled = [], torch.compile

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    # A stand-in, as Inductor needs a compiler.
    monkeypatch.setattr(torch, "compile", lambda f, **more: compiled(f, backend=backend, **more))
    count = torch._dynamo.config.recompile_limit + 2
    for c in range(1, 1 + count):
        problem = Norm(2, 3, c, dtype="float32", weights="float32")
        norms.by_inductor(problem)(inputs_of(problem, 0))
    assert len(graphs) == count


def test_the_hold_outs_large_norms_are_asked_for():
    problems = norms.problems(groups=True)
    assert len(problems) > 50
    assert {problem.direction for problem in problems} == {"forward", "backward"}
    assert problems[-1].tensor_bytes > norms.LEAST_BYTES


def test_every_kernel_is_compiled_beforehand():
    entries = {kernel.entry for kernel in norms.kernels(H100, 2)}
    assert len(entries) == 8
    kernel = next(k for k in norms.kernels(H100, 1) if k.entry == "batch_norm_apply")
    assert norms.compile_one(kernel, H100.arch) == ""
    assert "batch_norm_apply" in norms.compile_one(kernel, "sm_12345")


def test_a_config_that_ends_its_process_is_left_out_and_named():
    job = {"problems": ["a", "b", "c"], "end": time.time() + 60, "configs": 1}
    found = norms.watched(job, [sys.executable, "-c", WORKER], silent_s=2.0)
    assert [result["problem"] for result in found["results"]] == ["a", "b", "c"]
    assert found["ended"] == [["b", "family", 7], ["b", "family", 8]]
    assert found["bandwidth"] == 3e12


def test_a_process_that_begins_nothing_costs_a_problem():
    job = {"problems": ["a", "b"], "end": time.time() + 60, "configs": 1}
    found = norms.watched(job, [sys.executable, "-c", "raise SystemExit(3)"])
    assert [r["failed"] for r in found["results"]] == ["the process ended with 3"] * 2


def test_results_are_summed_up():
    row = {
        "problem": "n=1", "direction": "forward", "tensor_bytes": 2**27, "pytorch_ms": 0.4,
        "ours_ms": 0.2, "speedup": 2.0, "share": 0.9, "pytorch_share": 0.5, "noise": 0.01,
        "family": "batch_norm_one_pass", "config": {"vector": 8},
    }  # fmt: skip
    small = row | {"tensor_bytes": 2**20, "share": 0.1, "speedup": 0.5}
    rows = [row, small, {"problem": "n=2", "failed": "no config is right"}]
    assert norms.summary(rows) == {
        "forward": {
            "layers": 2, "speedup": 1.0, "least": 0.5, "share": 0.9, "least_share": 0.9,
        }
    }  # fmt: skip
    text = norms.table(rows)
    assert "2.00x" in text
    assert "failed: no config is right" in text
