"""`enable` and `disable`: what is put in the place of PyTorch's functions, and what is undone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import confpred
from confpred.errors import ConfpredError, DataError, InvalidInput
from confpred.predict.plans import plan_of, read_plan, write_plan
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.limits import UNLIMITED
from confpred.pytorch import casts, choosing, policy, quiet, routing, switch

NAMES = ("conv1d", "conv2d", "conv_transpose2d")
OWN = {name: getattr(F, name) for name in NAMES}


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    while switch.is_enabled():
        confpred.disable()
    assert is_undone()


def is_undone() -> bool:
    """Whether PyTorch's functions are its own."""
    return all(getattr(module, name) is own for name, own in OWN.items() for module in (F, torch))


def is_routed() -> bool:
    """Whether all of them are confpred's."""
    found = [getattr(module, name) for name in NAMES for module in (F, torch)]
    return all(function.__module__ == "confpred.pytorch.routing" for function in found)


def test_importing_changes_nothing() -> None:
    program = """
        import torch
        import torch.nn.functional as F
        before = [F.conv1d, F.conv2d, F.conv_transpose2d, torch.clear_autocast_cache]
        import confpred
        confpred.enable, confpred.conv2d, confpred.optimize
        after = [F.conv1d, F.conv2d, F.conv_transpose2d, torch.clear_autocast_cache]
        assert all(a is b for a, b in zip(before, after))
        assert F.conv2d is torch.conv2d
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_functions_are_replaced_and_restored() -> None:
    assert is_undone()
    confpred.enable()
    assert is_routed()
    assert switch.is_enabled()
    confpred.disable()
    assert is_undone()
    assert not switch.is_enabled()


def test_the_module_method_is_replaced_and_restored() -> None:
    method = nn.Conv2d.forward
    with confpred.enabled():
        assert nn.Conv2d.forward is not method
    assert nn.Conv2d.forward is method


@pytest.mark.parametrize("groups", [1, 4])
def test_who_patches_the_function_later_sees_the_modules_calls(groups, monkeypatch) -> None:
    layer, x, seen = nn.Conv2d(4, 4, 3, groups=groups), torch.zeros(1, 4, 5, 5), []
    with confpred.enabled():
        routed = F.conv2d
        monkeypatch.setattr(F, "conv2d", lambda *given: seen.append(given) or routed(*given))
        layer(x)
        monkeypatch.undo()
        layer(x)
    assert len(seen) == 1


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("padding", [1, "same", "valid", (0, 2)])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_modules_pad_as_before(groups, padding, mode) -> None:
    layer = nn.Conv2d(4, 8, 3, groups=groups, padding=padding, padding_mode=mode)
    x = torch.randn(2, 4, 7, 6)
    expected = layer(x)
    with confpred.enabled():
        assert torch.equal(layer(x), expected)


def given_a_method(layer: nn.Conv2d) -> None:
    """As diffusion pipelines do to make images that tile."""

    def conv_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), weight, bias)

    layer._conv_forward = conv_forward  # type: ignore[assignment]


def pruned(layer: nn.Conv2d) -> None:
    prune.random_unstructured(layer, "weight", 0.5)


def sharded(layer: nn.Conv2d) -> None:
    """As wrappers leave a layer whose parameters are views of one buffer."""
    weight = layer._parameters.pop("weight")
    layer.__dict__["weight"] = 2 * weight.detach()


def shadowed(layer: nn.Conv2d) -> None:
    layer.__dict__["bias"] = torch.ones(4)


@pytest.mark.parametrize(
    "changed",
    [
        given_a_method,
        pruned,
        sharded,
        shadowed,
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh()),
        lambda layer: nn.utils.weight_norm(layer),
        lambda layer: setattr(layer, "padding_mode", "circular"),
        lambda layer: setattr(layer, "stride", (2, 2)),
        lambda layer: setattr(layer, "bias", None),
    ],
)
@pytest.mark.parametrize("rests", [False, True])
def test_a_layer_that_was_changed_is_computed_as_by_pytorch(changed, rests) -> None:
    layer, x = nn.Conv2d(4, 4, 3, padding=1), torch.randn(1, 4, 6, 6)
    changed(layer)
    expected = layer(x)
    with confpred.enabled():
        if rests:
            quiet.rest(layer)
        assert torch.equal(layer(x), expected)


def test_parameters_of_one_call_are_those_that_count() -> None:
    layer, x = nn.Conv2d(4, 4, 3), torch.randn(1, 4, 6, 6)
    given = {"weight": torch.randn(4, 4, 3, 3), "bias": torch.randn(4)}
    with confpred.enabled():
        assert torch.equal(torch.func.functional_call(layer, given, x), F.conv2d(x, **given))


def test_each_enable_needs_its_own_disable() -> None:
    confpred.enable()
    confpred.enable(wait=True)
    confpred.disable()
    assert is_routed()
    confpred.disable()
    assert is_undone()
    with confpred.enabled(), confpred.enabled():
        assert is_routed()
    assert is_undone()


def test_disable_without_enable_leaves_everything(monkeypatch) -> None:
    confpred.disable()
    assert is_undone()
    confpred.enable()
    assert is_routed(), "a former disable counts for nothing"
    confpred.disable()
    other = lambda *a: OWN["conv2d"](*a)  # noqa: E731
    monkeypatch.setattr(F, "conv2d", other)
    confpred.disable()
    assert F.conv2d is other, "another package's function is not ours to take away"


def test_an_exception_inside_the_block_restores() -> None:
    with pytest.raises(KeyError), confpred.enabled():
        raise KeyError
    assert is_undone()


def test_the_latest_settings_hold() -> None:
    with confpred.enabled(wait=True):
        assert not policy._current.background
        with confpred.enabled(verify=2, verify_budget_s=1):
            assert policy._current.background
            assert policy._current.verifier.top == 2
        assert policy._current == policy.Policy()
    assert policy._current == policy.Policy()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        *(({"verify": value}, "verify") for value in (0, 9, -1, True, "3", 2.0)),
        *(
            ({"verify": 3, "verify_budget_s": value}, "verify_budget_s")
            for value in (0, -1, float("nan"), "60", None, True)
        ),
    ],
)
def test_bad_settings_are_named_and_enable_nothing(settings, field) -> None:
    with pytest.raises(InvalidInput) as caught:
        confpred.enable(**settings)
    assert caught.value.field == field
    assert is_undone()
    assert not switch.is_enabled()


def test_a_plan_that_cannot_be_read_enables_nothing(tmp_path: Path) -> None:
    before = choosing._predictor
    damaged = tmp_path / "plan.json"
    damaged.write_text("{")
    for path in (tmp_path / "none.json", damaged, str(damaged)):
        with pytest.raises(DataError, match=r"none\.json|plan\.json"):
            confpred.enable(plan=path)
        assert is_undone()
        assert not switch.is_enabled()
    with pytest.raises(ConfpredError), confpred.enabled(plan=damaged, verify=2):
        pytest.fail("a damaged plan was taken")
    assert is_undone()
    assert choosing._predictor is before


def test_a_plan_to_be_written_need_not_exist(tmp_path: Path) -> None:
    with confpred.enabled(verify=2, plan=tmp_path / "new.json"):
        assert is_routed()
    assert list(tmp_path.iterdir()) == []


def test_threads_may_toggle_during_calls() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 2, 3, 3)
    expected = F.conv2d(x, weight, groups=4)
    done = threading.Event()

    def toggle() -> int:
        times = 0
        while not done.is_set():
            with confpred.enabled():
                times += 1
        return times

    def compute() -> bool:
        return all(torch.equal(F.conv2d(x, weight, groups=4), expected) for _ in range(200))

    with ThreadPoolExecutor(8) as threads:
        toggling = [threads.submit(toggle) for _ in range(3)]
        right = [threads.submit(compute) for _ in range(5)]
        try:
            assert all(future.result() for future in right)
        finally:
            done.set()
        assert all(future.result() > 0 for future in toggling)
    assert is_undone()
    assert not switch.is_enabled()


def test_nothing_runs_on_a_gpu_here(monkeypatch) -> None:
    """CPU tensors never get as far as a look at what serves them."""
    monkeypatch.setattr(choosing, "choose", lambda *_: pytest.fail("a kernel was chosen"))
    with confpred.enabled():
        for _ in range(2):
            F.conv2d(torch.randn(1, 4, 5, 5), torch.randn(4, 1, 3, 3), groups=4)
        confpred.conv2d(torch.randn(1, 4, 5, 5), torch.randn(4, 1, 3, 3), groups=4)


@pytest.fixture
def plain(monkeypatch) -> None:
    """CPU tensors take the way of CUDA tensors, as far as to the look at what serves them."""
    monkeypatch.setattr(routing, "_is_plain", lambda *_: True)
    choosing.forget()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    "pairs",
    [
        {"stride": [2, 1], "padding": [1, 0]},
        {"stride": (2, 1), "padding": (1, 0)},
        {"stride": [2], "dilation": torch.Size((1, 2))},
        {"padding": "same"},
        {"padding": "valid", "stride": [2, 2]},
    ],
)
def test_any_form_of_the_geometry_is_looked_up(pairs) -> None:
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 2, 3, 3)
    with confpred.enabled():
        for _ in range(2):  # found, then looked up
            out = F.conv2d(x, weight, groups=4, **pairs)
            torch.testing.assert_close(out, OWN["conv2d"](x, weight, groups=4, **pairs))
    assert len(choosing.served) == 1


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("stride", [[[1], [1]], ([1], [1]), {1: 1}, "one"])
def test_what_has_no_hash_is_left_to_pytorch(stride) -> None:
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 2, 3, 3)
    with confpred.enabled(), pytest.raises(TypeError, match="received an invalid combination"):
        F.conv2d(x, weight, None, stride, 0, 1, 4)


def test_what_is_to_see_each_call_is_noticed() -> None:
    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x = torch.ones(2)
    assert not routing.is_watched()
    with FlopCounterMode(display=False):
        assert routing.is_watched()
    with Seeing():
        assert routing.is_watched()
    with torch.device("cpu"):  # changes no call of a convolution
        assert not routing.is_watched()
        with Seeing():
            assert routing.is_watched()
    with torch.autograd.forward_ad.dual_level():
        assert routing.is_watched()
    seen = []
    torch.func.vmap(lambda t: seen.append(routing.is_watched()) or t)(x)
    torch.jit.trace(lambda t: seen.append(routing.is_watched()) or t * 2, x, check_trace=False)
    assert seen == [True, True]
    assert not routing.is_watched()


def test_a_fork_after_use_computes() -> None:
    program = """
        import os
        import torch
        import torch.nn.functional as F
        import confpred
        torch.set_num_threads(1)
        confpred.enable()
        x, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 2, 3, 3)
        expected = F.conv2d(x, weight, groups=4)
        from confpred.pytorch import choosing, kernels
        choosing.served["left by the parent"] = None
        kernels._compilers().submit(int).result()
        child = os.fork()
        if child == 0:
            right = torch.equal(F.conv2d(x, weight, groups=4), expected)
            right &= "left by the parent" not in choosing.served
            right &= kernels._compilers().submit(int).result(10) == 0
            confpred.disable()
            right &= F.conv2d.__module__ != "confpred.pytorch.routing"
            os._exit(0 if right else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert "left by the parent" in choosing.served
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, check=True, env=environment, timeout=120)


def test_the_end_of_autocast_is_counted_and_passed_on(monkeypatch) -> None:
    cleared = []
    monkeypatch.setattr(casts, "_clear", None)
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
    casts._note_ends()
    casts._note_ends()
    before = casts._region
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    assert casts._region == before + 1
    assert cleared == [True]


def test_a_plan_that_is_verified_further_stays_in_its_file(tmp_path: Path, monkeypatch) -> None:
    layer = Problem.parse("n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=16 padding=1")
    (guess,) = Predictor({}).choose_many([layer], "h100")
    path = tmp_path / "plan.json"
    write_plan(path, plan_of([replace(guess, source="measured", predicted_ms=0.1)]))
    monkeypatch.setattr(choosing, "_predictor", None)
    with confpred.enabled(verify=2, plan=path):
        verifier = policy._current.verifier
        assert [choice.problem for choice in verifier.followed] == [layer]
        assert choosing.current_predictor().choose(layer, "h100").source == "pinned"
        other = replace(guess, problem=replace(layer, n=16), source="measured", predicted_ms=0.1)
        verifier.winners[other.problem, 0, UNLIMITED] = other
        verifier._keep(0)
    assert {choice.problem for choice in read_plan(path).choices} == {layer, other.problem}
