"""A small network, its inputs, and the comparison of two runs of one program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

import confpred
from confpred.pytorch.run import choosing

LAST = torch.channels_last
Model = TypeVar("Model", bound=nn.Module)
Program = Callable[["Run"], Any]
#: Largest difference of a result, as a part of its norm. The programs change what they change by
#: more than ten times as much (`Run.changed`).
TOLERANCE = {"cuda": 2e-2, "cpu": 2e-3}  # of bfloat16 on a CPU, too


@dataclass(frozen=True, slots=True)
class Hazard:
    """A program, and what is known of it.

    Attributes:
        program: returns tensors, numbers and texts in lists, tuples and dictionaries.
        needs_gpu: it says nothing on a CPU.
        kernels: whether kernels of confpred have to run in it.
        layers: how many operators of confpred its graphs have at least, and `norms` how many of
            these are batch norms of training.
        by_inductor: whether Inductor compiles all of its graphs.
        replays: how many of its passes are replayed as CUDA graphs at least.
        refused: a part of the error that PyTorch may raise in the place of a result.
    """

    program: Program
    needs_gpu: bool = False
    kernels: bool = True
    layers: int = 1
    norms: int = 0
    replays: int = 0
    by_inductor: bool = True
    refused: str | None = None


#: By name.
HAZARDS: dict[str, Hazard] = {}


def hazard(**told: Any) -> Callable[[Program], Program]:
    """Enter the decorated program into ``HAZARDS``."""

    def enter(program: Program) -> Program:
        name = getattr(program, "__name__", "")
        assert name not in HAZARDS
        HAZARDS[name] = Hazard(program, **told)
        return program

    return enter


class Net(nn.Module):
    """Dense, depthwise and grouped layers with batch norms, activations and residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(64)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(64)
        self.pointwise = nn.Conv2d(64, 64, 1)
        self.grouped = nn.Conv2d(64, 64, 3, padding=1, groups=8)
        self.grouped_norm = nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 10)

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        x = x + self.pointwise(F.silu(self.depthwise_norm(self.depthwise(x))))
        return F.hardswish(self.grouped_norm(self.grouped(x)) + x)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x).mean((2, 3)))


@dataclass
class Run:
    """One run of a program.

    Attributes:
        device: ``cuda`` or ``cpu``.
        is_optimized: whether `optimize` does something.
        options: of `confpred.optimize`.
    """

    device: str
    is_optimized: bool
    options: dict[str, Any] = field(default_factory=dict)

    def optimize(self, model: Model, *given: Any, **named: Any) -> Model:
        """Return `model`, optimized unless this is the run of the eager twin."""
        if not self.is_optimized:
            return model
        return confpred.optimize(model, *given, **{**self.options, **named})

    def network(
        self, kind: Callable[..., Model] = Net, *given: Any, train: bool = False,  # type: ignore[assignment]
        layout: torch.memory_format | None = LAST,
    ) -> Model:  # fmt: skip
        """Return a network: float16 on a GPU, or float32 for `train`; its filters of a `layout`."""
        torch.manual_seed(0)
        model = kind(*given)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.running_mean.normal_(0, 0.1)
                    module.running_var.uniform_(0.5, 1.5)
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(0, 0.1)
        model.to(self.device, memory_format=layout)
        return model.train() if train else model.to(self.dtype).eval()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.device == "cuda" else torch.float32

    def images(
        self, seed: int = 1, batch: int = 4, size: int = 32, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return random images of shape (batch, 3, size, size), channels last."""
        numbers = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, 3, size, size, generator=numbers)
        return x.to(self.device, dtype or self.dtype).contiguous(memory_format=LAST)

    def floats(self, seed: int = 1, **sizes: int) -> Tensor:
        """Return `images` in float32."""
        return self.images(seed, dtype=torch.float32, **sizes)

    def autocast(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
        """Return float16 autocast on a GPU; nothing on a CPU, unless a `dtype` is named."""
        if dtype is None and self.device == "cpu":
            return nullcontext()
        return torch.autocast(self.device, dtype or torch.float16)

    def infer(self, model: nn.Module, times: int = 3, seed: int = 1) -> list[Any]:
        """Return the outputs for so many inputs: warmed up, recorded and replayed."""
        with torch.no_grad():
            return [model(self.images(seed + i)) for i in range(times)]

    def step(self, model: nn.Module, x: Tensor, optimizer: Any = None) -> Tensor:
        """Run forward and backward, and `optimizer`; return the output."""
        with self.autocast():
            out = model(x)
        loss_of(out).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return out.detach()

    def train(self, model: nn.Module, optimizer: Any = None, steps: int = 3, seed: int = 1) -> Any:
        """Return the outputs of so many steps, and gradients and buffers after them."""
        outs = [self.step(model, self.floats(seed + i), optimizer) for i in range(steps)]
        return outs, gradients(model), [b.clone() for b in model.buffers()]

    def changed(self, *results: Any) -> None:
        """Assert that each of `results` differs from the one before by more than the tolerance: a
        stale one would be seen."""
        flat = [torch.cat([t.float().flatten() for t in tensors(x)]) for x in results]
        for before, after in pairwise(flat):
            assert (before - after).norm() > TOLERANCE[self.device] * after.norm()

    def error(self, call: Callable[[], Any]) -> str:
        """Return the name of the builtin error that `call` raises; ``none`` without one."""
        try:
            call()
        except Exception as error:
            return next(k.__name__ for k in type(error).__mro__ if k.__module__ == "builtins")
        return "none"


def loss_of(out: Tensor) -> Tensor:
    return (out.float() + 0.5).square().mean()


def gradients(model: nn.Module) -> list[Any]:
    """Return copies of the gradients of all parameters, together: one that is zero by arithmetic is
    nothing but rounding."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [len(found), torch.cat([g.float().flatten() for g in found]) if found else None]


def tensors(results: Any) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(results) if isinstance(x, Tensor)]


