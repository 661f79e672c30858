"""`torch.compile(model, backend="confpred")`: found by its name, with options that are checked."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from network_blocks import BLOCKS, Around, image, images, made
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.output_graph import OutputGraph

import confpred
from confpred.errors import ConfpredError, InvalidInput
from confpred.problem.limits import Limits
from confpred.problem.record import Record
from confpred.pytorch import backend
from confpred.pytorch.backend import Options, ordinal_of


@torch.no_grad()
def test_it_is_found_by_its_name() -> None:
    assert "confpred" in torch._dynamo.list_backends()
    model = made(BLOCKS["functional"]())
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
    assert Options.of({"limits": limits, "max_regret": 2}).constraints.limits == limits


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

    def fastest(problem, ordinal, top, constraints) -> None:
        seen.append(torch.ones(3).data_ptr())

    monkeypatch.setattr(backend.verify, "find_best", fastest)  # there is no GPU to time on
    monkeypatch.setattr(backend, "ordinal_of", lambda graph: 0)  # as on a GPU
    model = made(BLOCKS["functional"]()).train(training)
    told = {"graphs": False, "verify": 3}
    with torch.set_grad_enabled(training):
        torch.compile(model, backend="confpred", options=told)(image())
    assert seen
    assert all(seen)


#: Passes that rewrite graphs: the module, the function and whether only Inductor's way has it.
PASSES = [
    ("layouts", "to_channels_last", False), ("passes", "let_views_copy", False),
    ("passes", "drop_copies", False), ("fusing", "fuse", False),
    ("fusing", "lower_convolutions", False), ("normalising", "lower_norms", False),
    ("passes", "restore_eager_batch_norms", False),
    ("passes", "convert_together", False), ("passes", "leave_conversions", False),
    ("passes", "update_in_place", False),
    ("inductor", "decompose", True), ("inductor", "compile_pass", True),
]  # fmt: skip


@pytest.mark.passes_fail
@pytest.mark.parametrize(("module", "name", "needs_inductor"), PASSES)
def test_a_pass_that_fails_fails_no_program(
    captured, caplog, monkeypatch, module, name, needs_inductor
) -> None:
    """It has damaged the graph before; the graph runs as PyTorch made it, and is named once."""

    def damage(*given: Any, **named: Any) -> None:
        for graph in (x for x in given if isinstance(x, torch.fx.Graph)):
            node = next(n for n in graph.nodes if n.op == "call_function")
            graph.inserting_before(node)
            node.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
        raise ValueError("a fault\nof two lines")

    monkeypatch.setattr(getattr(backend, module), name, damage)  # a pass with a fault
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    plain, found = copy.deepcopy(model), []
    ours = torch.compile(model, backend="confpred", options={"inductor": needs_inductor})
    for call in (ours, plain):
        out = call(images())
        out.square().mean().backward()
        with torch.no_grad():
            again = call(images() + 1)
        net = plain if call is plain else model
        found.append([out.detach(), again, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*found)
    said = [r.getMessage() for r in caplog.records if "a fault" in r.getMessage()]
    assert said
    assert all("failed: ValueError: a fault" in text for text in said)
    assert len(said) == len(set(said))


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_inductors_processes_start_while_layers_are_chosen(
    captured, monkeypatch, training: bool, inductor: bool
) -> None:
    """They take seconds to start; a kernel that finds none is compiled in this process. Where they
    cannot start, Inductor compiles without them."""
    seen: list[str] = []

    def start() -> None:
        seen.append("started")
        raise RuntimeError("no more processes")

    def wins(problem: Record) -> bool:
        seen.append("chosen")
        return True

    # Triton, which they compile for, is not there without a GPU.
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", start)
    captured.wins = wins
    model, x = nn.Conv2d(3, 4, 3), images().contiguous(memory_format=torch.channels_last)
    with torch.set_grad_enabled(training):
        out = torch.compile(model, backend="confpred", options={"inductor": inductor})(x)
    torch.testing.assert_close(out, model(x))
    assert seen[: 1 + inductor] == ["started"] * inductor + ["chosen"]
    assert seen.count("started") == inductor


@pytest.mark.parametrize("training", [False, True])
def test_a_graph_is_rewritten_in_one_go(captured, monkeypatch, training: bool) -> None:
    """Each attempt copies a graph: one in inference, else the joint graph and its two parts."""
    attempts, attempt = [], backend.passes.attempt
    # Counts the attempts.
    monkeypatch.setattr(
        backend.passes, "attempt", lambda *given: attempts.append(1) or attempt(*given)
    )
    with torch.set_grad_enabled(training):
        out = torch.compile(made(BLOCKS["functional"]()), backend="confpred")(images())
    if training:
        out.square().mean().backward()
    assert len(attempts) == (3 if training else 1)


@pytest.mark.passes_fail
def test_a_network_that_cannot_be_captured_runs_as_it_is(captured, caplog, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no such graph")

    monkeypatch.setattr(backend.passes, "refuse_mixed_dtypes", refuse)  # a capture that fails
    model = made(BLOCKS["functional"]()).eval()
    plain = copy.deepcopy(model)
    optimized = confpred.optimize(model)
    for _ in range(2):
        torch.testing.assert_close(optimized(images()), plain(images()))
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "runs in eager mode, as its capture failed: ValueError: no such graph" in said
    with pytest.raises(ConfpredError, match="no such graph"):
        confpred.optimize(plain, images())


@pytest.mark.passes_fail
@pytest.mark.parametrize("kind", [AssertionError, IndexError])
def test_errors_that_dynamo_passes_on_as_they_are(captured, monkeypatch, kind) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise kind("no such graph")

    monkeypatch.setattr(OutputGraph, "compile_subgraph", refuse)  # a fault of Dynamo's own
    model = made(BLOCKS["functional"]()).eval()
    expected = model(images())
    torch.testing.assert_close(confpred.optimize(model)(images()), expected)
    assert "no such graph" in str(confpred.status(model))


@pytest.mark.parametrize("later", [False, True])
def test_no_part_runs_twice_where_a_later_one_cannot_be_captured(
    captured, monkeypatch, later: bool
) -> None:
    """The first part writes to its input and to the norm's statistics. The later one fails at the
    first call, or at a later one of another size."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x.add_(1)
        y = m.norm(m.conv(x))
        torch._dynamo.graph_break()
        return m.conv(y[:, :, m.start :])

    def refuse(graph: Any) -> None:
        if len(captured.passes) > later:
            raise ValueError("no such graph")

    monkeypatch.setattr(backend.passes, "refuse_mixed_dtypes", refuse)  # a capture that fails
    model = Around(forward, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3))
    plain, before = copy.deepcopy(model), dynamo.suppress_errors
    optimized = confpred.optimize(model)
    for start in range(3):
        model.start = plain.start = start
        found = []
        for call in (optimized, plain):
            x = images()
            with torch.no_grad():
                found.append([call(x), x, *call.buffers()])
        torch.testing.assert_close(*found)
    assert "eager" not in str(confpred.status(model))
    assert dynamo.suppress_errors == before
