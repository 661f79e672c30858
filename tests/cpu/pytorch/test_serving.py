"""What serves a layer, as far as a machine without a GPU can tell: problems from shapes, when a
copy pays, when a weight is cast again, and compilations that are waited for."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layers import H100, first_kernel

from confpred.cuda.epilogue import epilogue_kernel
from confpred.families.registry import all_families
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.record import Record
from confpred.pytorch import (
    autograd,
    casts,
    choosing,
    gradients,
    kernels,
    layouts,
    loading,
    policy,
)
from confpred.pytorch.gradients import Shape

HALF = torch.float16
LAYER = Problem.parse("n=32 c=128 h=56 w=56 k=128 r=3 s=3 groups=128 padding=1")


def random_shape(rng: random.Random, transposed: bool) -> Shape:
    groups, width, depth = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 8)), rng.choice((1, 2, 8))
    window = (rng.randint(1, 5), rng.randint(1, 5))
    stride, padding, dilation = (
        (rng.randint(low, high), rng.randint(low, high)) for low, high in ((1, 3), (0, 3), (1, 2))
    )
    image = (rng.randint(9, 16), rng.randint(9, 16))
    channels = groups * depth if transposed else groups * width
    weight = (groups * depth, width, *window)
    extra = tuple(rng.randrange(step) for step in stride)  # more is no convolution's gradient
    return Shape(
        (rng.randint(1, 3), channels, *image), weight, rng.random() < 0.5, HALF, 0,
        (stride, padding, dilation, groups), transposed, extra if transposed else (0, 0),
    )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_problems_have_the_sizes_of_pytorchs_tensors(seed, transposed) -> None:
    shape = random_shape(random.Random(seed), transposed)
    stride, padding, dilation, groups = shape.geometry
    x, weight = torch.empty(shape.x, device="meta"), torch.empty(shape.weight, device="meta")
    if transposed:
        arguments = (stride, padding, shape.output_padding, groups, dilation)
        out = F.conv_transpose2d(x, weight, None, *arguments)
    else:
        out = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    image, output = (out, x) if transposed else (x, out)
    directions = {"out": "fprop", "x": "dgrad", "weight": "wgrad"}
    if transposed:
        directions |= {"out": "dgrad", "x": "fprop"}
    for role, direction in directions.items():
        problem = shape.problem(role, deterministic=role == "weight")
        assert problem.direction == direction
        assert (problem.n, problem.c, problem.h, problem.w) == image.shape
        assert (problem.n, problem.k, problem.p, problem.q) == output.shape
        assert (problem.k, problem.group_width, problem.r, problem.s) == weight.shape
        geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
        assert geometry == shape.geometry
        sums = {"out": True, "x": False, "weight": groups > 1}[role]
        fused = shape.bias and not transposed and sums
        assert (problem.bias, problem.deterministic) == (fused, role == "weight")
        assert problem.dtype == "float16"
    assert torch.ops.aten.convolution(x, weight, None, *shape.arguments()).shape == out.shape


PLAIN = Shape((2, 8, 9, 9), (8, 2, 3, 3), True, HALF, 0, ((1, 1), (0, 0), (1, 1), 4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": torch.float64},
        {"dtype": torch.complex64},
        {"x": (8, 9, 9)},
        {"x": (2, 6, 9, 9)},
        {"x": (0, 8, 9, 9)},
        {"x": (2, 8, 2, 2)},  # smaller than the window
        {"weight": (8, 2, 3)},
        {"weight": (9, 2, 3, 3)},
        {"geometry": ((0, 1), (0, 0), (1, 1), 4)},
        {"geometry": ((1, 1), (-1, 0), (1, 1), 4)},
        {"geometry": ((1, 1), (0, 0), (1, 1), 0)},
        {"transposed": True, "x": (2, 6, 9, 9)},
        {"transposed": True, "x": (8, 9, 9)},
        {"transposed": True, "output_padding": (3, 0)},  # PyTorch refuses it
        {"transposed": True, "geometry": ((1, 1), (6, 6), (1, 1), 4)},  # an output of no size
    ],
)
def test_what_is_not_legal_has_no_problem(wrong) -> None:
    assert PLAIN.problem("out") is not None
    shape = replace(PLAIN, **wrong)
    assert [shape.problem(role) for role in ("out", "x", "weight")] == [None] * 3


def test_a_copy_pays_where_the_kernel_saves_more() -> None:
    copies = layouts.copies_ms(LAYER, H100)
    elements = 2 * 32 * 128 * 56 * 56  # of input and output
    # Each is read and written once, two bytes at a time, at a part of 3.35 TB/s.
    expected = 2 * layouts.COPY_MS + 1e3 * 4 * elements / (
        layouts.COPY_SHARE * H100.dram_bytes_per_s
    )
    assert copies == pytest.approx(expected)
    theirs = 1.0
    least = layouts.CHANNELS_FIRST[True] * theirs - copies
    assert layouts.converting_pays(LAYER, least * 0.99, theirs, H100)
    assert not layouts.converting_pays(LAYER, least * 1.01, theirs, H100)
    answers = [layouts.converting_pays(LAYER, least, t / 10, H100) for t in range(1, 30)]
    assert answers == sorted(answers)
    assert answers[-1]
    answers = [layouts.converting_pays(LAYER, t / 100, theirs, H100) for t in range(1, 100)]
    assert answers == sorted(answers, reverse=True)
    for unknown in ((None, 1.0), (0.001, None), (None, None)):
        assert not layouts.converting_pays(LAYER, *unknown, H100)


def test_layouts_that_could_be_both_are_neither() -> None:
    x = torch.empty(2, 8, 5, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert layouts.is_channels_first(x)
    assert layouts.is_channels_last(last)
    assert not layouts.is_channels_first(last)
    assert not layouts.is_channels_last(x)
    for other in (torch.empty(2, 1, 5, 5), torch.empty(2, 8, 1, 1), last[:, :4], x[0]):
        assert not layouts.is_channels_first(other)
        assert not layouts.is_channels_last(other)


class Given:
    """A `Layer` of PyTorch's operators, whose kernels take no batch of gradients."""

    dtype = torch.float64
    shape = Shape((2, 8, 5, 5), (8, 2, 3, 3), True, HALF, 0, ((1, 1), (1, 1), (1, 1), 4))
    used = 0

    def forward(self, x, weight, bias):
        return F.conv2d(x, weight, bias, *self.shape.geometry)

    def backward(self, out_grad, x, weight, mask):
        self.used += 1
        assert out_grad.data_ptr()
        arguments = (out_grad, x, weight, [8], *self.shape.arguments(), list(mask))
        return torch.ops.aten.convolution_backward(*arguments)


