"""`confpred.status`, `repr` and `confpred.verbose`: what runs in a model, and why."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import subprocess
import sys
import time
import weakref
from dataclasses import replace

import pytest
import torch
from network_blocks import LAST, Around, image
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import confpred
from confpred.cudnn import plans
from confpred.errors import InvalidInput
from confpred.families.protocol import Candidate
from confpred.problem.limits import UNLIMITED
from confpred.pytorch import backend, status
from confpred.pytorch.rewrite import passes
from confpred.pytorch.run import choosing, graphs, loading


def net(**more: nn.Module) -> nn.Sequential:
    layers = {"first": nn.Conv2d(3, 8, 3), "second": nn.Conv2d(8, 8, 3, groups=8), **more}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model.eval().to(memory_format=LAST)


def broken(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    if y.sum().item() > 1e9:
        y = y + 1
    y = y * 2
    print(end="")
    return m.second(y)


class Trained(nn.Module):
    """As a LightningModule is called: by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum()


@torch.no_grad()
def test_a_model_says_whether_it_is_on(captured) -> None:
    model, x = net(), image()
    assert str(confpred.status(model)) == "Sequential: not optimized"
    confpred.optimize(model)
    told = confpred.status(model)
    assert (told.how, told.captures, told.remarks) == (
        "confpred.optimize", 0, ("it was not called yet",)
    )  # fmt: skip
    model(x)
    model(torch.rand(3, 3, 40, 40).contiguous(memory_format=LAST))
    told = confpred.status(model)
    assert (told.captures, told.parts, told.breaks) == (2, 1, ())
    assert told.inputs[0] == f"{'x'.join(map(str, x.shape))} float32"
    assert told.providers == {"cudnn": 4}
    assert told.seconds > 0
    assert told.to_json()["providers"] == {"cudnn": 4}
    confpred.revert(model)
    assert str(confpred.status(model)) == "Sequential: not optimized"
    with pytest.raises(InvalidInput, match=r"torch\.nn\.Module"):
        confpred.status(3)


@torch.no_grad()
def test_a_layer_that_is_not_served_is_named_with_its_reason(captured) -> None:
    captured.wins = lambda problem: problem.groups > 1
    model = net(pool=nn.AdaptiveAvgPool2d(1), third=nn.Conv2d(8, 4, 1))
    confpred.optimize(model)(image())
    told = confpred.status(model)
    assert told.providers == {"pytorch": 2, "cudnn": 1}
    assert told.left == {
        "predicted slower": ("first (fprop)",), "one pixel or one channel": ("third (fprop)",)
    }  # fmt: skip
    assert "1 one pixel or one channel: third (fprop)" in str(told)


@torch.no_grad()
def test_a_kernel_that_cannot_be_had_is_not_said_to_run(captured, monkeypatch) -> None:
    """No GPU loads kernels here, so what loading leaves behind is put there."""
    model = net()
    confpred.optimize(model)(image())
    (capture,) = status._captures_of(model, model._compiled_call_impl.calls)
    first, second = capture.sites
    monkeypatch.setattr(choosing, "_cache", dict(choosing._cache))  # others keep theirs
    monkeypatch.setattr(plans, "is_missing", lambda: False)  # it may be, here
    assert not loading.was_refused(first.choice, 0, UNLIMITED)
    launch = ("launch", loading.Assignment.of(first.choice), 0, choosing.limits_for(
        first.problem, UNLIMITED))  # fmt: skip
    choosing.cached(launch, lambda: None)
    told = confpred.status(model)
    assert told.providers == {"pytorch": 1, "cudnn": 1}
    assert told.left.keys() == {"its kernel cannot be had"}
    assert second.is_lowered
    monkeypatch.setattr(plans, "is_missing", lambda: True)  # it may be installed here
    for provider in ("cudnn", "cudnn_nd"):
        first.choice = replace(first.choice, candidate=Candidate(provider, 1))
        launch = ("launch", loading.Assignment.of(first.choice), *launch[2:])
        choosing.cached(launch, lambda: None)
        assert capture.reason(first) == "cuDNN's front end is missing, or finds no cuDNN"


@pytest.mark.parametrize("how", ["optimize", "torch.compile"])
@torch.no_grad()
def test_a_break_is_named_with_its_place(captured, how: str) -> None:
    model, x = Around(broken, **dict(net().named_children())).to(memory_format=LAST), image()
    if how == "optimize":
        confpred.optimize(model)(x)
    else:
        torch.compile(model, backend="confpred")(x)
    told = confpred.status(model)
    assert told.how.endswith(how)
    assert (told.captures, told.parts) == (1, 3)
    item, out = told.breaks
    assert "test_status.py:" in item
    assert "Tensor.item()" in item
    assert "print" in out or "builtin" in out
    assert told.short.startswith(f"{told.how}, captured once in 3 parts: 2 cudnn")


@torch.no_grad()
def test_a_forward_that_is_not_captured_says_so() -> None:
    model = Around(torch.compiler.disable(lambda m, x: m.first(x)), first=nn.Conv2d(3, 4, 1))
    confpred.optimize(model)(image())
    told = confpred.status(model)
    assert (told.captures, told.remarks) == (0, ("its calls were not captured",))
    assert "disable" in told.breaks[0]


@torch.no_grad()
def test_a_graph_that_cannot_be_made_says_why(captured, monkeypatch) -> None:
    """CUDA graphs need a GPU: what decides about them is asked here, and finds the CPU."""
    # The real ones.
    for name in ("why_no_graph", "make_replayable"):
        monkeypatch.setattr(backend, name, getattr(graphs, name))  # as without the fixture
    model, x = net(), image()
    confpred.optimize(model)(x)
    assert confpred.status(model).replay == ("inference: no CUDA graph as it uses cpu",)
    confpred.optimize(model, graphs=False)(x)
    assert confpred.status(model).replay == ("inference: no CUDA graph as graphs=False",)


