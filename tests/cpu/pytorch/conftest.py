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
from torch import fx

from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.norm import BatchNorm
from confpred.pytorch import backend

KERNEL, NORM_KERNEL = Candidate("cudnn", 1), Candidate("batch_norm_two_pass", 0)


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

    def choose(self, problems: Sequence[Problem]) -> list[Choice]:
        self.asked.append(list(problems))
        choices = []
        for problem in problems:
            kernel = NORM_KERNEL if isinstance(problem, BatchNorm) else KERNEL
            candidate = kernel if self.wins(problem) else PYTORCH_OPERATOR
            choices.append(Choice(problem, "h100", "predicted", candidate, 1.0, pytorch_ms=2.0))
        return choices

    def chooser(self, ordinal: int, options: backend.Options) -> Any:
        self.options.append(options)
        return self.choose

    def graphed(self, gm: fx.GraphModule, plain: Any, *, kind: str, **told: Any) -> Any:
        self.passes.append(Pass(kind, gm, told))
        return plain

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
    monkeypatch.setattr(backend, "graphed", seen.graphed)  # CUDA graphs need a GPU
    return seen


@pytest.fixture(autouse=True)
def nothing_captured(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test meets the captures, or the settings, of another one, and no pass fails."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Dynamo sets levels of its own.
    logging.getLogger("confpred").setLevel(logging.NOTSET)
    with failed_passes() as failures:
        yield
    torch._dynamo.reset()
    assert request.node.get_closest_marker("passes_fail") or not failures, failures
