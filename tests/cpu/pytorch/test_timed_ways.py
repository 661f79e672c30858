"""`confpred.pytorch.ways`: ways of a step are compared, timed in turns, and fail alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from confpred.pytorch.ways import Subject, measure, ratio


def _subject(**fields: Any) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Subject(model, (torch.randn(2, 3, 8, 8),), half=torch.bfloat16, **fields)


def _measured(subject: Subject, **ways: Any) -> dict[str, dict[str, Any]]:
    both = {"eager": lambda model: model} | ways
    return measure(subject, both, rounds=1, turn_s=0.001)


def test_a_way_that_fails_leaves_the_others() -> None:
    def fail(model: nn.Module) -> Any:
        raise RuntimeError("it cannot")

    def crowd(model: nn.Module) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    found = _measured(_subject(), compile=fail, crowded=crowd, again=lambda model: model)
    assert found["compile"] == {"error": "RuntimeError: it cannot"}
    assert found["crowded"] == {"error": "out of memory"}
    assert found["eager"]["over_eager"] == 1.0
    assert found["again"]["ms"] > 0


@pytest.mark.parametrize("training", [False, True])
def test_a_way_that_computes_something_else_is_an_error(training: bool) -> None:
    """The subject stays as it is."""

    def doubled(model: nn.Module) -> Any:
        return lambda x: 2 * model(x)

    subject = _subject(training=training)
    before = [p.clone() for p in subject.model.parameters()]
    found = _measured(subject, doubled=doubled)
    assert "away from float32" in found["doubled"]["error"]
    assert "error" not in found["eager"]
    assert all(p.dtype is torch.float32 and p.grad is None for p in subject.model.parameters())
    assert all(map(torch.equal, before, subject.model.parameters()))


def test_training_is_compared_by_gradients() -> None:
    subject = _subject(training=True)
    model = subject.copy_of_model()
    found = subject.answer(model, subject.step_of(model, model)())
    assert found.numel() == sum(p.numel() for p in model.parameters())
    assert found.norm() > 0


def test_a_ratio_is_of_times_of_one_round() -> None:
    assert ratio([6.0, 60.0, 600.0], [3.0, 20.0, 600.0]) == 2.0
    assert ratio([], [1.0]) is None
    with pytest.raises(ValueError, match="argument 2"):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(("size", "scale"), [(1e-8, 2.0**16), (0.9, 2.0**11), (1e6, 2.0**-9)])
def test_gradients_are_scaled_into_what_float16_holds(size: float, scale: float) -> None:
    subject = replace(
        _subject(training=True, loss=lambda x: size * x.float().sum()), half=torch.float16
    )
    assert subject.reference()[1].scale == scale
    assert _measured(subject)["eager"]["difference"] < 0.01


def test_gradients_of_filters_are_scaled_too() -> None:
    """They are sums over all images and positions, and in half precision under autocast."""
    subject = Subject(
        nn.Conv2d(1, 1, 1, bias=False), (torch.ones(1, 1, 64, 64),), training=True,
        loss=lambda x: x.float().sum(), half=torch.float16,
    )  # fmt: skip
    assert _measured(subject)["eager"]["difference"] < 0.01


def test_numbers_that_are_not_finite_are_an_error_of_eager_mode_too() -> None:
    """Their distance from float32 is infinite, and each way would be within it."""
    subject = replace(_subject(), half=torch.float16)
    subject = replace(subject, inputs=(1e6 * subject.inputs[0],))
    found = _measured(subject, again=lambda model: model)
    assert all("not finite in torch.float16" in way["error"] for way in found.values())