def test_gradients_of_all_kinds() -> None:
    layer, given = Given(), [torch.randn(2, 8, 5, 5), torch.randn(8, 2, 3, 3), torch.randn(8)]
    given = [t.double().requires_grad_() for t in given]

    def ours(*t: torch.Tensor) -> torch.Tensor:
        return autograd._apply(layer, *t)

    assert torch.autograd.gradcheck(ours, given, fast_mode=True, check_batched_grad=True)
    assert layer.used > 0
    layer.used = 0
    assert torch.autograd.gradgradcheck(ours, given, fast_mode=True)
    out, right = ours(*given), layer.forward(*given)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    layer.used = 0
    mine = torch.autograd.grad(out, given, grads, is_grads_batched=True)
    assert layer.used == 0
    torch.testing.assert_close(
        mine, torch.autograd.grad(right, given, grads, is_grads_batched=True)
    )


@pytest.fixture
def on_cpu(monkeypatch) -> dict[str, int]:
    """Casts of CPU tensors; the stream that is current can be changed."""
    state = {"stream": 1}
    monkeypatch.setattr(casts, "current_stream", lambda _: state["stream"])
    monkeypatch.setattr(casts, "is_capturing", lambda: False)
    monkeypatch.setattr(casts, "_casts", {})
    monkeypatch.setattr(casts, "_note_ends", lambda: None)
    monkeypatch.setattr(casts, "_clear", lambda: None)
    return state