@contextmanager
def switched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the block."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


@contextmanager
def failed_passes() -> Iterator[list[str]]:
    """Return the warnings of optimizations that failed inside the block."""
    seen: list[str] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and " failed: " in record.getMessage():
                seen.append(record.getMessage())

    watch, log = Watch(), logging.getLogger("confpred")
    choosing.forget()  # a warning comes once
    log.addHandler(watch)
    try:
        yield seen
    finally:
        log.removeHandler(watch)


def compare(found: Hazard, device: str, **options: Any) -> None:
    """Run a program twice, and assert that it returns the same.

    Args:
        found: the program.
        device: where.
        options: of `confpred.optimize`.
    """
    torch.manual_seed(0)
    theirs = found.program(Run(device, False))
    torch.manual_seed(0)
    try:
        mine = found.program(Run(device, True, options))
    except Exception as error:
        if found.refused is not None and found.refused in str(error):
            return
        raise
    finally:
        torch._dynamo.reset()
    assert_same(mine, theirs, TOLERANCE[device])


def assert_same(mine: Any, theirs: Any, tolerance: float) -> None:
    """Assert that two results are the same; tensors within `tolerance` of their norm."""
    ours, spec = _pytree.tree_flatten(mine)
    others, other_spec = _pytree.tree_flatten(theirs)
    assert spec == other_spec
    for place, (a, b) in enumerate(zip(ours, others, strict=True)):
        if not isinstance(b, Tensor):
            assert a == (b if not isinstance(b, float) else _about(b, tolerance)), place
            continue
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), place
        assert a.requires_grad == b.requires_grad, place
        if not b.is_floating_point():
            assert torch.equal(a, b), f"result {place}: {a} is not {b}"
            continue
        off = difference(a, b)
        assert off <= tolerance, f"result {place} of norm {b.norm().item():.3g} is {off:.3g} off"


def difference(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference as a part of `b`'s; infinite where NaNs differ."""
    a, b = a.detach().double(), b.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return ((a - b).norm() / b.norm().clamp_min(1e-6)).item() if b.numel() else 0.0


def _about(value: float, tolerance: float) -> Any:
    import pytest

    return pytest.approx(value, rel=tolerance, abs=1e-6)
