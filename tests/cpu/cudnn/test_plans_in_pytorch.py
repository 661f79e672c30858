"""Dense layers inside PyTorch by cuDNN's plans: which plan is launched, under which settings.

All is real but cuDNN and the GPU: tensors are the CPU's, and a launch notes its plan and computes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import confpred
from confpred.cudnn.family import FAMILY
from confpred.cudnn.table import table
from confpred.errors import LaunchError
from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.operation import Plan
from confpred.pytorch import autograd, choosing, directions, gradients, loading, policy, ready
from confpred.pytorch.host import EAGER, EAGER_TRAINING

H200 = get_device("h200")
LAYER = Problem(2, 16, 6, 5, 24, 3, 3, padding=1, bias=True, dtype="float32")
WGRAD = replace(LAYER, direction="wgrad", bias=False)
GEOMETRY = ((1, 1), (1, 1), (1, 1), 1)
ALL, NONE = (True, True, True), (False, False, False)


def plans_of(problem: Problem, **notes: bool) -> list[Candidate]:
    """The plans that may serve `problem` and have these notes."""
    rows = FAMILY.legal(problem, H200)
    for name, value in notes.items():
        rows &= table().notes[name] == value
    return [Candidate(FAMILY.name, int(row)) for row in np.flatnonzero(rows)]


TF32, EXACT = (plans_of(LAYER, tensor_core=core)[0] for core in (True, False))


class Cudnn:
    """Builds every plan but those `refused`, and notes what is launched.

    Attributes:
        workspace_bytes: what every plan needs.
    """

    workspace_bytes = 0

    def __init__(self) -> None:
        self.built: list[tuple[str, Plan]] = []
        self.launched: list[tuple[str, Plan]] = []
        self.refused: list[Plan] = []

    def __call__(self, problem: Problem, ordinal: int) -> Any:
        cudnn = self

        class Plans:
            def is_of_this_release(self, plan: Plan) -> bool:
                return True

            def build(self, plan: Plan) -> Any:
                cudnn.built.append((problem.direction, plan))
                if plan in cudnn.refused:
                    raise LaunchError("cuDNN does not offer the plan for this problem")
                return Built(plan)

        class Built:
            workspace_bytes = cudnn.workspace_bytes

            def __init__(self, plan: Plan) -> None:
                self.plan = plan

            def bind(self, names: Any) -> Callable[..., None]:
                return lambda *_: cudnn.launched.append((problem.direction, self.plan))

        return Plans()

    def last(self) -> list[tuple[str, Plan]]:
        """What was launched since the last time."""
        found, self.launched = self.launched, []
        return found


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudnn]:
    """An H200 whose tensors are the CPU's."""
    found = Cudnn()
    monkeypatch.setattr(choosing.driver, "device_of", lambda _: H200)
    monkeypatch.setattr(choosing.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(loading, "Plans", found)
    monkeypatch.setattr(choosing, "_notice_changes", lambda _: None)
    monkeypatch.setattr(ready, "current_device", lambda: -1)
    monkeypatch.setattr(ready, "current_stream", lambda _: 0)
    monkeypatch.setattr(ready, "empty", lambda *given: torch.empty_strided(*given[:2]))
    for module in (directions, gradients):
        monkeypatch.setattr(module, "alike", lambda *_: True)
    monkeypatch.setattr(choosing, "_predictor", None)
    torch.backends.cudnn.allow_tf32 = True
    yield found
    torch.backends.cudnn.allow_tf32 = True
    choosing.use_limits(UNLIMITED)
    choosing.forget()


class ByLimits(Predictor):
    """Pins a plan where TF32 is allowed, and another where it is not."""

    def within(self, limits: Limits) -> Predictor:
        pin = TF32 if limits.tf32 else EXACT
        return Predictor({}, {(LAYER, H200): pin}).within(limits)


def plan(candidate: Candidate, problem: Problem = LAYER) -> Plan:
    found = FAMILY.launch(problem, candidate.config_id).plan
    assert found is not None
    return found


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Input, filter and bias."""
    torch.manual_seed(0)
    last = {"memory_format": torch.channels_last}
    x, weight = torch.randn(2, 16, 6, 5).to(**last), torch.randn(24, 16, 3, 3).to(**last)
    return x, weight, torch.randn(24)


def forward(limits: Limits | None = None) -> Tensor:
    return directions.forward(*tensors(), None, GEOMETRY, "none", ("a test", limits), limits)


def set_allow_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


def set_precision(allowed: bool) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"


def set_precision_of_all(allowed: bool) -> None:
    torch.backends.cudnn.conv.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32" if allowed else "ieee"


@pytest.fixture(params=[set_allow_tf32, set_precision, set_precision_of_all])
def switch(request: pytest.FixtureRequest) -> Iterator[Callable[[bool], None]]:
    """PyTorch's ways to allow TF32 in convolutions; before 2.9 there was but one."""
    newer = hasattr(torch.backends.cudnn, "conv")
    if newer or request.param is set_allow_tf32:
        yield request.param
    else:
        yield set_allow_tf32
    if newer:
        torch.backends.fp32_precision = "none"
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        torch.backends.cudnn.rnn.fp32_precision = "tf32"


def test_a_switch_that_is_turned_is_noticed_by_what_runs(cudnn: Cudnn, switch: Any) -> None:
    """At the next call, which PyTorch's operator serves; then what is chosen anew does."""
    choosing.use_predictor(ByLimits({}))
    right = F.conv2d(*tensors(), *GEOMETRY)
    switch(True)
    for _ in range(3):
        forward()
    assert cudnn.last() == 3 * [("fprop", plan(TF32))]
    switch(False)
    torch.testing.assert_close(forward(), right)
    assert cudnn.last() == []
    for _ in range(3):
        forward()
    assert cudnn.last() == 3 * [("fprop", plan(EXACT))]
    switch(True)
    torch.testing.assert_close(forward(), right)
    for _ in range(2):
        forward()
    assert cudnn.last() == 2 * [("fprop", plan(TF32))]


def test_a_switch_is_noticed_between_forward_and_backward(cudnn: Cudnn) -> None:
    """The gradients of a layer whose forward was before."""
    dgrad = replace(LAYER, direction="dgrad", bias=False)
    pins = {(p, H200): plans_of(p, tensor_core=True)[0] for p in (dgrad, WGRAD)}
    choosing.use_predictor(Predictor({}, pins))
    x, weight, bias = tensors()
    layer = gradients.find_layer(x, weight, bias, torch.float32, GEOMETRY, ALL)
    assert isinstance(layer, gradients.Layer)
    out_grad = torch.randn(2, 24, 6, 5).to(memory_format=torch.channels_last)
    layer.backward(out_grad, x, weight, ALL)
    assert [direction for direction, _ in cudnn.last()] == ["dgrad", "wgrad"]
    torch.backends.cudnn.allow_tf32 = False
    found = layer.backward(out_grad, x, weight, ALL)
    assert cudnn.last() == []
    for mine, exact in zip(found, gradients_of(out_grad), strict=True):
        torch.testing.assert_close(mine, exact)


def gradients_of(out_grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.requires_grad_() for t in tensors()]
    return torch.autograd.grad(F.conv2d(*leaves, *GEOMETRY), leaves, out_grad)


def test_a_tf32_plan_is_not_even_built_where_it_is_forbidden(cudnn: Cudnn) -> None:
    """Though it was chosen: the switch may be turned meanwhile."""
    choosing.use_predictor(ByLimits({}))
    choice = choosing.choose(LAYER, 0)
    assert choice is not None
    assert choice.candidate == TF32
    torch.backends.cudnn.allow_tf32 = False
    loading.load(choice, 0)
    assert not [found for _, found in cudnn.built if found.tf32]


def test_half_precision_asks_for_no_switch(cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    half = replace(LAYER, dtype="float16")
    choosing.use_predictor(Predictor({}, {(half, H200): plans_of(half)[0]}))
    choice = choosing.choose(half, 0)
    assert choice is not None
    monkeypatch.setattr(loading, "convolutions_allow_tf32", lambda: pytest.fail("asked"))
    assert loading.load(choice, 0) is not None


def test_the_launch_knows_which_plan_it_is(cudnn: Cudnn) -> None:
    """What it saves is reckoned by the plan that runs, not by the one that is not offered."""
    choosing.use_predictor(ByLimits({}))
    choice = choosing.choose(LAYER, 0)
    assert choice is not None
    second = replace(choice, candidate=EXACT, predicted_ms=7.0)
    cudnn.refused.append(plan(TF32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictor, "rank", lambda *_: [choice, second])
        found = loading.load(choice, 0)
    assert found is not None
    assert (found.choice.candidate, found.choice.predicted_ms) == (EXACT, 7.0)
    assert not found.tf32


def test_what_is_at_hand_is_what_would_run(cudnn: Cudnn) -> None:
    """Which is looked for once, until everything is chosen anew."""
    choosing.use_predictor(ByLimits({}))
    choice = choosing.choose(LAYER, 0)
    assert choice is not None
    for _ in range(3):
        assert loading.at_hand(choice, 0) == choice
    assert len(cudnn.built) == 1
    cudnn.refused.append(plan(TF32))
    choosing.forget()
    for _ in range(3):
        assert loading.at_hand(choice, 0) is None
    assert len(cudnn.built) == 2


def test_pins_of_dense_layers_are_followed_where_no_model_knows_any() -> None:
    pinned = Predictor({}, {(LAYER, H200): TF32})
    assert pinned.knows_libraries(H200)
    assert not pinned.knows_libraries("h100")
    assert not Predictor({}, {(LAYER, H200): PYTORCH_OPERATOR}).knows_libraries(H200)
    grouped = replace(LAYER, groups=2)
    assert not Predictor({}, {(grouped, H200): TF32}).knows_libraries(H200)


@pytest.mark.parametrize("mask", [ALL, (False, True, True), (True, True, False)])
def test_a_bias_is_summed_beside_the_plan_of_the_filter(cudnn: Cudnn, mask: Any) -> None:
    dgrad = replace(LAYER, direction="dgrad", bias=False)
    pins = {(p, H200): plans_of(p)[0] for p in (dgrad, WGRAD)}
    choosing.use_predictor(Predictor({}, pins))
    x, weight, bias = tensors()
    layer = gradients.find_layer(x, weight, bias, torch.float32, GEOMETRY, mask)
    assert isinstance(layer, gradients.Layer)
    out_grad = torch.randn(2, 24, 6, 5).to(memory_format=torch.channels_last)
    grad_x, grad_weight, grad_bias = layer.backward(out_grad, x, weight, mask)
    assert [direction for direction, _ in cudnn.last()] == ["dgrad"] * mask[0] + ["wgrad"]
    assert (grad_x is not None) is mask[0]
    assert grad_weight is not None
    assert grad_weight.shape == weight.shape
    assert (grad_bias is not None) is mask[2]
    if grad_bias is not None:
        torch.testing.assert_close(grad_bias, gradients_of(out_grad)[2])


@pytest.mark.parametrize(
    ("saves_ms", "pytorch_ms", "mask", "expected"),
    [
        (EAGER.more, EAGER.layer, NONE, True),
        (EAGER.more * 0.9, EAGER.layer, NONE, False),
        (EAGER.more, EAGER.layer * 0.9, NONE, False),
        (EAGER.much * 0.9, None, NONE, False),
        (EAGER.much, EAGER.layer * 0.9, NONE, True),
        (inf, None, NONE, True),  # a pin
        (EAGER_TRAINING.much, 0.0, ALL, True),
        (EAGER_TRAINING.much * 0.9, 1.0, ALL, False),
    ],
)
def test_an_eager_plan_has_to_pay_for_the_host(
    saves_ms, pytorch_ms, mask, expected, cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing.use_predictor(ByLimits({}))
    monkeypatch.setattr(policy, "saves_ms", lambda *_: saves_ms)
    monkeypatch.setattr(gradients, "pytorch_ms", lambda *_: pytorch_ms)
    layer = gradients.find_layer(*tensors(), torch.float32, GEOMETRY, mask)
    assert isinstance(layer, gradients.Layer)
    assert layer.pays is expected


def test_calls_of_one_place_do_not_displace_each_other(
    cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a compiled program, whose layers of one geometry share a place."""
    summed = replace(LAYER, residual=True)
    pins = {(p, H200): plans_of(p)[0] for p in (LAYER, summed, replace(LAYER, h=7))}
    choosing.use_predictor(Predictor({}, pins))
    noted: list[Any] = []
    real = directions.note
    monkeypatch.setattr(directions, "note", lambda *given: noted.append(given) or real(*given))
    x, weight, bias = tensors()
    taller = torch.randn(2, 16, 7, 5).to(memory_format=torch.channels_last)
    residual = torch.randn(2, 24, 6, 5).to(memory_format=torch.channels_last)
    for _ in range(4):
        for image, other in ((x, None), (x, residual), (taller, None)):
            directions.forward(image, weight, bias, other, GEOMETRY, "none", "a place")
    assert len(cudnn.launched) == 12
    assert len(noted) <= 3 + 2  # what is found anew makes the others note again


@pytest.mark.parametrize("adds_bias", [True, False])
def test_an_eager_kernel_of_ours_has_to_pay_unless_it_adds_a_bias(
    adds_bias, cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = {(replace(LAYER, bias=adds_bias), H200): TF32}
    choosing.use_predictor(Predictor({}, pins))
    kernel = object.__new__(ready.ReadyLaunch)
    kernel.is_plan, kernel.run, kernel.choice = False, lambda *_: None, None
    monkeypatch.setattr(policy, "prepare", lambda *_: kernel)
    monkeypatch.setattr(policy, "saves_ms", lambda *_: EAGER.more * 0.9)
    monkeypatch.setattr(gradients, "pytorch_ms", lambda *_: EAGER.layer)
    x, weight, bias = tensors()
    given = bias if adds_bias else None
    layer = gradients.find_layer(x, weight, given, torch.float32, GEOMETRY, NONE)
    assert isinstance(layer, gradients.Layer)
    assert layer.pays is adds_bias


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("way", ["as it is", "cast", "with gradients"])
def test_what_does_not_pay_for_the_host_runs_in_graphs_alone(
    pays, way, cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing.use_predictor(ByLimits({}))
    x, weight, bias = tensors()
    mask = ALL if way == "with gradients" else NONE
    layer = gradients.find_layer(x, weight, bias, torch.float32, GEOMETRY, mask)
    assert isinstance(layer, gradients.Layer)
    layer.pays = pays
    monkeypatch.setattr(autograd, "find_layer", lambda *_: layer)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: way == "cast")
    if way == "cast":
        weight = weight.half()
    serve = autograd.find_convolution(
        "a test", x, weight, bias, GEOMETRY, lambda x, weight, bias: "PyTorch's",
        dtype=torch.float32, mask=mask,
    )  # fmt: skip
    assert choosing.served["a test"] is serve
    serve(x, weight, bias)
    assert len(cudnn.last()) == pays
    monkeypatch.setattr(autograd, "is_capturing", lambda: True)
    assert serve(x, weight, bias).shape == (2, 24, 6, 5)
    assert len(cudnn.last()) == 1


def test_only_kernels_of_groups_are_asked_for_both_gradients() -> None:
    for groups in (1, 2, 8):
        geometry = (*GEOMETRY[:3], groups)
        shape = gradients.Shape(
            (2, 16, 6, 5), (16, 16 // groups, 3, 3), True, torch.half, 0, geometry
        )
        assert shape.problem("weight").bias is (groups > 1)
        assert shape.problem("out").bias


@pytest.fixture(params=["deterministic algorithms", "cudnn.deterministic"])
def exactly(request: pytest.FixtureRequest) -> Iterator[Callable[[bool], None]]:
    """PyTorch's two switches for what repeats to the bit."""

    def turn(on: bool) -> None:
        if request.param == "cudnn.deterministic":
            torch.backends.cudnn.deterministic = on
        else:
            torch.use_deterministic_algorithms(on)

    yield turn
    turn(False)


@pytest.mark.parametrize("by_operator", [False, True])
def test_what_has_to_repeat_is_noticed_at_each_backward(
    cudnn: Cudnn, exactly: Callable[[bool], None], by_operator: bool
) -> None:
    """By a layer whose forward was before, and by the operator of a compiled program."""
    strict = replace(WGRAD, deterministic=True)
    free, repeatable = plans_of(WGRAD)[0], plans_of(strict)[1]
    choosing.use_predictor(Predictor({}, {(WGRAD, H200): free, (strict, H200): repeatable}))
    x, weight, bias = tensors()
    out_grad = torch.randn(2, 24, 6, 5).to(memory_format=torch.channels_last)
    mask = (False, True, True)
    layer = gradients.find_layer(x, weight, bias, torch.float32, GEOMETRY, mask)
    assert isinstance(layer, gradients.Layer)

    def backward() -> list[tuple[str, Plan]]:
        if by_operator:
            gradients.backward(out_grad, x, weight, GEOMETRY, mask, "a test")
        else:
            layer.backward(out_grad, x, weight, mask)
        return cudnn.last()

    for _ in range(2):
        assert backward() == [("wgrad", plan(free, WGRAD))]
        exactly(True)
        assert backward() == backward() == [("wgrad", plan(repeatable, strict))]
        exactly(False)


def test_an_operator_whose_gradient_was_pytorchs_notices_too(
    cudnn: Cudnn, exactly: Callable[[bool], None]
) -> None:
    strict = replace(WGRAD, deterministic=True)
    choosing.use_predictor(Predictor({}, {(strict, H200): plans_of(strict)[0]}))
    x, weight, _ = tensors()
    out_grad = torch.randn(2, 24, 6, 5).to(memory_format=torch.channels_last)
    launched = []
    for on in (False, True, False):
        exactly(on)
        gradients.backward(out_grad, x, weight, GEOMETRY, (False, True, False), "a test")
        launched.append(len(cudnn.last()))
    assert launched == [0, 1, 0]


def test_a_plan_that_does_not_repeat_is_not_within_the_limit() -> None:
    """Though it is pinned; no plan that is exact is one of those."""
    assert all(table().notes["repeatable"][c.config_id] for c in plans_of(WGRAD))
    (differs, *_) = np.flatnonzero(~table().notes["repeatable"]).tolist()
    pinned = Predictor({}, {(WGRAD, H200): Candidate(FAMILY.name, differs)})
    assert pinned.choose(WGRAD, H200).source == "pinned"
    assert pinned.within(Limits(deterministic=True)).choose(WGRAD, H200).source != "pinned"


def test_a_limit_of_the_workspace_holds_for_what_a_plan_turns_out_to_need(cudnn: Cudnn) -> None:
    """Also where the limit comes after the plan has run, and for one call alone."""
    choosing.use_predictor(ByLimits({}))
    cudnn.workspace_bytes = 2**20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "_with_workspace", lambda enqueue, *_: enqueue)
        forward()
        assert cudnn.last() == [("fprop", plan(TF32))]
        forward(Limits(workspace_bytes=2**19))
        assert cudnn.last() == []
        forward()
        assert cudnn.last() == [("fprop", plan(TF32))]
        choosing.use_limits(Limits(workspace_bytes=2**20 - 1))
        forward()
        assert cudnn.last() == []
        choosing.use_limits(Limits(workspace_bytes=2**20))
        forward()
        assert cudnn.last() == [("fprop", plan(TF32))]


def test_what_was_left_to_pytorch_is_chosen_again(cudnn: Cudnn) -> None:
    """For a switch that was turned meanwhile, by the next `enable` or a new shape."""
    other = replace(LAYER, n=3)
    pins = {(problem, H200): TF32 for problem in (LAYER, other)}
    choosing.use_predictor(Predictor({}, pins))

    def enable() -> None:
        confpred.enable(wait=True)
        confpred.disable()

    for noticed in (enable, lambda: policy.find(other, 0)):
        torch.backends.cudnn.allow_tf32 = False
        noticed()
        for _ in range(2):
            forward()
        torch.backends.cudnn.allow_tf32 = True
        assert cudnn.last() == []
        noticed()
        forward()
        assert cudnn.last() == [("fprop", plan(TF32))]


def test_the_same_switch_forgets_nothing(cudnn: Cudnn) -> None:
    choosing.use_predictor(ByLimits({}))
    forward()
    before = dict(choosing.served)
    assert before
    with confpred.enabled(wait=True):
        policy.find(LAYER, 0)
        forward()
    assert choosing.served == before


def test_a_switch_decides_what_policy_finds(cudnn: Cudnn) -> None:
    choosing.use_predictor(ByLimits({}))
    found = [policy.find(LAYER, 0), None]
    torch.backends.cudnn.allow_tf32 = False
    found[1] = policy.find(LAYER, 0)
    assert [one.tf32 for one in found if isinstance(one, ready.ReadyLaunch)] == [True, False]