def test_a_weight_is_cast_once_until_it_changes(on_cpu) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 2, 3, 3))
    bias = torch.nn.Parameter(torch.randn(8))
    first = casts.low_precision(weight, HALF)
    assert (first.dtype, first.requires_grad) == (HALF, False)
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first, weight.detach().half())
    assert casts.low_precision(weight, HALF) is first
    assert casts.low_precision(weight, torch.bfloat16).dtype is torch.bfloat16
    assert torch.equal(casts.low_precision(bias, HALF), bias.detach().half())
    before, other = first.clone(), casts.low_precision(bias, HALF)
    with torch.no_grad():
        weight.add_(1)
    second = casts.low_precision(weight, HALF)
    assert second is not first
    assert torch.equal(second, weight.detach().half())
    assert torch.equal(first, before), "a backward pass may be waiting for it"
    assert casts.low_precision(bias, HALF) is other, "what has not changed is not cast again"


def test_all_that_has_changed_is_cast_at_once(on_cpu, monkeypatch) -> None:
    weights = [torch.nn.Parameter(torch.randn(8, 1, 3, 3)) for _ in range(5)]
    for weight in weights:
        casts.low_precision(weight, HALF)
    calls = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: calls.append(len(a)) or copy(a, b))
    for weight in weights[:4]:
        weight.data = torch.randn_like(weight)  # elsewhere, of the same version
    for weight in weights:
        assert torch.equal(casts.low_precision(weight, HALF), weight.detach().half())
    assert calls == [4]


def test_another_stream_has_its_own_cast(on_cpu) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 2, 3, 3))
    first = casts.low_precision(weight, HALF)
    on_cpu["stream"] = 2
    assert casts.low_precision(weight, HALF) is not first


def test_the_end_of_autocasts_block_ends_a_cast(on_cpu, monkeypatch) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 2, 3, 3))
    first = casts.low_precision(weight, HALF)
    weight.data.mul_(2)  # as some optimizers write it: PyTorch does not count it
    monkeypatch.setattr(casts, "_clear", lambda: None)
    casts._end_region()
    second = casts.low_precision(weight, HALF)
    assert torch.equal(second, weight.detach().half())
    assert not torch.equal(first, second)


