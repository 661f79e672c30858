"""``confpred.tuned`` without a model: as ``triton.autotune``, and what is timed is kept."""

from __future__ import annotations

import json
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
    assert "its key is not described by integers and choices" in says(program)


def test_new_calls_are_recorded_and_sampled(tmp_path: Path) -> None:
    program = """
for size in (40, 75, 40): add(torch.randn(size), torch.ones(size))
other = tuned(model=None, name="other")(adding.fn)
add(torch.randn(9), torch.ones(9), other)
"""
    recorded = tmp_path / "calls.jsonl"
    says(program, CONFPRED_RECORD=str(recorded))
    kernel = Path(KNOWN["PYTHONPATH"]) / "tuned_kernels.py"
    sample = ("-m", "confpred", "sample", f"{kernel}:adding", "--plan", "h100")
    told = python_says(*sample, "--shapes", recorded, "--out", tmp_path / "out", **KNOWN)
    assert told.startswith("2 problems on h100, 32 rows:")
    assert json.loads(recorded.read_text().splitlines()[-1])["kernel"] == "other"
    assert "is not recorded: [Errno" in says(program, CONFPRED_RECORD=str(tmp_path))


def test_words_of_a_key_are_those_of_its_choices() -> None:
    program = """
import triton, triton.language as tl
from tuned_kernels import casting
x, out = torch.randn(40), torch.zeros(40, dtype=torch.float16)
casting[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, out, 40, OUT=tl.float16)
torch.testing.assert_close(out, x.half())
call = casting.call_of({"size": 40, "OUT": tl.float16, "x": x})
assert str(call) == "size=40 dtype=float32" and call.OUT == "float16"
assert casting.call_of({"size": 40, "OUT": torch.float32}).OUT == "float32"
assert casting.call_of({"size": 40, "OUT": tl.int8}) is None
"""
    assert "OUT='int8' is not allowed; allowed: float16 or float32" in says(program)


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
