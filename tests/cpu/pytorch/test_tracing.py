"""While a program is traced: an operator of ours where it pays, else PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

import confpred
from confpred.errors import UnknownDevice
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.network.chains import Site
from confpred.network.fused import TracedCall
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch import choosing, operators, policy, routing, tracing
from confpred.pytorch.host import COMPILED, COMPILED_NETWORK, COMPILED_TRAINING

GEOMETRY = ((1, 1), (1, 1), (1, 1), 4)
H200 = get_device("h200")
NO_GRADIENTS, GRADIENTS = (False, False, False), (True, True, False)


def programs(layer: Any, **tensors: Tensor) -> list[list[str]]:
    """The operators of the programs that a layer and its gradients become."""
    found: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    out = torch.compile(layer, fullgraph=True, backend=backend)(**tensors)
    if out.requires_grad:
        out.sum().backward()
    return found


@pytest.mark.parametrize("gradients", [False, True])
def test_a_program_has_the_operators_that_run_or_pytorchs_own(gradients, monkeypatch) -> None:
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 2, 3, 3, requires_grad=gradients)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return confpred.conv2d(x, weight, padding=1, groups=4)

    theirs = programs(layer, x=x, weight=weight)
    assert "aten.convolution.default" in theirs[0]
    assert not any("confpred" in name for program in theirs for name in program)
    monkeypatch.setattr(operators, "pays", lambda *_: True)
    ours = programs(layer, x=x, weight=weight)
    assert "confpred.conv2d_run.default" in ours[0]
    assert not any("convolution" in name for program in ours for name in program)
    if gradients:
        assert "confpred.conv2d_backward.default" in ours[1]


def test_a_program_is_not_taken_for_an_export(monkeypatch) -> None:
    """PyTorch 2.11 says that it exports wherever it compiles."""
    monkeypatch.setattr(operators, "pays", lambda *_: True)
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return routing.compiled(x, weight, None, GEOMETRY, lambda: x)

    assert programs(layer, x=x, weight=torch.randn(8, 2, 3, 3)) == [["confpred.conv2d_run.default"]]


class Ours:
    """Choices of ours that are expected to save so many milliseconds a direction, of so many."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, saves_ms: float, pytorch_ms: float | None = 1.0
    ) -> None:
        self.asked: list[str] = []
        self.built: list[str] = []
        self.is_there = True
        monkeypatch.setattr(tracing.choosing, "choose", self.choose)
        monkeypatch.setattr(tracing.choosing, "is_ours", lambda _: True)
        monkeypatch.setattr(tracing.choosing, "pytorch_ms", lambda *_: pytorch_ms)
        monkeypatch.setattr(tracing.loading, "at_hand", self.at_hand)
        monkeypatch.setattr(
            tracing.policy,
            "saves_ms",
            lambda found, *_: saves_ms * sum(c is not None for c in found),
        )

    def choose(self, problem: Any, _: int) -> Any:
        self.asked.append(problem.direction)
        return SimpleNamespace(problem=problem)

    def at_hand(self, choice: Any, _: int) -> Any:
        self.built.append(choice.problem.direction)
        return choice if self.is_there else None


