"""Arguments and results of ready launches; the driver only records its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confpred.cuda.driver import NoContext
from confpred.cudnn.family import FAMILY_ND
from confpred.families.protocol import Candidate
from confpred.families.registry import operation_of
from confpred.launch.assignment import Assignment
from confpred.launch.runner import Runner, workspaces
from confpred.predict.choice import Choice
from confpred.predict.plan import plan_of
from confpred.predict.predictor import Predictor
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.limits import UNLIMITED
from confpred.problem.linear_chain import LinearChain
from confpred.problem.operation import Launch
from confpred.products import epilogue
from confpred.pytorch.linear_chain import operands
from confpred.pytorch.run import choosing, loading

LAST = torch.channels_last
FIELDS: dict[str, Any] = {"padding": 1, "groups": 4}
FPROP = Problem(2, 8, 7, 5, 8, 3, 3, bias=True, activation="relu", **FIELDS)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # there is no GPU
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())  # there is no GPU
    monkeypatch.setattr(loading, "current_stream", lambda ordinal: 7)  # there is no GPU
    made = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(loading, "_empty", made)  # memory of the CPU


class Driver:
    """Notes the stream and the address of each operand, by name."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, int]]] = []
        self.refuses = 0

    def __call__(self, names: Sequence[str]) -> Callable[[int, Sequence[int]], None]:
        def enqueue(stream: int, addresses: Sequence[int]) -> None:
            if self.refuses:
                self.refuses -= 1
                raise NoContext("no context")
            self.seen.append((stream, dict(zip(names, addresses, strict=True))))

        return enqueue


def ready(problem: Any, driver: Any, launch: Launch | None = None) -> loading.ReadyLaunch:
    launch = launch or Launch(())
    operands = operation_of(problem).operands(problem)
    names = (*(operand.name for operand in operands), *workspaces(launch))
    runner = Runner(launch, names, driver(names))
    return loading.ReadyLaunch(Assignment(problem, Candidate("any", 0)), runner, 0)


def image() -> Tensor:
    return torch.randn(2, 8, 7, 5).half().contiguous(memory_format=LAST)


def filters() -> Tensor:
    return torch.randn(8, 2, 3, 3).half().contiguous(memory_format=LAST)


@pytest.mark.parametrize(("problem", "names", "outputs"), [
    (FPROP, "in filter bias", {"out": (2, 8, 7, 5)}),
    (Problem(2, 8, 7, 5, 8, 3, 3, residual=True, **FIELDS), "in filter residual",
     {"out": (2, 8, 7, 5)}),
    (Problem(2, 8, 7, 5, 8, 3, 3, direction="dgrad", **FIELDS), "out_grad filter",
     {"in_grad": (2, 8, 7, 5)}),
    (Problem(2, 8, 7, 5, 8, 3, 3, direction="wgrad", bias=True, **FIELDS), "out_grad in",
     {"filter_grad": (8, 2, 3, 3), "bias_grad": (8,)}),
    (Problem(2, 8, 7, 5, 8, 3, 3, direction="wgrad", **FIELDS), "out_grad in",
     {"filter_grad": (8, 2, 3, 3)}),
])  # fmt: skip
def test_operands_go_by_name_and_outputs_come_back(
    problem: Problem, names: str, outputs: dict[str, tuple[int, ...]]
) -> None:
    tensors = {"filter": filters(), "bias": torch.randn(8).half()}
    given = [tensors.get(name, image()) for name in names.split()]
    driver = Driver()
    found = ready(problem, driver).run(*given, None)
    ((stream, addresses),) = driver.seen
    expected = dict(zip([*outputs, *names.split()], [*found, *given], strict=True))
    assert stream == 7
    assert addresses == {name: t.data_ptr() for name, t in expected.items()}
    assert [tuple(t.shape) for t in found] == list(outputs.values())
    assert all(t.dim() == 1 or t.is_contiguous(memory_format=LAST) for t in found)


def test_what_is_not_aligned_is_copied() -> None:
    driver = Driver()
    odd = torch.randn(9).half()[1:]
    ready(FPROP, driver).run(image(), filters(), odd)
    ((_, addresses),) = driver.seen
    assert addresses["bias"] != odd.data_ptr()
    assert addresses["bias"] % loading.ALIGNMENT == 0


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(loading.driver, "make_current", made.append)  # there is no GPU
    driver = Driver()
    driver.refuses = 1
    ready(FPROP, driver).run(image(), filters(), torch.randn(8).half())
    assert (len(driver.seen), made) == (1, [0])


def test_workspaces_are_new_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")  # memory of the CPU
    driver = Driver()
    both = ready(FPROP, driver, Launch((), zeroed_bytes=64, scratch_bytes=32))
    for _ in range(2):
        both.run(image(), filters(), torch.randn(8).half())
    assert all(list(addresses)[-2:] == ["zeroed", "scratch"] for _, addresses in driver.seen)


def test_the_next_plan_is_one_of_the_problems_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = ConvNd(1, 96, 416, 96, 3, d=9, h=240, t=3, r=3, padding=1)
    first, second = map(int, np.flatnonzero(FAMILY_ND.legal(volume, get_device("h100")))[:2])
    pinned = Choice(volume, "h100", "pinned", Candidate("cudnn_nd", second), 1.0)
    ranked = Predictor({}, plan_of([pinned]))
    monkeypatch.setitem(choosing._predictors, "conv", ranked)  # no shipped model has these plans
    monkeypatch.setattr(loading.driver, "device_of", lambda _: get_device("h100"))  # no GPU
    assigned = Assignment(volume, Candidate("cudnn_nd", first))
    assert next(loading._ranked_beside(assigned, 0, UNLIMITED)) == pinned


@pytest.mark.parametrize("bias", [True, False])
def test_a_chain_of_products_is_computed(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")  # memory of the CPU
    chain = LinearChain(4, 8, 16, 3, 3, dtype="float32", bias=True)
    assignment = Assignment(chain, Candidate(epilogue.FAMILY.name, 0))
    weights = [torch.randn(16, 8), torch.randn(16, 16), torch.randn(3, 16)]
    biases = [torch.randn(w.shape[0]) * bias for w in weights]
    x = torch.randn(4, 8)
    (found,) = loading.ready_launch(assignment, 0).run(x, *operands(weights, biases))
    for weight, b in zip(weights, biases, strict=True):
        x = torch.relu(torch.nn.functional.linear(x, weight, b))
    torch.testing.assert_close(found, x)
