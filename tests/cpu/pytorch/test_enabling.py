"""`enable` and `disable`: settings nest, and PyTorch's own method comes back."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import confpred
from confpred.errors import DataError, InvalidInput
from confpred.problem.limits import Limits
from confpred.pytorch import eager

ORIGINAL = nn.Conv2d._conv_forward


def is_enabled() -> bool:
    """Return whether some `enable` has no `disable` yet."""
    return bool(eager._former)


@pytest.fixture(autouse=True)
def disabled_at_the_end():
    yield
    while is_enabled():
        confpred.disable()
    assert nn.Conv2d._conv_forward is ORIGINAL


def layer(**options) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(8, 8, 3, **{"padding": 1, "groups": 4, **options})


def image() -> torch.Tensor:
    return torch.randn(2, 8, 7, 5, generator=torch.Generator().manual_seed(0))


def test_settings_hold_until_they_are_undone() -> None:
    limits = Limits(workspace_bytes=0)
    with confpred.enabled(max_regret=1.1):
        assert eager._constraints.max_regret == 1.1
        with confpred.enabled(limits=limits):
            assert (eager._constraints.max_regret, eager._constraints.limits) == (None, limits)
            assert nn.Conv2d._conv_forward is not ORIGINAL
        assert eager._constraints.max_regret == 1.1
        assert is_enabled()
    assert eager._constraints == eager.ANY
    assert not is_enabled()
    assert nn.Conv2d._conv_forward is ORIGINAL


def test_each_enable_needs_a_disable() -> None:
    confpred.enable()
    confpred.enable()
    confpred.disable()
    assert nn.Conv2d._conv_forward is not ORIGINAL
    confpred.disable()
    assert nn.Conv2d._conv_forward is ORIGINAL
    confpred.disable()  # one too many does nothing
    assert not is_enabled()


def test_a_block_that_raises_is_left() -> None:
    with pytest.raises(ZeroDivisionError), confpred.enabled():
        _ = 1 / 0
    assert not is_enabled()


@pytest.mark.parametrize(("settings", "error"), [
    ({"max_regret": 0.9}, InvalidInput), ({"max_regret": "1.1"}, InvalidInput),
    ({"max_regret": True}, InvalidInput), ({"max_regret": float("nan")}, InvalidInput),
    ({"limits": 3}, InvalidInput), ({"plan": "/dev/null"}, DataError),
])  # fmt: skip
def test_what_is_not_allowed_changes_nothing(settings, error) -> None:
    with pytest.raises(error):
        confpred.enable(**settings)
    assert not is_enabled()
    assert nn.Conv2d._conv_forward is ORIGINAL


@pytest.mark.parametrize("options", [
    {}, {"groups": 1}, {"bias": False}, {"padding": "same"}, {"padding_mode": "circular"},
    {"stride": (2, 1), "dilation": (1, 2)},
])  # fmt: skip
def test_layers_of_the_cpu_are_pytorchs(options) -> None:
    conv, x = layer(**options), image().requires_grad_()
    expected = conv(x)
    grads = torch.autograd.grad(expected.sum(), [x, conv.weight])
    with confpred.enabled():
        found = conv(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        again = torch.autograd.grad(found.sum(), [x, conv.weight])
        torch.testing.assert_close(again, grads, rtol=0, atol=0)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_layers_whose_sizes_are_lists_are_pytorchs(monkeypatch, name) -> None:
    monkeypatch.setattr(eager, "is_plain", lambda *_: True)  # no plain tensor is on a GPU here
    conv, x = layer(), image()
    setattr(conv, name, [2, 2])
    expected = conv(x)
    with confpred.enabled():
        assert torch.equal(conv(x.as_subclass(OnGpu)).as_subclass(torch.Tensor), expected)


def test_torchscript_reads_pytorchs_method() -> None:
    conv, x = nn.Sequential(layer(), nn.ReLU()).eval(), image()
    with confpred.enabled():
        scripted = torch.jit.script(conv)
        traced = torch.jit.trace(conv, x)
        for program in (scripted, traced):
            torch.testing.assert_close(program(x), conv(x))
    torch.testing.assert_close(scripted(x), conv(x))


def test_compiled_and_exported_layers_are_pytorchs() -> None:
    conv, x = layer(), image()
    with confpred.enabled():
        compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), conv(x))
        exported = torch.export.export(conv, (x,)).module()
        torch.testing.assert_close(exported(x), conv(x))


def test_threads_may_toggle_during_calls() -> None:
    conv, x = layer(), image()
    expected, wrong = conv(x), []

    def toggle() -> None:
        for _ in range(50):
            with confpred.enabled():
                if not torch.equal(conv(x), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=toggle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not is_enabled()


def test_subclasses_and_transforms_are_not_plain() -> None:
    assert eager.is_plain(image(), layer().weight)

    class Mine(torch.Tensor):
        pass

    assert not eager.is_plain(image().as_subclass(Mine))
    seen, other = [], image()

    def function(t: torch.Tensor) -> torch.Tensor:
        seen.append(eager.is_plain(other))
        return t.sum()

    torch.func.grad(function)(image())
    torch.func.vmap(function)(image())
    torch.func.jvp(function, (image(),), (image(),))
    with torch.overrides.BaseTorchFunctionMode():
        function(image())
    assert seen == [False] * 4
    assert eager.is_plain(image())