@torch.no_grad()
def test_strides_of_a_programs_own_forbid_copies(captured, monkeypatch) -> None:
    """Inputs are copied into dense memory for replays: these strides read other numbers there."""

    class OwnStrides(nn.Module):
        def forward(self, x):
            return x.view(-1).as_strided((2, 2), (2, 1), 0) + 1.0

    monkeypatch.setattr(backend, "make_replayable", graphs.make_replayable)  # without the fixture
    model, x = confpred.optimize(OwnStrides()), torch.arange(16.0).view(4, 4)
    model(x)
    own = "it reads the memory of an input by strides of its own"
    assert confpred.status(model).replay == (f"inference: no CUDA graph as {own}",)
    for function, static, why in (
        (OwnStrides(), [], own),
        (OwnStrides(), [0], None),  # such as a buffer
        (lambda x: OwnStrides()(x + 1.0), [], None),  # memory of the pass
        (lambda x: x.as_strided_scatter(x.new_zeros(2), (2,), (1,)), [], own),
    ):
        assert passes.why_not_copied(make_fx(function)(x).graph, static) == why


def test_replays_and_reasons_are_counted() -> None:
    reasons: set[str] = set()
    memory = backend.GraphMemory()
    run = graphs.Graphed(
        list, memory=memory, device=0, static=(), written=(), visible=None, kind="inference",
        reasons=reasons, dtypes={},
    )  # fmt: skip
    made = status.Pass("inference", reasons, "Inductor", status.ref(run))
    assert made.replay() == "CUDA graph, recorded at the second call"
    run.replays = 3
    run._run_plain([], "in other threads than the main one")
    assert made.replay() == (
        "CUDA graph, replayed 3 times; no CUDA graph in other threads than the main one"
    )


@torch.no_grad()
def test_without_a_gpu_it_says_that_nothing_is_done() -> None:
    model = net()
    confpred.optimize(model)(image())
    told = confpred.status(model)
    assert told.remarks == (status.NO_GPU,)
    assert told.replay == ("inference: no CUDA graph without a GPU",)
    assert told.short == f"confpred.optimize, captured once: {status.NO_GPU}"


@torch.no_grad()
def test_repr_ends_with_it_and_copies_do_not(captured) -> None:
    model = net()
    before = repr(model)
    confpred.optimize(model)(image())
    assert repr(model) == f"{before}  # confpred.optimize, captured once: 2 cudnn"
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert repr(other) == before
        assert confpred.status(other).how == ""
        other(image())
    assert repr(confpred.revert(model)) == before


def test_enable_is_told() -> None:
    with confpred.enabled():
        (told,) = confpred.status(net()).remarks
    assert told.startswith("confpred.enable is on: 1 grouped layer ")
    assert confpred.status(net()).remarks == ()


@torch.no_grad()
def test_it_keeps_nothing_alive(captured) -> None:
    model = net()
    confpred.optimize(model)(image())
    (capture,) = map(weakref.ref, status._captures_of(model, model._compiled_call_impl.calls))
    captured.passes.clear()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert capture() is None


@pytest.mark.parametrize("examples", [False, True])
def test_a_part_that_runs_alone_is_warned_of_once(captured, caplog, examples: bool) -> None:
    model, x = Trained(), image()
    confpred.optimize(model, x if examples else None)
    model.training_step(x)
    model.training_step(x)
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "its part net runs outside of its call" in warning
    assert "its part net ran outside" in str(confpred.status(model))


def test_a_model_that_is_called_first_is_not_warned_of(captured, caplog) -> None:
    model, x = Trained(), image()
    confpred.optimize(model)(x)
    model.training_step(x)
    other = confpred.revert(confpred.optimize(Trained()))
    other.training_step(x)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert all(m._compiled_call_impl is None for m in model.net.modules())


PROGRAM = """
import torch, confpred
{first}
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1)).eval()
with torch.no_grad():
    confpred.optimize(model)(torch.rand(1, 3, 4, 4))
"""


@pytest.mark.parametrize("how", ["confpred.verbose()", "CONFPRED_LOG", ""])
def test_verbose_prints_a_line_a_capture(how: str) -> None:
    first = how if how.endswith(")") else ""
    more = {"CONFPRED_LOG": "info"} if how == "CONFPRED_LOG" else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)], capture_output=True, text=True,
        check=True, env={**os.environ, **more},
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("confpred: ")]
    assert len(lines) == bool(how)
    if how:
        assert lines[0].startswith("confpred: captured inference of 1x3x4x4 float32 in ")


def test_a_level_is_named() -> None:
    with pytest.raises(InvalidInput, match="level='inof' is not allowed; allowed: info"):
        confpred.verbose("inof")


@pytest.mark.parametrize("training", [False, True])
def test_a_slow_capture_says_once_what_it_is_doing(
    captured, monkeypatch, caplog, training: bool
) -> None:
    caplog.set_level(logging.INFO, "confpred")
    monkeypatch.setattr(status, "SLOW_S", 0.05)  # a setting
    captured.wins = lambda problem: time.sleep(0.3) is None
    model = confpred.optimize(net())
    with torch.set_grad_enabled(training):
        out = model(image())
    if training:
        out.sum().backward()
    said = [r.getMessage() for r in caplog.records if "takes longer" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("capturing 2x3x19x17 float32 takes longer than 0.05 s: ")
    confpred.optimize(other := net())
    monkeypatch.setattr(status, "SLOW_S", 600.0)  # a setting
    with torch.no_grad():
        other(image())
    assert sum("takes longer" in r.getMessage() for r in caplog.records) == 1
