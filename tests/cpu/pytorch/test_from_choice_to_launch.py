"""The files that a call runs through from a choice to a launch; the driver only notes its calls.

A person who follows a launch has to read them. The family lays a config out in one call, the
compiler compiles it in another, and records are everywhere: for the first launch, the rooms
`families` and `problem` are not counted. For those after it every file is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import confpred
from confpred.cuda import driver
from confpred.cuda.compiler import CompiledKernel
from confpred.families.protocol import Candidate
from confpred.launch import runner
from confpred.launch.assignment import Assignment
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.problem.norm import BatchNorm
from confpred.problem.record import Record
from confpred.pytorch.run import choosing, loading
from confpred.pytorch.run.convolve import Call

ROOT = Path(confpred.__file__).parent
MOST_FILES = 10
LAST = torch.channels_last
LAYER = Problem(2, 16, 6, 6, 16, 3, 3, padding=1, groups=2, bias=True, activation="relu")
NORM = BatchNorm(2, 6, 6, 16, activation="relu")


class OnGpu(torch.Tensor):
    """A tensor that says that it is on CUDA device 0."""

    is_cuda = True  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield what the driver is asked for; its device 0 is an H100."""
    asked: list[Any] = []
    kernel = driver.LoadedKernel(SimpleNamespace(handle=1), 32, 0)  # type: ignore[arg-type]
    empty = torch.empty
    for target, name, value in (
        (driver, "device_of", lambda _: get_device("h100")),
        (driver, "make_current", lambda _: None),
        (driver, "outside_capture", nullcontext),
        (runner, "compile_kernel", lambda *_: CompiledKernel(b"", "kernel", cached=True)),
        (driver, "load", lambda *_: kernel),
        (driver, "_launch_kernel", lambda: lambda *call: asked.append(call)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", lambda _: nullcontext()),
        (torch, "device", lambda *_: "cpu"),
        (loading, "current_stream", lambda _: 7),
        (loading, "_empty", lambda size, strides, dtype: empty(size, dtype=dtype)),
    ):
        monkeypatch.setattr(target, name, value)  # no GPU and no compiler
    forget()
    yield asked
    forget()


def forget() -> None:
    """Forget launches and kernels, and end the threads that compile."""
    choosing.forget()
    runner._reset_after_fork()


def image(channels: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    plain = torch.randn(2, channels, 6, 6, dtype=dtype).contiguous(memory_format=LAST)
    return plain.as_subclass(OnGpu)


def convolution(choice: Choice) -> Any:
    call = Call(((1, 1), (1, 1), (1, 1), 2), "relu", hints=(Assignment.of(choice), None))
    weight = torch.randn(16, 8, 3, 3).half().contiguous(memory_format=LAST).as_subclass(OnGpu)
    bias = torch.randn(16).half().as_subclass(OnGpu)
    return torch.ops.confpred.conv2d(image(16), weight, None, bias, None, call.text())


def norm(choice: Choice) -> Any:
    vectors = [torch.randn(16).as_subclass(OnGpu) for _ in range(4)]
    numbers = [torch.randn(1).as_subclass(OnGpu) for _ in range(2)]
    weight, bias, mean, variance = vectors
    given = (image(16), weight, bias, None, mean, variance, numbers, 0.1, 1e-5)
    return torch.ops.confpred.batch_norm(*given, Assignment.of(choice).text())


def files_of(run: Callable[[], Any]) -> set[str]:
    """Return the files of confpred that `run` and its new threads run through."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add(str(path.relative_to(ROOT)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("problem", "candidate", "call"), [
    (LAYER, Candidate("grouped_fprop", 0), convolution),
    (NORM, Candidate("batch_norm_one_pass", 420), norm),
])  # fmt: skip
def test_ten_files_lie_between_a_choice_and_its_launch(
    problem: Record, candidate: Candidate, call: Callable[[Choice], Any], launches: list[Any]
) -> None:
    choice = Choice(problem, "h100", "predicted", candidate)
    for is_ready in (False, True):
        files = files_of(lambda: call(choice))
        assert launches, "PyTorch's operator ran"
        counted = {f for f in files if is_ready or f.split("/")[0] not in ("families", "problem")}
        assert "cuda/driver.py" in counted
        assert len(counted) <= MOST_FILES, sorted(counted)
        launches.clear()
