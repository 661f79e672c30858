"""A GPU that is slower than its model says: said once, seen in expected times, not in choices."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from layers import H100
from torch import nn

import confpred
from confpred.predict.choice import Choice
from confpred.predict.plan import plan_of
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.pytorch import explain as explain_module
from confpred.pytorch.run import choosing
from confpred.pytorch.status import capture_of

LAYER = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")
SLOW = replace(H100, tensor_flops=H100.tensor_flops / 1.5, simt_flops=H100.simt_flops / 1.5)
SAID = "cuda:0 is slow: arithmetic takes 1.50 times as long as on the h100 that was measured"


@dataclass
class Gpu:
    """CUDA device 0, an H100 that runs as `now`; `asked` counts the measurements."""

    now: Device = SLOW
    asked: int = 0
    is_capturing: bool = False
    patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    def measure(self, ordinal: int) -> Device:
        self.asked += 1
        return self.now


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(patch=monkeypatch)
    stream = SimpleNamespace(synchronize=lambda: None)
    for where, name, value in (
        (choosing.driver, "device_of", lambda _: H100),
        (choosing.driver, "describe", lambda _: ("NVIDIA H100 80GB HBM3", "580.1")),
        (choosing.driver, "outside_capture", nullcontext),
        (choosing.driver, "as_it_runs", made.measure),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "current_stream", lambda _: stream),
        (torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing),
        (choosing, "_clocks", {}),
        (choosing, "_predictors", {}),
    ):
        # No GPU is here: PyTorch and the driver say what one would.
        monkeypatch.setattr(where, name, value)
    choosing.use_predictor(Predictor.load())
    return made


def choices(count: int = 2) -> list[Choice | None]:
    return [choosing.choose(replace(LAYER, n=n), 0) for n in range(1, count + 1)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "slow" in text]


def test_a_slow_gpu_is_measured_and_told_once_and_choices_stay(gpu: Gpu, caplog) -> None:
    caplog.set_level(logging.WARNING, "confpred")
    made = choices()
    choosing.forget()
    assert choices() == made == Predictor.load().choose_many([c.problem for c in made], "h100")
    assert said(caplog) == [f"{SAID}; `nvidia-smi -q -d PERFORMANCE` says why, choices stay"]
    assert gpu.asked == 1


def test_a_gpu_as_it_was_measured_is_not_worth_a_word(gpu: Gpu, caplog) -> None:
    gpu.now = H100
    choices()
    assert (gpu.asked, said(caplog), choosing.slow_now(0)) == (1, [], "")


def test_an_error_is_not_raised_and_not_tried_again(gpu: Gpu, caplog) -> None:
    def broken(_: int) -> Device:
        gpu.asked += 1
        raise RuntimeError("no memory")

    gpu.patch.setattr(choosing.driver, "as_it_runs", broken)  # a GPU without memory to spare
    assert None not in choices()
    assert (gpu.asked, said(caplog)) == (1, [])
    assert choosing.as_it_runs(0, H100) is H100


def test_a_capture_of_a_cuda_graph_is_left_alone(gpu: Gpu) -> None:
    gpu.is_capturing = True
    choices()
    assert gpu.asked == 0
    gpu.is_capturing = False
    choices()
    assert gpu.asked == 1


@pytest.mark.parametrize("known", ["plan", "guess"])
def test_only_a_model_of_the_gpu_asks_for_its_clock(gpu: Gpu, known: str) -> None:
    if known == "plan":  # which promises to compile nothing
        choosing.use_predictor(Predictor.load(plan=plan_of(filter(None, choices()))))
        gpu.patch.setattr(choosing, "_clocks", {})  # as in a new process
        gpu.asked = 0
    else:
        a100 = get_device("a100")
        gpu.patch.setattr(choosing.driver, "device_of", lambda _: a100)  # another GPU
    assert None not in choices()
    assert gpu.asked == 0


def test_status_says_it_and_measures_nothing(gpu: Gpu) -> None:
    model = nn.Conv2d(8, 8, 3)
    graph = SimpleNamespace(compile_subgraph_reason=None)
    capture = capture_of(graph, [*model.parameters()], None, None, [])
    capture.ordinal = 0
    assert confpred.status(model).remarks == ()
    assert gpu.asked == 0
    choices()
    assert confpred.status(model).remarks == (SAID,)


def test_an_explanation_of_this_gpu_asks_for_its_clock(gpu: Gpu) -> None:
    remarks: list[str] = []
    assert explain_module._as_it_runs(H100, remarks) is SLOW
    assert explain_module._as_it_runs(get_device("a100"), remarks) is get_device("a100")
    assert (gpu.asked, remarks) == (1, [SAID])


def test_expected_times_grow_by_what_bounds_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (  # the first is bound by memory, the second by arithmetic
        nn.Conv2d(256, 256, 3, padding=1, groups=256), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()
    )  # fmt: skip
    model = nn.Sequential(*layers).eval().half().to(memory_format=torch.channels_last)
    x = torch.rand(32, 256, 28, 28).half().to(memory_format=torch.channels_last)
    as_measured = confpred.explain(model, x, "h100")
    monkeypatch.setattr(explain_module, "_as_it_runs", lambda *_: SLOW)  # no GPU is here
    assert confpred.explain(model, x, "h100") == as_measured  # another machine's
    here = confpred.explain(model, x)
    pairs = [*zip(as_measured.rows, here.rows, strict=True)]
    for row, other in pairs:
        assert (row.layers, row.provider, row.config) == (
            other.layers,
            other.provider,
            other.config,
        )
    slow = [(o.expected_ms / r.expected_ms, o.pytorch_ms / r.pytorch_ms) for r, o in pairs]
    assert slow == [pytest.approx((1.0, 1.0)), pytest.approx((1.5, 1.5))]
    assert 1.1 < here.step.ms_after / as_measured.step.ms_after < 1.5
    assert 1.1 < here.step.ms_before / as_measured.step.ms_before < 1.5
