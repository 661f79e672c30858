"""`torch.compile(model, backend="confpred")`: found by its name, with options that are checked."""

from __future__ import annotations

import pytest
import torch
from network_blocks import BLOCKS, image, images, made
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from confpred.errors import InvalidInput
from confpred.problem.limits import Limits
from confpred.pytorch import backend
from confpred.pytorch.backend import Options, ordinal_of


@torch.no_grad()
def test_it_is_found_by_its_name() -> None:
    assert "confpred" in torch._dynamo.list_backends()
    model = made(BLOCKS["bottleneck"]())
    compiled = torch.compile(model, backend="confpred", options={"graphs": False, "verify": 2})
    torch.testing.assert_close(compiled(images()), model(images()))


@pytest.mark.parametrize(("told", "words"), [
    ({"options": {"graph": False}}, "options='graph' is not allowed; allowed: graphs"),
    ({"options": {"max_regrets": 2}}, "allowed: max_regret"),
    ({"options": {"zzz": 1}}, "options='zzz' is not allowed; allowed: inductor or graphs"),
    ({"options": {"verify": 9}}, "verify=9 is not allowed"),
    ({"mode": "reduce-overhead"}, "mode='reduce-overhead' is not allowed"),
])  # fmt: skip
def test_what_is_not_allowed_is_named(told, words) -> None:
    compiled = torch.compile(nn.Conv2d(3, 3, 1), backend="confpred", **told)
    with pytest.raises((InvalidInput, BackendCompilerFailed), match=words):
        compiled(images())


@pytest.mark.parametrize(("name", "value"), [
    ("graphs", 1), ("freeze", None), ("verify", True), ("verify", -1), ("verify", 2.0),
    ("max_regret", 0.5), ("limits", {"tf32": False}),
])  # fmt: skip
def test_values_of_options_are_checked(name, value) -> None:
    with pytest.raises(InvalidInput) as caught:
        Options.of({name: value})
    assert caught.value.field == name


def test_options_have_defaults() -> None:
    assert Options.of(None) == Options.of({}) == Options(graphs=True, freeze=False, verify=0)
    limits = Limits(workspace_bytes=0)
    assert Options.of({"limits": limits, "max_regret": 2}).wishes.limits == limits


def test_options_reach_the_choices(captured) -> None:
    told = {"verify": 3, "max_regret": 1.5, "limits": Limits(tf32=False)}
    compiled = torch.compile(made(BLOCKS["functional"]()), backend="confpred", options=told)
    with torch.no_grad():
        compiled(image())
    assert captured.options == [Options(**told)]


@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_graphs_can_be_turned_off(captured, graphs) -> None:
    compiled = torch.compile(
        made(BLOCKS["functional"]()), backend="confpred", options={"graphs": graphs}
    )
    with torch.no_grad():
        compiled(images())
    assert len(captured.passes) == graphs


@torch.no_grad()
def test_a_graph_of_the_cpu_is_left_as_it_is() -> None:
    graph = torch.fx.symbolic_trace(nn.Conv2d(3, 3, 1)).graph
    assert ordinal_of(graph) is None
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 3, 4, 4, device="meta")
    assert ordinal_of(graph) is None


@pytest.mark.parametrize("training", [False, True])
def test_measurements_of_verify_have_real_tensors(monkeypatch, training) -> None:
    """AOTAutograd calls the backend under its own modes, in which nothing can be timed."""
    seen = []

    def fastest(problem, ordinal, top, wishes) -> None:
        seen.append(torch.ones(3).data_ptr())

    monkeypatch.setattr(backend.verify, "fastest", fastest)
    monkeypatch.setattr(backend, "ordinal_of", lambda graph: 0)
    model = made(BLOCKS["functional"]()).train(training)
    told = {"graphs": False, "verify": 3}
    with torch.set_grad_enabled(training):
        torch.compile(model, backend="confpred", options=told)(image())
    assert seen
    assert all(seen)
