"""`verify="network"`: a graph with confpred's choices and one without are timed, unseen."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Captured
from network_blocks import CONV, LAST, PLAIN, Around, image
from torch import Tensor, nn
from torch._dynamo.backends import debugging

import confpred
from confpred.errors import InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.pytorch import backend
from confpred.pytorch.backend import Options
from confpred.pytorch.run import choosing, verify

#: `Options(freeze=True, verify=3)` of version 0.2.0.
PICKLED = (
    b"\x80\x04\x95g\x00\x00\x00\x00\x00\x00\x00\x8c\x18confpred.pytorch.backend\x94\x8c\x07Options\x94\x93"
    b"\x94)\x81\x94]\x94(N\x88\x88K\x03N\x8c\x17confpred.problem.limits\x94\x8c\x06Limits\x94\x93\x94)\x81"
    b"\x94]\x94(N\x89\x88Nebeb."
)


@pytest.fixture(autouse=True)
def seen(captured, monkeypatch) -> Iterator[Captured]:
    """All tests here capture as on a GPU, and time one step a round."""
    monkeypatch.setattr(verify, "_STEPS_MS", 0.0)  # the networks are small
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others may be busy
    yield captured
    torch.set_num_threads(threads)


def forward(m: Any, x: Tensor) -> Tensor:
    return F.dropout(F.relu(m.norm(m.conv(x))), 0.5, m.training) * m.scale


def network(function: Any = forward, *, training: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)}
    model = Around(function, **layers, scale=nn.Parameter(torch.ones(())))
    return model.train(training).to(memory_format=LAST)


def slow(monkeypatch: pytest.MonkeyPatch, *, ours: bool) -> None:
    """Let graphs with confpred's operators, or those without, take 50 ms more."""
    make = debugging.boxed_nop

    def made(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        run = make(gm, inputs)
        is_ours = "confpred.conv2d" in gm.code

        def delayed(given: Any) -> Any:
            time.sleep(0.05 * (is_ours is ours))
            return run(given)

        delayed._boxed_call = True
        return delayed

    monkeypatch.setattr(debugging, "boxed_nop", made)  # what runs a graph without Inductor


def results(model: nn.Module, x: Tensor) -> list[Any]:
    """Return what two calls compute and leave behind."""
    torch.manual_seed(3)
    random.seed(3)
    found: list[Any] = []
    for _ in range(2):
        out = model(x)
        found.append(out.detach())
        if out.requires_grad:
            out.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, grads, list(model.buffers()), torch.rand(3), torch.tensor(random.random())]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_the_faster_one_is_kept_unseen(seen, monkeypatch, caplog, training, ours) -> None:
    """Batch norms count and learn as often, dropout draws the same, and hooks run once."""
    slow(monkeypatch, ours=not ours)
    caplog.set_level(logging.INFO, "confpred")
    model, x = network(training=training), image()
    plain, hooked, announced = copy.deepcopy(model), [], []
    model.conv.weight.register_hook(hooked.append)
    confpred.optimize(model, verify="network", inductor=False)
    with torch.set_grad_enabled(training), choosing.watch_choices(announced.append):
        torch.testing.assert_close(results(model, x), results(plain, x))
    assert len(hooked) == 2 * training
    assert [p.count(CONV) > 0 for p in seen.passes if p.kind != "backward"] == [True, False]
    assert [p.count(PLAIN) > 0 for p in seen.passes if p.kind != "backward"] == [False, True]
    told = confpred.status(model)
    kept = "confpred's choices" if ours else "PyTorch's operators"
    (text,) = told.verified
    assert text.startswith(f"{kept} are kept: ")
    assert text in str(told)
    assert [r.getMessage() for r in caplog.records].count(f"verify='network': {text}") == 1
    assert ("cudnn" in told.providers) is ours
    assert ("slower in the whole network" in told.left) is not ours
    assert f"Timed here, {text}." in confpred.explain(model, x, "h100").remarks
    assert all(choice.candidate == PYTORCH_OPERATOR for choice in announced)
    assert bool(announced) is not ours


def test_a_rejected_graph_has_its_layers_of_all_kinds_rejected(seen, monkeypatch) -> None:
    slow(monkeypatch, ours=True)
    volumes: Any = lambda m, x: m.norm(m.conv(x))  # noqa: E731
    layers = {"conv": nn.Conv3d(8, 8, 3, groups=8), "norm": nn.GroupNorm(2, 8)}
    model, announced = Around(volumes, **layers).eval(), []
    confpred.optimize(model, verify="network", inductor=False)
    with torch.no_grad(), choosing.watch_choices(announced.append):
        model(torch.rand(2, 8, 6, 6, 6).contiguous(memory_format=torch.channels_last_3d))
    assert {choice.candidate for choice in announced} == {PYTORCH_OPERATOR}
    assert {choice.problem for choice in announced} == {p for asked in seen.asked for p in asked}
    kinds = [type(choice.problem).__name__ for choice in announced]
    assert sorted(kinds) == ["ConvNd", "ConvNd", "Norm"]


