"""Layers on a GPU, a predictor that has kernels of ours serve them, and what is right for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import confpred
from confpred.cudnn.family import FAMILY
from confpred.cudnn.plans import BuiltPlan
from confpred.cudnn.table import table
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device, get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.record import Record

LAST = torch.channels_last
SHAPE = {"padding": 1, "groups": 8}
#: Layers that kernels of ours serve: arguments of the operator, then channels.
LAYERS = {
    "width 8": (SHAPE, 64),
    "width 16, stride 2": ({"stride": 2, "padding": 1, "groups": 4}, 64),
    "width 32, dilation 2": ({"dilation": 2, "padding": 2, "groups": 2}, 64),
    "depthwise": ({"padding": 1, "groups": 64}, 64),
    "depthwise, stride 2 and dilation 2": (
        {"stride": (2, 1), "dilation": (1, 2), "padding": (1, 2), "groups": 48},
        48,
    ),
}
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}


class OneByOne(Predictor):
    """A predictor whose batches are chosen for as single problems are."""

    def choose_many(
        self,
        problems: Iterable[Record],
        device: str | Device,
        *,
        max_regret: float | None = None,
    ) -> list[Choice]:
        return [self.choose(problem, device, max_regret=max_regret) for problem in problems]


class OursFirst(OneByOne):
    """A predictor without a model, whose guess is taken as if its user had pinned it: a kernel of
    ours wherever one is legal, whatever models say.

    Attributes:
        chosen: the families of its choices.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.chosen: list[str | None] = []

    def within(self, limits: Limits) -> OursFirst:
        if limits == self.limits:
            return self
        found = OursFirst()
        found.chosen, found.limits = self.chosen, limits
        return found

    def choose(
        self, problem: Record, device: str | Device, *, max_regret: float | None = None
    ) -> Choice:
        choice = super().choose(problem, device, max_regret=max_regret)
        self.chosen.append(choice.family)
        return (
            replace(choice, source="pinned")
            if choice.source in ("transferred", "heuristic")
            else choice
        )


class PlansFirst(OneByOne):
    """A predictor that takes what cuDNN offers for a layer as if its user had pinned it, plans on
    tensor cores first; where it offers nothing, PyTorch's own operator."""

    def __init__(self, limits: Limits = UNLIMITED) -> None:
        super().__init__({})
        self.limits = limits

    def within(self, limits: Limits) -> PlansFirst:
        return self if limits == self.limits else PlansFirst(limits)

    def choose(
        self, problem: Record, device: str | Device, *, max_regret: float | None = None
    ) -> Choice:
        return self.rank(problem, device, 1)[0]

    def rank(
        self,
        problem: Record,
        device: str | Device,
        top: int = 5,
        *,
        max_regret: float | None = None,
    ) -> list[Choice]:
        here = get_device(device)
        rows = np.flatnonzero(FAMILY.listed(problem, here))
        rows = rows[FAMILY.allowed(problem, rows, self.limits)]
        rows = rows[np.argsort(~table().notes["tensor_core"][rows], kind="stable")]
        found = [Candidate(FAMILY.name, row) for row in rows[:top].tolist()]
        choices = [Choice(problem, here.key, "pinned", candidate) for candidate in found]
        return choices or [Choice(problem, here.key, "fallback", PYTORCH_OPERATOR)]


@contextmanager
def launched_plans() -> Iterator[list[BuiltPlan]]:
    """cuDNN's plans in the order of their launches inside the block, where they serve every layer
    that they can."""
    launched: list[BuiltPlan] = []
    bind = BuiltPlan.bind

    def noting(built: BuiltPlan, names: Sequence[str]) -> Callable[..., None]:
        enqueue = bind(built, names)

        def noted(stream: int, addresses: Sequence[int]) -> None:
            enqueue(stream, addresses)
            launched.append(built)

        return noted

    confpred.use_predictor(PlansFirst())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuiltPlan, "bind", noting)
        try:
            yield launched
        finally:
            confpred.use_predictor(Predictor({}))


@contextmanager
def ours_first() -> Iterator[OursFirst]:
    """Kernels of ours serve every layer that they can, inside the block."""
    predictor = OursFirst()
    confpred.use_predictor(predictor)
    try:
        yield predictor
    finally:
        confpred.use_predictor(Predictor({}))


Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_layer(
    kwargs: dict[str, Any], channels: int, dtype: torch.dtype = torch.float16, seed: int = 0
) -> Layer:
    """Input, filter and bias; the filter's scale keeps the output near 1."""
    torch.manual_seed(seed)
    width = channels // kwargs["groups"]
    x = torch.randn(4, channels, 29, 28, device="cuda")
    weight = torch.randn(channels, width, 3, 3, device="cuda") / (9 * width) ** 0.5
    bias = torch.randn(channels, device="cuda")
    return (
        x.to(dtype).to(memory_format=LAST),
        weight.to(dtype).to(memory_format=LAST),
        bias.to(dtype),
    )


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float | None = None) -> None:
    """`a` is `b` to the rounding of `a`'s dtype, or to `tolerance`, a part of the largest."""
    tolerance = TOLERANCE[a.dtype] if tolerance is None else tolerance
    scale = max(1.0, b.float().abs().max().item())
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * scale)


def in_float64(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.detach().double() for t in tensors]


def served_by(direction: str, ours: OursFirst) -> bool:
    return any(name is not None and name.endswith(direction) for name in ours.chosen)