def traced_pays(
    *,
    mask: Any = NO_GRADIENTS,
    last: bool = True,
    groups: int = 4,
    layer_ms: float | None = None,
) -> bool:
    with FakeTensorMode():
        x = torch.empty(2, 8, 6, 5, dtype=torch.float16, device="cuda:0")
        x = x.to(memory_format=torch.channels_last) if last else x
        weight = torch.empty(8, 8 // groups, 3, 3, dtype=torch.float16, device="cuda:0")
        geometry = (*GEOMETRY[:3], groups)
        return tracing.pays(x, weight, None, None, geometry, "none", mask, layer_ms)


MORE, MUCH, LAYER = COMPILED.more, COMPILED.much, COMPILED.layer
NETWORK = COMPILED_NETWORK


@pytest.mark.parametrize(
    ("saves_ms", "pytorch_ms", "mask", "expected"),
    [
        (MORE, LAYER, NO_GRADIENTS, True),
        (MORE * 0.9, LAYER, NO_GRADIENTS, False),
        (MUCH * 0.9, LAYER * 0.9, NO_GRADIENTS, False),
        (MUCH, LAYER * 0.9, NO_GRADIENTS, True),
        (inf, None, NO_GRADIENTS, True),  # a pin
        (COMPILED_TRAINING.more / 2.9, COMPILED_TRAINING.layer / 2.9, GRADIENTS, True),
        (COMPILED_TRAINING.more / 3.5, COMPILED_TRAINING.layer / 2.9, GRADIENTS, False),
        (COMPILED_TRAINING.more / 2.9, COMPILED_TRAINING.layer / 3.5, GRADIENTS, False),
    ],
)
def test_what_it_saves_has_to_pay_for_the_host(
    saves_ms, pytorch_ms, mask, expected, monkeypatch
) -> None:
    ours = Ours(monkeypatch, saves_ms, pytorch_ms)
    assert traced_pays(mask=mask) is expected
    assert ours.asked == (["fprop", "dgrad", "wgrad"] if any(mask) else ["fprop"])
    assert ours.built == (ours.asked if expected else [])  # not for too little


@pytest.mark.parametrize(
    ("saves_ms", "mean_ms", "expected"),
    [
        (NETWORK.more, NETWORK.layer, True),
        (NETWORK.more * 0.9, NETWORK.layer, False),
        (1e3, NETWORK.layer * 0.9, False),
        (inf, NETWORK.layer * 0.9, True),  # a pin
    ],
)
@pytest.mark.parametrize("own_ms", [0.0, 2 * LAYER])
def test_a_network_that_is_known_is_judged_as_a_whole(
    own_ms, saves_ms, mean_ms, expected, monkeypatch
) -> None:
    Ours(monkeypatch, saves_ms, own_ms)
    assert traced_pays(layer_ms=mean_ms) is expected


LAYER_OF = {"n": 32, "c": 64, "h": 56, "w": 56, "k": 128, "r": 3, "s": 3}


@pytest.mark.parametrize(
    ("epilogue", "times_moved"),
    [
        ({}, 0),
        ({"bias": True}, 0),
        ({"bias": True, "activation": "relu"}, 2),
        ({"residual": True}, 3),
        ({"activation": "silu", "residual": True}, 3),
    ],
)
def test_a_program_has_one_kernel_for_all_that_follows(epilogue, times_moved, monkeypatch) -> None:
    monkeypatch.setattr(tracing.choosing, "pytorch_ms", lambda p, _: 1.0 if p == bare else 9.0)
    monkeypatch.setattr(tracing.driver, "device_of", lambda _: H200)
    bare = Problem(**LAYER_OF)
    moved = times_moved * 2 * 32 * 128 * 54 * 54
    more = 0.0025 + 1e3 * moved / (0.75 * H200.dram_bytes_per_s) if times_moved else 0.0
    assert tracing.compiled_ms(Problem(**LAYER_OF, **epilogue), 0) == pytest.approx(1.0 + more)


def test_the_gradient_of_a_bias_stays_with_that_of_the_filter(monkeypatch) -> None:
    monkeypatch.setattr(tracing.choosing, "pytorch_ms", lambda p, _: 2.0 if p.bias else 1.0)
    assert tracing.compiled_ms(Problem(**LAYER_OF, direction="wgrad", bias=True), 0) == 2.0


def test_the_mean_of_a_network_counts_each_call(monkeypatch) -> None:
    times = {"short": 1.0, "long": 4.0, "unknown": None}
    monkeypatch.setattr(tracing, "compiled_ms", lambda problem, _: times[problem])
    assert tracing.mean_layer_ms(["short"]) is None  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert tracing.mean_layer_ms(["short", "long", "short", "unknown"]) == 2.0
    assert tracing.mean_layer_ms(["unknown"]) is None
    assert tracing.mean_layer_ms([]) is None

    def refuse(*_: object) -> None:
        raise UnknownDevice("device", "none", "one")

    monkeypatch.setattr(tracing, "compiled_ms", refuse)
    assert tracing.mean_layer_ms(["short"]) is None
    choosing.forget()


def test_the_mean_of_a_network_is_found_once_while_the_same_decides(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tracing, "compiled_ms", lambda *given: asked.append(given) or 1.0)
    for _ in range(2):
        assert tracing.mean_layer_ms(["layer"]) == 1.0
    assert len(asked) == 1
    choosing.forget()
    assert tracing.mean_layer_ms(["layer"]) == 1.0
    assert len(asked) == 2
    choosing.forget()


def test_on_an_unknown_device_nothing_is_ours(monkeypatch) -> None:
    """There nothing is expected of PyTorch's operator either."""

    def unknown(*_: object) -> None:
        raise UnknownDevice("device", "none", "one")

    monkeypatch.setattr(tracing.choosing.driver, "device_of", unknown)
    assert not traced_pays()
    assert not traced_pays(mask=GRADIENTS)


def test_a_plan_that_is_not_there_saves_nothing(monkeypatch) -> None:
    ours = Ours(monkeypatch, 1.0)
    assert traced_pays(groups=1)
    ours.is_there = False
    assert not traced_pays(groups=1)


def test_a_cuda_graph_costs_no_host_time(monkeypatch) -> None:
    import torch._inductor.config as inductor

    Ours(monkeypatch, 0.001)
    assert not traced_pays()
    with inductor.patch({"triton.cudagraphs": True}):
        assert traced_pays()


def test_another_layout_or_device_stays_pytorchs(monkeypatch) -> None:
    Ours(monkeypatch, 1.0)
    assert traced_pays()
    assert not traced_pays(last=False)
    with FakeTensorMode():
        x = torch.empty(2, 8, 6, 5).to(memory_format=torch.channels_last)
        weight = torch.empty(8, 2, 3, 3)
        assert not tracing.pays(x, weight, None, None, GEOMETRY, "none", NO_GRADIENTS)


def test_what_is_measured_is_decided_at_run_time(monkeypatch) -> None:
    Ours(monkeypatch, 0.0)
    monkeypatch.setattr(policy, "_current", policy.Policy(verifier=object()))  # type: ignore[arg-type]
    assert traced_pays()
    assert not traced_pays(groups=1)  # most dense layers are left to PyTorch


def test_a_size_that_is_not_known_is_met_at_run_time(monkeypatch) -> None:
    Ours(monkeypatch, 1.0)
    monkeypatch.setattr(tracing, "_known", lambda _: None)
    assert traced_pays()
    assert not traced_pays(groups=1)


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("may_be_ours", [True, False])
def test_a_dense_layer_is_in_a_program_what_it_is_in_eager_mode(
    may_be_ours, pays, monkeypatch
) -> None:
    """PyTorch's operator where no model knows of dense layers, and where it would not pay."""
    constant = tracing.constant_while_compiling(lambda: may_be_ours)
    monkeypatch.setattr(routing, "dense_may_be_ours", constant)
    asked: list[bool] = []
    monkeypatch.setattr(operators, "pays", lambda *_: asked.append(True) or pays)
    ours = may_be_ours and pays
    with FakeTensorMode(), torch.no_grad(), confpred.enabled():
        x = torch.empty(2, 8, 6, 5, dtype=torch.float16, device="cuda:0")
        weight = torch.empty(8, 8, 3, 3, dtype=torch.float16, device="cuda:0")
        given = {"x": x.to(memory_format=torch.channels_last), "weight": weight}
        (program,) = programs(lambda x, weight: F.conv2d(x, weight, padding=1), **given)
    assert program == ["confpred.conv2d_run.default" if ours else "aten.convolution.default"]
    assert bool(asked) is may_be_ours


def key_of(layer: Any, **tensors: Tensor) -> str:
    """The last argument of the one operator of ours in the program that is traced of `layer`, which
    is what PyTorch knows a program on disk by."""
    found: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(n.args[-1] for n in graph.graph.nodes if "confpred" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(layer, fullgraph=True, backend=note)(**tensors)
    (key,) = found
    return key


class OtherPredictor(Predictor):
    """What it chooses by, nobody knows."""


@pytest.fixture
def settings(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """Those of a process with an H200, and back."""
    monkeypatch.setattr(choosing.driver, "device_of", lambda _: H200)
    monkeypatch.setattr(choosing, "_predictor", None)
    choosing.use_predictor(Predictor({}))
    yield monkeypatch
    monkeypatch.undo()
    choosing.forget()
    choosing.use_limits(UNLIMITED)
    choosing.accept(None)
    torch.backends.cudnn.allow_tf32 = True


PINS = {(Problem(2, 8, 6, 5, 8, 3, 3, padding=1, groups=4), H200): PYTORCH_OPERATOR}
CHANGES = {
    "pins": lambda _: choosing.use_predictor(Predictor({}, PINS)),
    "predictor": lambda _: choosing.use_predictor(OtherPredictor({})),
    "limits": lambda _: choosing.use_limits(Limits(workspace_bytes=0)),
    "bound": lambda _: choosing.accept(1.1),
    "tf32": lambda _: setattr(torch.backends.cudnn, "allow_tf32", False),
    "measured": lambda patch: patch.setattr(policy, "_current", policy.Policy(verifier=object())),
    "repeats": lambda patch: patch.setattr(torch.backends.cudnn, "deterministic", True),
    "version": lambda patch: patch.setattr(tracing, "__version__", "another"),
    "cudnn": lambda patch: patch.setattr(tracing, "_cudnn", lambda: ("another",)),
}


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_program_is_another_one_where_other_things_decide(change, optimized, settings) -> None:
    """So that PyTorch does not take one from its disk in which other layers are ours."""
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 8, 6, 5, dtype=torch.float16, device="cuda:0")
        x = x.to(memory_format=torch.channels_last)
        module = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False, device="meta")
        filters = torch.empty(8, 2, 3, 3, dtype=torch.float16, device="cuda:0")
        module.weight = nn.Parameter(filters, requires_grad=False)
        site = Site("layer", module, None, "none", residual=False)

        def routed(x: Tensor) -> Tensor:
            return confpred.conv2d(x, module.weight, padding=1, groups=4)

        layer = TracedCall(site) if optimized else routed
        first = key_of(layer, x=x)
        if change is None:
            choosing.use_predictor(Predictor({}))
        else:
            CHANGES[change](settings)
        assert (key_of(layer, x=x) == first) is (change is None)


def test_where_no_gpu_is_no_dense_layer_is_ours() -> None:
    assert not tracing.dense_may_be_ours()


@pytest.mark.slow(reason="Inductor compiles")
def test_a_program_of_inductor_calls_a_function(monkeypatch) -> None:
    """Without the dispatcher, in both passes, and with the same numbers."""
    real = tracing.pays
    monkeypatch.setattr(operators, "pays", lambda *given: real(*given) or True)
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(8, 2, 3, 3, requires_grad=True)
    calls = []
    for name in ("conv2d_run", "conv2d_backward"):
        function = getattr(torch.ops.confpred, f"{name}_in_programs")

        def noted(*given: Any, name: str = name, function: Any = function) -> Any:
            calls.append(name)
            return function(*given)

        monkeypatch.setattr(torch.ops.confpred, f"{name}_in_programs", noted)
    torch._dynamo.reset()
    layer = torch.compile(lambda x, weight: confpred.conv2d(x, weight, padding=1, groups=4).relu())
    out = layer(x, weight)
    expected = F.conv2d(x, weight, padding=1, groups=4).relu()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (x, weight)),
        torch.autograd.grad(expected.sum(), (x, weight)),
    )
    assert calls == ["conv2d_run", "conv2d_backward"]
