"""``confpred.tuned`` without a model: as ``triton.autotune``, and what is timed is kept."""

from __future__ import annotations

from pathlib import Path

from shared import python_says
from tuned_programs import KNOWN, TRIALS


def says(program: str, **environment: str) -> str:
    """Return what a program with the kernels says, log lines too."""
    start = """
import logging, sys
logging.getLogger("confpred").addHandler(logging.StreamHandler(sys.stdout))
import torch
from tuned_kernels import adding, add, tried, tuned
"""
    return python_says("-c", start + program, **KNOWN, **environment)


def test_trials_are_tritons_and_kept_and_said_once(tmp_path: Path) -> None:
    told = says(TRIALS, TUNED_KEEP=str(tmp_path))
    assert told.splitlines() == ["adding is tuned as by triton.autotune: it has no model"]
    assert len([*tmp_path.glob("rows-*.parquet")]) == 12


def test_where_no_gpu_can_be_described_nothing_is_kept(tmp_path: Path) -> None:
    program = """
import tuned_kernels
tuned_kernels.autotuner.current_device = lambda: tuned_kernels.autotuner._described(0)
x, out = torch.randn(40), torch.zeros(40)
add(x, out)
assert len(tried) == 16
"""
    told = says(program, TUNED_KEEP=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert "adding is tuned as by triton.autotune: its GPU cannot be described" in told
    assert [*tmp_path.iterdir()] == []


def test_a_key_that_no_model_describes_is_tuned_by_trials() -> None:
    program = """
add(torch.randn(64), torch.ones(64))
tried.clear()
adding[(1,)](torch.ones(8), torch.ones(8), 8.0, BLOCK=8) if False else None
assert adding.call_of({"size": 8.5}) is None and adding.call_of({}) is None
assert adding.call_of({"size": True}).size == 1
"""
    assert "its key is not described by integers" in says(program)


def test_an_example_makes_the_call_that_is_measured() -> None:
    program = """
from confpred.errors import InvalidInput
problem = adding.family.operation.problem(70, "float32")
call = adding.family.example(problem)
x, out = call.tensors["x"], call.tensors["out"]
assert list(call.tensors) == ["x", "out"] and not out.any()
call.launch(3)
assert torch.equal(out, x) and tried == []
for kernel in (tuned(name="adding")(adding.fn), tuned(example=lambda **_: None)(adding.fn)):
    try: kernel.example_call(problem)
    except InvalidInput as error: print(error)
"""
    told = says(program).splitlines()
    assert "a function that calls adding once" in told[0]
    assert "a function that calls adding for size=70 dtype=float32" in told[1]


def test_heuristics_work_and_bad_options_are_refused() -> None:
    program = """
import triton
from confpred.errors import InvalidInput
from tuned_kernels import filling
for size, value in ((64, 2.0), (65, 1.0)):
    out = torch.zeros(size)
    filling[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](out, size)
    assert (out == value).all()
assert filling.family.name == "filling"
try: tuned(top_k=0)(adding.fn)
except InvalidInput as error: print(error)
"""
    assert "top_k=0 is not allowed" in says(program)


def test_without_triton_the_missing_package_is_named() -> None:
    program = """
import sys; sys.modules["triton"] = None
import confpred
try: confpred.tuned([], [])
except confpred.errors.MissingExtra as error: print(error)
"""
    assert "this needs triton: pip install" in python_says("-c", program)
