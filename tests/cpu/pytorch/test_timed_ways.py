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


@pytest.mark.parametrize(("size", "scale"), [(1e-8, 2.0**16), (1.0, 2.0**12), (1e6, 2.0**-8)])
def test_gradients_are_scaled_into_what_float16_holds(size: float, scale: float) -> None:
    subject = replace(
        _subject(training=True, loss=lambda x: size * x.float().sum()), half=torch.float16
    )
    assert subject.reference()[1].scale == scale
    assert _measured(subject)["eager"]["difference"] < 0.01