@torch.library.custom_op("verified::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x.clone()


counted.register_fake(torch.empty_like)
CALLS: list[int] = []


@pytest.mark.parametrize(("around", "function", "why"), [
    (torch.autograd.graph.save_on_cpu, forward, "saved tensors have hooks"),
    (nullcontext, lambda m, x: counted(forward(m, x)), "verified.counted"),
    (nullcontext, lambda m, x: forward(m, x.mul_(2)), "written to is a view"),
    (nullcontext, lambda m, x, y: forward(m, x.add_(y.sum())), "share memory"),
])  # fmt: skip
@torch.no_grad()
def test_what_would_be_seen_is_not_timed(monkeypatch, around, function, why) -> None:
    slow(monkeypatch, ours=True)
    model, found = network(function), []
    plain = copy.deepcopy(model)
    confpred.optimize(model, verify="network", inductor=False)
    CALLS.clear()
    for each in (model, plain):
        x = image()[:]
        with around():
            found.append([each(x, x[1:]) if "share" in why else each(x), x])
    torch.testing.assert_close(*found)
    assert len(CALLS) in (0, 2)
    (text,) = confpred.status(model).verified
    assert text.startswith("confpred's choices are kept untimed, as ")
    assert why in text


@torch.no_grad()
def test_an_error_while_it_is_timed_fails_no_program(monkeypatch) -> None:
    slow(monkeypatch, ours=True)
    monkeypatch.setattr(verify, "time_in_turns", lambda *_: 1 / 0)  # as where memory is short
    model, x = network(), image()
    expected = model(x)
    torch.testing.assert_close(confpred.optimize(model, verify="network")(x), expected)
    (text,) = confpred.status(model).verified
    assert text == "confpred's choices are kept untimed, as division by zero"


@torch.no_grad()
def test_an_input_that_is_written_to_is_as_after_one_call(monkeypatch) -> None:
    slow(monkeypatch, ours=True)
    found = []
    for options in ({}, {"verify": "network"}):
        model, x = network(lambda m, x: forward(m, x.mul_(1.5))), image()
        confpred.optimize(model, **options)
        found.append([model(x), x])
        verified = confpred.status(model).verified
    torch.testing.assert_close(*found)
    assert "are kept: " in verified[0]


@torch.no_grad()
def test_a_graph_without_layers_and_one_of_the_cpu_compile_once(seen, monkeypatch) -> None:
    model, x = network(lambda m, x: F.relu(x) * m.scale), image()
    confpred.optimize(model, verify="network")(x)
    monkeypatch.setattr(backend, "ordinal_of", lambda graph: None)  # as it is here
    other = network()
    confpred.optimize(other, verify="network")(x)
    assert len(seen.passes) == 1
    assert confpred.status(model).verified == confpred.status(other).verified == ()


@torch.no_grad()
def test_threads_decide_once(monkeypatch) -> None:
    slow(monkeypatch, ours=True)
    model, x, found, asked = network(), image(), [], []
    expected, timed = model(x), verify._steps_ms
    # Counts the decisions.
    monkeypatch.setattr(verify, "_steps_ms", lambda *given: asked.append(1) or timed(*given))
    confpred.optimize(model, verify="network")

    @torch.no_grad()
    def call() -> None:
        found.append(model(x))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [1]
    for out in found:
        torch.testing.assert_close(out, expected)


@pytest.mark.passes_fail
@pytest.mark.parametrize("fault", ["compiler", "cache"])
@torch.no_grad()
def test_without_a_compiler_or_a_cache_both_run_as_pytorchs_operators(
    monkeypatch, tmp_path, caplog, fault: str
) -> None:
    slow(monkeypatch, ours=True)
    model, x = network(), image()
    expected = model(x)
    confpred.optimize(model, verify="network", inductor=True)
    if fault == "compiler":
        monkeypatch.setattr(backend.inductor, "compile_pass", lambda *_: 1 / 0)  # a broken compiler
    else:
        (tmp_path / "file").touch()  # nobody, not even root, makes folders in a file
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    told = confpred.status(model)
    assert told.verified[0].startswith("PyTorch's operators are kept: ")
    assert told.compilers == ("PyTorch's operators",)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([text for text in said if "inference pass is not compiled" in text]) == 1


@pytest.mark.parametrize("value", ["networks", "Network", 9, -1, True, 2.0, None])
def test_another_value_is_named_with_what_is_allowed(value) -> None:
    with pytest.raises(InvalidInput, match="allowed: an integer from 0 to 8, or 'network'"):
        confpred.optimize(network(), verify=value)


def test_options_of_the_release_before_are_read() -> None:
    assert pickle.loads(PICKLED) == Options(freeze=True, verify=3)  # noqa: S301
    new = Options(verify="network")
    assert pickle.loads(pickle.dumps(new)) == new  # noqa: S301