def test_a_model_that_does_not_run_is_not_cast(on_cpu) -> None:
    models = [[torch.nn.Parameter(torch.randn(8, 1, 3, 3)) for _ in range(n)] for n in (2, 6)]

    def step(model: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        low = [casts.low_precision(weight, HALF) for weight in model]
        casts._end_region()
        return low

    def copies() -> list[int]:
        return [id(casts._casts[id(weight), HALF].low) for weight in models[0]]

    step(models[0])
    step(models[1])
    before = copies()
    step(models[1])
    assert copies() == before
    step(models[0])
    assert copies() != before


@pytest.mark.parametrize("count", [2, 6])
def test_copies_are_no_inference_tensors(on_cpu, count) -> None:
    weights = [torch.nn.Parameter(torch.randn(8, 1, 3, 3)) for _ in range(count)]
    with torch.inference_mode():
        for weight in weights:
            casts.low_precision(weight, HALF)
        casts._end_region()
        found = [casts.low_precision(weight, HALF) for weight in weights]
    assert not any(low.is_inference() for low in found)


def test_what_does_not_count_its_changes_is_cast_at_each_call(on_cpu, monkeypatch) -> None:
    with torch.inference_mode():
        weight = torch.randn(8, 2, 3, 3)
        assert casts.low_precision(weight, HALF) is not casts.low_precision(weight, HALF)
    weight = torch.randn(8, 2, 3, 3)
    with torch.autocast("cpu", cache_enabled=False):
        assert casts.low_precision(weight, HALF) is not casts.low_precision(weight, HALF)
    monkeypatch.setattr(casts, "is_capturing", lambda: True)
    assert casts.low_precision(weight, HALF) is not casts.low_precision(weight, HALF)
    assert not casts._casts


def test_a_weight_that_is_gone_is_forgotten(on_cpu) -> None:
    weights = [torch.randn(8, 2, 3, 3) for _ in range(3)]
    for weight in weights:
        casts.low_precision(weight, HALF)
    assert len(casts._casts) == 3
    del weight, weights[0]
    gc.collect()
    assert len(casts._casts) == 2


def test_pytorch_serves_until_all_is_compiled(monkeypatch) -> None:
    monkeypatch.setattr(policy, "is_capturing", lambda: False)
    futures = (Future(), Future())
    found: list[tuple[int, int]] = []

    def find(*inputs: int) -> object:
        found.append(inputs)
        return lambda x, y: x * y

    serve = policy.Pending(futures).until_then(lambda x, y: x + y, find)
    assert serve(1, 2) == 3
    futures[0].set_result(None)
    assert serve(1, 2) == 3
    assert not found
    futures[1].set_exception(ValueError("a compiler's error is not the caller's"))
    assert serve(1, 2) == 2
    assert found == [(1, 2)]


def test_what_cannot_be_found_stays_pytorchs(monkeypatch) -> None:
    monkeypatch.setattr(policy, "is_capturing", lambda: False)
    futures = (Future(),)
    futures[0].set_result(None)
    serve = policy.Pending(futures).until_then(lambda x: x + 1, lambda _: None)
    assert serve(1) == 2


class Slow(Predictor):
    """A predictor that chooses, kernels of ours, when it is told to."""

    def __init__(self) -> None:
        super().__init__({})
        self.go, self.asked = threading.Event(), 0

    def choose(
        self, problem: Record, device: str | Device, *, max_regret: float | None = None
    ) -> Choice:
        self.asked += 1
        assert self.go.wait(60)
        return replace(super().choose(problem, device, max_regret=max_regret), source="pinned")


@pytest.fixture
def slow(monkeypatch) -> Iterator[Slow]:
    """It chooses for calls that are in the background."""
    monkeypatch.setattr(policy, "is_capturing", lambda: False)
    monkeypatch.setattr(policy, "_current", policy.Policy(background=True))
    monkeypatch.setattr(choosing.driver, "device_of", lambda _: H100)
    predictor = Slow()
    monkeypatch.setattr(choosing, "_predictor", predictor)
    choosing.forget()
    yield predictor
    predictor.go.set()
    choosing.forget()


def test_choices_are_made_while_pytorch_serves(slow) -> None:
    problems = [LAYER, None, replace(LAYER, n=1)]
    first, second = policy.decide(problems, 0), policy.decide(problems, 0)
    assert isinstance(first, policy.Pending)
    assert isinstance(second, policy.Pending)
    assert first.futures == second.futures
    slow.go.set()
    for future in first.futures:
        future.result(60)
    found = policy.decide(problems, 0)
    assert not isinstance(found, policy.Pending)
    assert [None if c is None else c.problem for c in found] == problems
    assert slow.asked == 2


@pytest.mark.parametrize("reason", ["capture", "deterministic", "watched", "not in background"])
def test_some_wait_for_the_choice(slow, reason, monkeypatch) -> None:
    slow.go.set()
    if reason == "capture":
        monkeypatch.setattr(policy, "is_capturing", lambda: True)
    elif reason == "deterministic":
        monkeypatch.setattr(policy, "is_deterministic", lambda: True)
    elif reason == "not in background":
        monkeypatch.setattr(policy, "_current", policy.Policy())
    watching = reason == "watched"
    with choosing.watch_choices(lambda _: None) if watching else nullcontext():
        assert not isinstance(policy.decide([LAYER], 0), policy.Pending)


def test_what_is_forgotten_is_chosen_again(slow) -> None:
    first = policy.decide([LAYER], 0)
    choosing.forget()
    second = policy.decide([LAYER], 0)
    assert isinstance(first, policy.Pending)
    assert isinstance(second, policy.Pending)
    assert first.futures != second.futures


def test_a_capture_waits_for_the_compiler(monkeypatch) -> None:
    monkeypatch.setattr(policy, "is_capturing", lambda: True)
    future: Future[object] = Future()
    serve = policy.Pending((future,)).until_then(lambda x: x + 1, lambda _: lambda x: x * 10)
    timer = threading.Timer(0.05, future.set_result, (None,))
    timer.start()
    assert serve(1) == 10
    timer.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """An empty cache of kernels, and none of them known to this process."""
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_compiling", {})
    return tmp_path


def test_a_kernel_is_compiled_once(cache) -> None:
    spec = first_kernel(all_families()["depthwise_fprop"])
    future = kernels.submit(spec, "sm_90a")
    assert kernels.submit(spec, "sm_90a") is future
    compiled = future.result(120)
    assert not compiled.cached
    assert kernels.submit(spec, "sm_90a") is future
    assert len(list(cache.rglob("*.cubin"))) == 1
    kernels._compiling.clear()  # as another process starts
    again = kernels.submit(spec, "sm_90a")
    assert again.done()
    assert again.result().cached
    assert again.result().cubin == compiled.cubin


def test_all_choices_are_compiled_before_any_is_loaded(cache, monkeypatch) -> None:
    layers = [LAYER, replace(LAYER, r=5, s=5, padding=(2, 2))]
    monkeypatch.setattr(loading, "_arch", lambda _: "sm_90a")
    loaded = []

    def load(choice, ordinal) -> None:
        known = [kernels.submit(s.kernel, "sm_90a") for s in loading._launch_of(choice).steps]
        assert all(future.result(120).cubin for future in known)
        loaded.append((choice, ordinal, len(kernels._compiling)))

    monkeypatch.setattr(loading, "load", load)
    guesses = Predictor({}).choose_many(layers, H100)
    loading.compile_ahead(guesses, (), 0)
    assert loaded == []  # a guess without a model is never launched
    pinned = [replace(choice, source="pinned") for choice in guesses]
    wanted = {s.kernel for c in pinned for s in loading._launch_of(c).steps}
    follows = epilogue_kernel(64, "float16", bias=True, residual=False, activation="relu")
    loading.compile_ahead(pinned, [follows], 0)
    assert loaded == [(choice, 0, len(wanted) + 1) for choice in pinned]
    assert loading.waiting_for(pinned[0], 0) == []
    assert [spec for spec, _ in kernels._compiling][-1] == follows  # for which nobody waits
    kernels.submit(follows, "sm_90a").result(120)
    assert len(list(cache.rglob("*.cubin"))) == len(wanted) + 1


_COMPILES = """
    from layers import first_kernel
    from confpred.families.registry import all_families
    from confpred.pytorch import kernels
    spec = first_kernel(all_families()["depthwise_fprop"])
    print(kernels.submit(spec, "sm_90a").result().cached)
"""


def test_a_second_process_takes_it_from_the_cache(tmp_path: Path, repository: Path) -> None:
    environment = os.environ | {
        "CONFPRED_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join((str(repository), str(repository / "tests"))),
    }
    command = [sys.executable, "-c", textwrap.dedent(_COMPILES)]
    done = [
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [process.stdout.strip() for process in done] == ["False", "True"]


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (False, True, False)])
def test_an_operators_backward_asks_for_the_layer_of_its_bias(mask, monkeypatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(gradients, "find_layer", lambda *given: asked.append(given))
    monkeypatch.setattr(gradients, "served", {})
    x, weight = torch.randn(2, 8, 5, 5), torch.randn(12, 2, 3, 3)
    geometry = ((1, 1), (1, 1), (1, 1), 4)
    out_grad = torch.randn(2, 12, 5, 5)
    found = gradients.backward(out_grad, x, weight, geometry, mask, "a test")
    ((_, _, bias, dtype, *_),) = asked
    assert (None if bias is None else bias.shape) == ((12,) if mask[2] else None)
    assert dtype is torch.float32
    leaves = [t.requires_grad_() for t in (x, weight, torch.zeros(12))]
    right = torch.autograd.grad(F.conv2d(*leaves, *geometry), leaves, out_grad)
    for mine, exact, wanted in zip(found, right, mask, strict=True):
        if wanted:
            torch.testing.assert_close(mine, exact)
