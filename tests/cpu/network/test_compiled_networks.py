"""Optimized networks under `torch.compile`: one graph, the same numbers, no fold in the graph."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from allocations import OfThisThread
from network_blocks import BLOCKS, Bottleneck, InvertedResidual, Network, images, made
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import confpred
from confpred.network import forward, fused, operators
from confpred.network.forward import OptimizedForward, Settings
from confpred.network.operators import _folds, conv2d_norm, conv2d_norm_run, fold
from confpred.problem.conv2d import Problem
from confpred.pytorch.operators import written
from confpred.pytorch.tracing import constant_while_compiling


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        self.seen.append(graph)
        return graph


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_one_graph_without_folds(kind: str) -> None:
    model, x, graphs = made(BLOCKS[kind]()), images(), Graphs()
    expected = model(x)
    grouped = sum(isinstance(m, nn.Conv2d) and m.groups > 1 for m in model.modules())
    compiled = torch.compile(confpred.optimize(model), fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(x), expected)
    (graph,) = graphs.seen
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(conv2d_norm) == grouped
    assert torch.rsqrt not in called


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_dense_layers_are_one_operator_where_they_may_be_ours(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(fused, "dense_may_be_ours", constant_while_compiling(lambda: True))
    model, x, graphs = made(BLOCKS[kind]()), images(), Graphs()
    expected = model(x)
    convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    compiled = torch.compile(confpred.optimize(model), fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(x), expected)
    (graph,) = graphs.seen
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(conv2d_norm) >= convolutions  # a module may be called twice
    assert nn.functional.conv2d not in called


@torch.no_grad()
def test_a_program_of_layers_that_do_not_pay_is_pytorchs(monkeypatch) -> None:
    """The same operators as without us, whether or not a dense layer might have been ours."""
    monkeypatch.setattr(operators, "pays", lambda *_: False)
    model, x, programs = made(BLOCKS["bottleneck"]()), images(), []

    def note(graph: torch.fx.GraphModule, _: object) -> object:
        programs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    for optimized, may_be_ours in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(
            fused, "dense_may_be_ours", constant_while_compiling(lambda may=may_be_ours: may)
        )
        torch._dynamo.reset()
        given = confpred.optimize(model) if optimized else model
        torch.compile(given, fullgraph=True, backend=aot_autograd(fw_compiler=note))(x)
    without, *others = (sorted(n for n in p if "convolution" in n or "norm" in n) for p in programs)
    assert others == [without, without]


@torch.no_grad()
def test_what_a_layer_takes_on_average_is_told(monkeypatch) -> None:
    """For the inputs that the network was optimized with."""
    layer, asked = Problem(2, 8, 6, 6, 8, 3, 3, groups=4), []
    monkeypatch.setattr(forward, "mean_layer_ms", lambda layers: asked.append(layers) or 0.25)
    told = []
    monkeypatch.setattr(operators, "pays", lambda *given: told.append(given[7:]) or False)
    model, x = made(BLOCKS["inverted residual"]()), images()
    OptimizedForward.install(model, Settings(layers=(layer,)).within(""))
    torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")(x)
    assert set(asked) == {(layer,)}
    assert set(told) == {(0.25,)}


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("dense", [True, False])
@torch.no_grad()
def test_inductor_gives_the_same_numbers(dense, pays, monkeypatch) -> None:
    monkeypatch.setattr(operators, "pays", lambda *_: pays)
    monkeypatch.setattr(fused, "dense_may_be_ours", constant_while_compiling(lambda: dense))
    model, x = made(Network(InvertedResidual(8), Bottleneck(8, 8, stride=2))), images()
    expected = model(x)
    compiled = torch.compile(confpred.optimize(model), fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    model.blocks[0].conv_dw.weight.mul_(2)
    changed = confpred.revert(copy.deepcopy(model))(x)
    assert not torch.allclose(changed, expected, rtol=1e-3)
    torch.testing.assert_close(compiled(x), changed)


@pytest.mark.parametrize("pays", [True, False])
@torch.no_grad()
def test_mixed_precision_compiles(pays, monkeypatch) -> None:
    monkeypatch.setattr(operators, "pays", lambda *_: pays)
    model, x = made(BLOCKS["inverted residual"]()), images()
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        compiled = torch.compile(confpred.optimize(model), fullgraph=True, backend="aot_eager")
        found = compiled(x)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found.float(), exact, rtol=0.1, atol=0.1 * exact.abs().max().item())


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards"),
    reason="this PyTorch has no such guards",
)
@pytest.mark.parametrize("dense", [True, False])
@torch.no_grad()
def test_what_is_traced_is_guarded_as_one(dense, monkeypatch) -> None:
    """Also where a module outside of the sites, such as the dropout, is asked for its mode."""
    monkeypatch.setattr(fused, "dense_may_be_ours", constant_while_compiling(lambda: dense))
    monkeypatch.setattr(
        torch._dynamo.guards,
        "guard_manager_testing_hook_fn",
        lambda guards, *_: together.extend(_guarded_together(guards.root)),
    )
    together: list[str] = []
    model, x = made(Network(InvertedResidual(8), nn.Dropout(), Bottleneck(8, 8))), images()
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        torch.compile(confpred.optimize(model), fullgraph=True, backend="eager")(x)
    assert "L['self']._traced" in together


def _guarded_together(guards: Any) -> Iterator[str]:
    """Where the objects are that are guarded by one look for all that is below them."""
    if guards.is_tag_safe_root():
        yield guards.get_source()
    for below in guards.get_child_managers():
        yield from _guarded_together(below)


@pytest.mark.slow(reason="torch.compile compiles a whole network again")
@torch.no_grad()
def test_a_dynamic_batch_compiles_once() -> None:
    model, graphs = confpred.optimize(made(BLOCKS["inverted residual"]())), Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=True)
    plain = confpred.revert(copy.deepcopy(model))
    for batch in (2, 3, 7):
        torch.testing.assert_close(compiled(images(batch=batch)), plain(images(batch=batch)))
    assert len(graphs.seen) == 1


def test_training_and_gradients_compile_to_the_original() -> None:
    model, graphs = confpred.optimize(made(BLOCKS["bottleneck"]())), Graphs()
    plain = confpred.revert(copy.deepcopy(model))
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    with torch.no_grad():
        compiled(images())
    torch.testing.assert_close(
        torch.autograd.grad(compiled(images()).sum(), list(model.parameters())),
        torch.autograd.grad(plain(images()).sum(), list(plain.parameters())),
    )
    model.train(), plain.train()
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), plain(images()))
    model.eval(), plain.eval()
    model.blocks[0].bn3.train(), plain.blocks[0].bn3.train()
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), plain(images()))
    model.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), plain(images()))
    calls = [[n.target for n in g.graph.nodes].count(conv2d_norm) for g in graphs.seen]
    assert calls == [2, 0, 0, 2, 2]  # a norm in training is in no chain


def close_to_the_original(compiled: nn.Module, model: nn.Module) -> None:
    """In evaluation or not, as `model` is; what its norms count is left as it was."""
    x, state = images(), copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        expected = confpred.revert(copy.deepcopy(model))(x)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-3)
    model.load_state_dict(state)


@pytest.mark.slow(reason="torch.compile compiles a whole network again")
@pytest.mark.parametrize("which", [0, -1])
def test_a_norm_that_goes_into_training_is_seen(which) -> None:
    model = confpred.optimize(made(BLOCKS["inverted residual"]()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close_to_the_original(compiled, model)
    norm = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)][which]
    norm.train()
    close_to_the_original(compiled, model)
    steps = int(norm.num_batches_tracked)
    with torch.inference_mode():
        compiled(images())
    assert norm.num_batches_tracked == steps + 1
    norm.eval()
    close_to_the_original(compiled, model)


@torch.no_grad()
def test_what_a_norm_learns_elsewhere_is_seen(monkeypatch) -> None:
    """Its statistics move without a sign of their own, and its count is no input of the program."""
    monkeypatch.setattr(operators, "pays", lambda *_: True)
    model, graphs = confpred.optimize(made(BLOCKS["inverted residual"]())), Graphs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.compile(model, fullgraph=True, backend=graphs)(images())
    inputs = [node for node in graphs.seen[0].graph.nodes if node.op == "placeholder"]
    assert all(node.meta["example_value"].is_floating_point() for node in inputs)
    for _ in range(2):
        compiled(images())
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.train()(torch.randn(4, norm.num_features, 5, 5))
            norm.eval()
        expected = confpred.revert(copy.deepcopy(model))(images())
        torch.testing.assert_close(compiled(images()), expected)


def test_what_is_written_to_a_parameter_is_seen() -> None:
    model = confpred.optimize(made(BLOCKS["inverted residual"]()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close_to_the_original(compiled, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    close_to_the_original(compiled, model)


def test_swapped_convolutions_compile() -> None:
    model = made(BLOCKS["bottleneck"]()).train()
    plain = copy.deepcopy(model)
    confpred.optimize(model, training=True)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(compiled(images()).sum(), list(model.parameters())),
            torch.autograd.grad(plain(images()).sum(), list(plain.parameters())),
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Input, filter, bias, and the norm's weight, bias, mean and variance."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
    return [
        x.to(dtype),
        torch.randn(8, 2, 3, 3),
        *(torch.randn(8) for _ in range(4)),
        torch.rand(8) + 0.5,
    ]


CALL = written((8, 2, 3, 3), ((1, 1), (1, 1), (1, 1), 4), "relu", 1e-5)


def reference(x, weight, bias, norm_weight, norm_bias, mean, variance, residual) -> Tensor:
    out = nn.functional.conv2d(x, weight, bias, padding=1, groups=4)
    out = nn.functional.batch_norm(out, mean, variance, norm_weight, norm_bias, eps=1e-5)
    return torch.relu(out if residual is None else out + residual)


@pytest.mark.parametrize("without", [(), (2,), (3, 4), (2, 3, 4)])
def test_the_operator_is_convolution_and_norm(without: tuple[int, ...]) -> None:
    given = [None if i in without else t for i, t in enumerate(operands())]
    for residual in (None, torch.randn(2, 8, 6, 5), torch.randn(1, 8, 1, 1)):
        expected = reference(*given, residual)
        torch.testing.assert_close(conv2d_norm(*given, residual, CALL), expected)


def test_the_operator_folds_again_what_has_changed() -> None:
    given = [t.double() for t in operands()]
    assert len({call(given).sum().item() for _ in range(2)}) == 1
    for index in range(1, 7):
        given[index].mul_(2)
        torch.testing.assert_close(call(given), reference(*given, None))
        given[index] = given[index].clone().mul_(2)
        torch.testing.assert_close(call(given), reference(*given, None))
        given[index].data = given[index] * 2
        torch.testing.assert_close(call(given), reference(*given, None))
    with torch.inference_mode():
        given = [t.clone() for t in given]
        call(given)
        given[1].mul_(2)
        torch.testing.assert_close(call(given), reference(*given, None))


def call(given: list[Tensor]) -> Tensor:
    found: Tensor = conv2d_norm(*given, None, CALL)
    return found


def test_the_operator_sees_training_steps() -> None:
    norm, given = nn.BatchNorm2d(8), operands()
    given[3:] = [norm.weight, norm.bias, norm.running_mean, norm.running_var]
    operators.may_be_folded(norm)
    with torch.no_grad():
        call(given)
        norm(given[0])
        torch.testing.assert_close(call(given), reference(*given, None))


def test_the_operator_keeps_no_filter_alive() -> None:
    given = operands()
    call(given)
    before = len(_folds._kept)
    del given
    assert len(_folds._kept) == before - 1


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_folded_is_not_kept_in_the_pool_of_a_cuda_graph(inference, monkeypatch) -> None:
    """A program that becomes a CUDA graph is warmed up in the graph's pool, where PyTorch refuses
    what stays there after the call."""
    given = operands()
    expected = reference(*given, None)
    folds: list[tuple[int, ...]] = []
    folded = operators._folded
    monkeypatch.setattr(operators, "_folded", lambda *a: folds.append(()) or folded(*a))
    with torch.inference_mode(inference), torch.no_grad(), OfThisThread() as pool:
        for _ in range(3):
            out = torch.ops.confpred.conv2d_norm_run_in_programs(*given, None, CALL)
            torch.testing.assert_close(out, expected)
            assert pool.alive() <= {out.untyped_storage().data_ptr()}
        given[1].mul_(2)
        out = torch.ops.confpred.conv2d_norm_run_in_programs(*given, None, CALL)
        assert pool.alive() <= {out.untyped_storage().data_ptr()}
    assert len(folds) == 2


def test_what_is_folded_in_a_capture_is_the_graphs_and_what_it_reads_is_kept(monkeypatch) -> None:
    """A graph knows nothing but addresses, and lives on when the filter changes."""
    given = operands()

    def fold_of() -> Tensor:
        return _folds.get(given[1], tuple(given[2:]), 1e-5, torch.float32)[0]

    monkeypatch.setattr(operators, "_is_for_a_graph", lambda _: True)
    with OfThisThread() as pool:
        made = fold_of()
        assert made.untyped_storage().data_ptr() in pool.alive()
        del made
        assert not pool.alive()
    monkeypatch.setattr(operators, "_is_for_a_graph", lambda _: False)
    eager = weakref.ref(fold_of())
    given[1].mul_(2)
    read = weakref.ref(fold_of())
    assert eager() is None
    monkeypatch.setattr(operators, "_is_for_a_graph", lambda _: True)
    assert fold_of() is read()
    monkeypatch.setattr(operators, "_is_for_a_graph", lambda _: False)
    given[1].mul_(2)
    assert fold_of() is not read()
    assert read() is not None
    given.clear()
    assert read() is None


def test_the_operator_computes_in_its_inputs_dtype() -> None:
    given = operands(torch.bfloat16)
    out = call(given)
    assert out.dtype == torch.bfloat16
    given[0] = given[0].float()
    torch.testing.assert_close(out.float(), reference(*given, None), rtol=0.1, atol=0.1)


def test_passes_pytorchs_checks_of_custom_operators() -> None:
    given = operands()
    residual = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
    for dtype in (torch.float32, torch.bfloat16):
        x = given[0].to(dtype)
        arguments = (x, *given[1:], residual.to(dtype), CALL)
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(conv2d_norm_run.default, arguments, test_utils=tests)


def test_a_fold_is_exact_to_rounding() -> None:
    weight, bias, *norm = (t.double() for t in operands()[1:])
    folded, shift = fold(weight, bias, *norm, 1e-5)
    x = operands()[0].double()
    out = torch.relu(nn.functional.conv2d(x, folded, shift, padding=1, groups=4))
    torch.testing.assert_close(out, reference(x, weight, bias, *norm, None))
    assert fold(weight.half(), None, *(t.half() for t in norm), 1e-5)[0].dtype == torch.float32
