"""Another driver or cuDNN than a model was measured with is told once, at the first choice."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from layers import H100

from confpred.measure.pytorch import cudnn_version
from confpred.model.folder import load_model
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.pytorch.run import choosing

LAYER = Problem.parse("n=24 c=160 h=30 w=30 k=160 r=3 s=3 groups=20 padding=1")


@pytest.fixture
def predictor(model_folder, monkeypatch) -> Predictor:
    """Return the predictor of a model that was measured with this cuDNN and driver 580.1."""
    model = load_model(model_folder)
    versions = {"driver": ["580.1"], "cudnn": [cudnn_version() or "none"]}
    model = replace(model, card=replace(model.card, measured_with=versions))
    monkeypatch.setattr(choosing, "_predictors", {})  # the choices of other tests
    monkeypatch.setattr(choosing.driver, "device_of", lambda _: H100)  # there is no GPU
    return Predictor({"h100": model})


def warnings(predictor: Predictor, driver: str, monkeypatch, caplog) -> list[str]:
    """Return the warnings of two choices under this driver."""
    # There is no driver.
    monkeypatch.setattr(choosing.driver, "describe", lambda _: ("NVIDIA H100 80GB HBM3", driver))
    choosing.use_predictor(predictor)
    with caplog.at_level(logging.WARNING, logger="confpred.pytorch.run.choosing"):
        for n in (1, 2):
            choice = choosing.choose(replace(LAYER, n=n), 0)
            assert choice is not None
            assert choice.source == "predicted"
    return [record.getMessage() for record in caplog.records]


def test_the_same_versions_are_not_worth_a_word(predictor, monkeypatch, caplog) -> None:
    assert warnings(predictor, "580.1", monkeypatch, caplog) == []


def test_another_driver_is_told_once(predictor, monkeypatch, caplog) -> None:
    (said,) = warnings(predictor, "590.2", monkeypatch, caplog)
    assert "the driver is 590.2, and the model's measurements are of 580.1" in said
    assert "confpred drift" in said


def test_a_driver_that_does_not_tell_stops_nothing(predictor, monkeypatch, caplog) -> None:
    def broken(_: int) -> tuple[str, str]:
        raise RuntimeError("no NVML")

    monkeypatch.setattr(choosing.driver, "describe", broken)  # a driver that does not tell
    choosing.use_predictor(predictor)
    assert choosing.choose(LAYER, 0) is not None
    assert not caplog.records
