"""Captures on the CPU, with all passes of a GPU: three seams of the backend are other ones.

The backend takes the graphs for those of CUDA device 0, the choices are given, and no CUDA graph is
made. All else is real: Dynamo, AOTAutograd, the passes, the operators. Kernels cannot run on
tensors of the CPU, and the operators let PyTorch compute them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hazards.base import failed_passes
from torch import Tensor, fx
from torch._functorch import config as functorch

from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import operation_of
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.norm import BatchNorm
from confpred.problem.norm_of_groups import Norm
from confpred.problem.record import Record
from confpred.pytorch import backend
from confpred.pytorch.run import choosing, convolve, loading
from confpred.pytorch.run.memory import converting


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.__version__ < "2.10":  # which keeps no graph of another backend
        items[:] = [item for item in items if item.get_closest_marker("keeps_graphs") is None]


KERNEL = Candidate("cudnn", 1)
#: Kernels that are chosen for problems of other types.
NORM_KERNELS = {
    BatchNorm: Candidate("batch_norm_two_pass", 0), Norm: Candidate("group_norm", 0),
}  # fmt: skip


@dataclass(slots=True)
class Pass:
    """One graph as it runs.

    Attributes:
        kind: ``inference``, ``forward`` or ``backward``.
        gm: the graph.
        told: what is told to what makes CUDA graphs.
    """

    kind: str
    gm: fx.GraphModule
    told: dict[str, Any]

    def targets(self) -> list[str]:
        """Return the operators, without what takes a result from a tuple."""
        found = (str(n.target) for n in self.gm.graph.nodes if n.op == "call_function")
        return [name for name in found if "getitem" not in name]

    def count(self, target: str) -> int:
        return self.targets().count(target)

    def calls(self, target: str) -> list[fx.Node]:
        return [n for n in self.gm.graph.nodes if str(n.target) == target]


@dataclass(slots=True)
class Captured:
    """Graphs that the backend was given and made.

    Attributes:
        wins: whether a kernel is chosen for a problem, or PyTorch's operator.
        asked: the problems of each graph.
        passes: the graphs as they run.
        options: those of each capture.
    """

    wins: Callable[[Problem], bool] = lambda problem: True
    asked: list[list[Problem]] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    options: list[backend.Options] = field(default_factory=list)
    _gm: Any = None

    def choose(self, problems: Sequence[Problem]) -> list[Choice]:
        self.asked.append(list(problems))
        choices = []
        for problem in problems:
            kernel = NORM_KERNELS.get(type(problem), KERNEL)
            candidate = kernel if self.wins(problem) else PYTORCH_OPERATOR
            choices.append(Choice(problem, "h100", "predicted", candidate, 1.0, pytorch_ms=2.0))
        return choices

    def chooser(self, ordinal: int, options: backend.Options) -> Any:
        self.options.append(options)
        return self.choose

    def why_no_graph(self, gm: fx.GraphModule, *_: Any) -> None:
        self._gm = gm

    def make_replayable(self, reason: str | None, plain: Any, *, kind: str, **told: Any) -> Any:
        self.passes.append(Pass(kind, self._gm, told))
        return converting(plain, told["dtypes"])

    def of(self, kind: str) -> Pass:
        """Return the only pass of a kind."""
        (found,) = (p for p in self.passes if p.kind == kind)
        return found


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """Captures as on a GPU, where a kernel is chosen for every layer."""
    seen = Captured()
    monkeypatch.setattr(backend, "ordinal_of", lambda graph: 0)  # as on a GPU
    monkeypatch.setattr(backend, "chooser", seen.chooser)  # no GPU has measured these layers
    monkeypatch.setattr(backend, "why_no_graph", seen.why_no_graph)  # the graph is kept, to look at
    monkeypatch.setattr(backend, "make_replayable", seen.make_replayable)  # CUDA graphs need a GPU
    return seen


class Launched:
    """A launch whose candidate is PyTorch's operator; operands lie as kernels read them."""

    def __init__(self, assignment: Assignment, launches: list[Record]) -> None:
        self.assignment, self._launches = assignment, launches

    def run(self, *inputs: Tensor | None) -> list[Tensor]:
        problem: Any = self.assignment.problem
        self._launches.append(problem)
        layout, operation = getattr(problem, "layout", "channels_last"), operation_of(problem)
        outputs = [o for o in operation.operands(problem) if o.terms]
        operands = [o for o in operation.operands(problem) if not o.terms]
        given: dict[str, Tensor] = {}
        for operand, t in zip(operands, [t for t in inputs if t is not None], strict=True):
            lies = t.movedim(1, -1) if t.dim() > 1 and layout == "channels_last" else t
            assert (tuple(lies.shape), lies.is_contiguous()) == (operand.shape, True)
            given[operand.name] = lies
        found: Any = operation.pytorch(problem, given)
        made = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
        results = [loading.dense(t, layout) for t in made]
        for operand, t in zip(outputs, results, strict=True):
            lies = t.movedim(1, -1) if t.dim() > 1 and layout == "channels_last" else t
            assert tuple(lies.shape) == operand.shape
        return results


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Record]]:
    """Problems that were launched: on tensors of the CPU as on those of a GPU, by PyTorch's
    operators in the place of kernels."""
    found: list[Record] = []

    def load(assignment: Assignment, *_: Any) -> Launched | None:
        is_ours = assignment.candidate != PYTORCH_OPERATOR
        return Launched(assignment, found) if is_ours else None

    monkeypatch.setattr(loading, "load", load)  # kernels need a GPU
    chosen = lambda problem, *_: load(Assignment(problem, KERNEL))  # noqa: E731
    monkeypatch.setattr(loading, "choose_and_load", chosen)  # no model has these layers
    monkeypatch.setattr(convolve, "alike", lambda x, *others: True)  # there is no GPU
    choosing.forget()
    yield found
    choosing.forget()


@pytest.fixture(autouse=True)
def nothing_captured(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test meets the captures, or the settings, of another one, and no pass fails."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Dynamo sets levels of its own.
    logging.getLogger("confpred").setLevel(logging.NOTSET)
    keeps = request.node.get_closest_marker("keeps_graphs") is not None
    with failed_passes() as failures, functorch.patch(enable_autograd_cache=keeps):
        yield
    torch._dynamo.reset()
    assert request.node.get_closest_marker("passes_fail") or not failures, failures
