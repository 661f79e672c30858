"""Sampling a Triton kernel, as far as it goes without a GPU: the plan of a run, and the check of
configs against the first one, by Triton's interpreter."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shared import python, python_says

from confpred.errors import InvalidInput
from confpred.measure.calls import check_calls, relative_error
from confpred.triton.triton_family import ExampleCall

TESTS = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")


def sample(
    folder: Path, *words: object, shapes: object = ({"size": 64}, {"size": 100})
) -> list[str]:
    (folder / "shapes.json").write_text(json.dumps(shapes))
    command = ("-m", "confpred", "sample", *words, "--out", folder / "runs")
    done = python(*command, TRITON_INTERPRET="1")
    assert "Traceback" not in done.stderr
    return (done.stdout + done.stderr).splitlines()


def test_a_run_of_a_kernel_is_planned(tmp_path: Path) -> None:
    kernel = (f"{TESTS}/tuned_kernels.py:adding", "--shapes", tmp_path / "shapes.json")
    told = sample(tmp_path, *kernel, "--plan", "h100")
    assert told[0] == "2 problems on h100, 32 rows:"
    assert told[1].split() == ["32", "of", "adding"]
    ranges = (f"{TESTS}/tuned_kernels.py:adding", "--ranges", "size=16:65536", "--problems", 9)
    assert sample(tmp_path, *ranges, "--plan", "h100")[0] == "9 problems on h100, 144 rows:"
    halves = (sample(tmp_path, *ranges, "--plan", "h100", "--part", f"{i}/2")[0] for i in (1, 2))
    assert [line.split()[0] for line in halves] == ["5", "4"]
    (wrong,) = sample(tmp_path, *kernel, "--plan", "h100", shapes=[{"size": 64}, {"sizes": 1}])
    assert "shapes.json: problems[1].sizes=1 is not allowed; allowed: a field" in wrong


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py:adding", "--shapes", "{shapes}"], "a file and a kernel in it"),
        (["{kernels}:missing", "--shapes", "{shapes}"], "a kernel of .* under confpred.tuned"),
        (["{failing}:adding", "--shapes", "{shapes}"], r"can be imported \(ValueError: own\)"),
        (["{kernels}:adding"], "suite is missing; allowed: --suite FILE, or KERNEL with --shapes"),
        ([], "suite is missing"),
    ],
)
def test_a_kernel_that_is_none_is_named(tmp_path: Path, words: list[str], said: str) -> None:
    places = {"kernels": TESTS / "tuned_kernels.py", "shapes": tmp_path / "shapes.json"}
    places["failing"] = tmp_path / "failing.py"
    places["failing"].write_text("raise ValueError('own')")
    told = sample(tmp_path, *(word.format(**places) for word in words), "--plan", "h100")
    assert len(told) == 1
    assert re.search(said, told[0])


def test_every_config_of_the_example_agrees_with_the_first() -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import fused_linear, torch
from confpred.measure.calls import check_calls, compile_all
family, reported = fused_linear.fused_linear.family, []
call = family.example(family.operation.problem(M=40, N=70, K=50, dtype="float32"))
compile_all(call, [0, 1], int)
found = check_calls(call, range(0, len(family.configs), 17), reported.append)
assert {o.status for o in found.values()} == {"ok"} and reported == [*found]
assert 0 < max(o.error for o in found.values()) < 1e-6
x, w, bias, out = call.tensors.values()
expected = x @ w.T + bias
torch.testing.assert_close(out, expected * torch.sigmoid(1.702 * expected))
"""
    python_says("-c", program, TESTS.parent / "examples" / "triton", TRITON_INTERPRET="1")


def doubling() -> tuple[ExampleCall, dict[str, torch.Tensor]]:
    """Return a call whose configs double a vector in place, each wrongly in its own way."""
    from triton.runtime.errors import OutOfResources, PTXASError

    tensors = {"x": torch.tensor([1.0, NAN, 3.0]), "unchanged": torch.ones(2)}

    def launch(row: int) -> None:
        if row == 1:
            raise OutOfResources(300_000, 232_448, "shared memory")
        if row == 2:
            raise PTXASError("no such instruction")
        tensors["x"][0 if row == 3 else slice(None)] *= 2
        if row == 4:
            tensors["x"][1] = 0
        if row == 5:
            tensors["x"].add_(1e-5)

    return ExampleCall(launch, print, tensors), tensors


def test_a_config_that_differs_or_fails_is_a_row() -> None:
    call, tensors = doubling()
    found = check_calls(call, [1, 0, 2, 3, 4, 5], lambda row: None)
    statuses = {row: outcome.status for row, outcome in found.items()}
    assert statuses == {
        1: "launch_error", 0: "ok", 2: "compile_error", 3: "wrong_result", 4: "wrong_result",
        5: "ok",
    }  # fmt: skip
    assert "shared memory" in found[1].message
    assert found[3].message == "the error of x is 0.47, against the first config's"
    assert found[4].error == INF
    assert tensors["x"][0] == pytest.approx(2, abs=1e-4)


def test_a_reference_tells_which_config_is_right() -> None:
    call, _ = doubling()
    call = replace(call, expected=lambda: {"x": torch.tensor([2.0, NAN, 6.0])})
    outcomes = check_calls(call, [3, 0, 5], lambda row: None)
    assert [outcome.status for outcome in outcomes.values()] == ["wrong_result", "ok", "ok"]
    assert outcomes[3].message == "the error of x is 0.47, against the reference's"
    for name, tensor in (("y", torch.ones(3)), ("x", torch.ones(1))):
        wrong = replace(call, expected=lambda n=name, t=tensor: {n: t})
        with pytest.raises(InvalidInput, match="reference="):
            check_calls(wrong, [0], lambda row: None)


def test_a_reference_tells_which_tensors_are_results() -> None:
    call, tensors = doubling()

    def launch(row: int) -> None:
        tensors["x"] *= 2
        tensors["unchanged"].fill_(row)  # sums of a config's own programs

    plain = replace(call, launch=launch)
    right = replace(plain, expected=lambda: {"x": torch.tensor([2.0, NAN, 6.0])})
    for one, last in ((plain, "wrong_result"), (right, "ok")):
        found = check_calls(one, [5, 6], lambda row: None)
        assert [outcome.status for outcome in found.values()] == ["ok", last]
        tensors["x"].div_(2)
        tensors["unchanged"].fill_(1)


def test_a_kernel_that_changes_nothing_is_told() -> None:
    call = ExampleCall(lambda row: None, print, {"x": torch.ones(2)})
    (found,) = check_calls(call, [0], lambda row: None).values()
    assert (found.status, found.message) == ("wrong_result", "it changes none of its tensors")


def test_errors_are_of_the_whole_output() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one, one) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), one) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert relative_error(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])) == 0
    assert relative_error(torch.tensor([1.0]), torch.tensor([NAN])) == INF
