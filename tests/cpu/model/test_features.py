"""A model notices that its features are no longer computed as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from confpred.errors import ModelError
from confpred.families.registry import all_families
from confpred.model.features import examples_of
from confpred.model.folder import load_model
from confpred.problem import conv2d, device
from confpred.problem.conv2d import Problem

LAYER = Problem(8, 64, 28, 28, 64, 3, 3, padding=1, groups=8)
FAMILY = all_families()["grouped_fprop"]


def test_examples_have_every_value_of_an_enumeration() -> None:
    layers = [
        replace(LAYER, n=n, dtype=dtype, activation=activation, bias=bias)
        for n, bias in ((1, False), (2, True))
        for dtype in conv2d.DTYPES
        for activation in conv2d.ACTIVATIONS
    ]
    found = examples_of(layers)
    assert {layer.dtype for layer in found} == set(conv2d.DTYPES)
    assert {layer.activation for layer in found} == set(conv2d.ACTIVATIONS)
    assert {layer.bias for layer in found} == {True, False}
    assert len(found) < 2 * len(conv2d.ACTIVATIONS)
    assert found == examples_of(reversed(layers))


def test_another_formula_is_an_error(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(model_folder)
    features = FAMILY.features

    def changed(problem, device, rows):
        matrix = features(problem, device, rows)
        matrix[:, FAMILY.feature_names.index("registers")] += 1
        return matrix

    # As if this version computed it otherwise than the one that trained the model.
    monkeypatch.setattr(FAMILY, "features", changed)
    with pytest.raises(ModelError, match=r"made-up-1: the features of grouped_fprop are computed"):
        load_model(model_folder)


SLOWER = replace(device.KNOWN["h100"], dram_bytes_per_s=2.9e12)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (conv2d, "DTYPES", conv2d.DTYPES[::-1]),
        (device, "KNOWN", {**device.KNOWN, "h100": SLOWER}),
    ],
)
def test_a_reordered_enumeration_or_another_fact_of_the_device_is_an_error(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, module, name, value
) -> None:
    monkeypatch.setattr(module, name, value)  # as if another version had it so
    with pytest.raises(ModelError, match="are computed otherwise than when the model was trained"):
        load_model(model_folder)


def test_the_last_bit_of_a_logarithm_is_no_other_formula(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors round logarithms differently; what is no logarithm is exact."""
    features = FAMILY.features
    logs = np.array([name.startswith("log_") for name in FAMILY.feature_names])

    def elsewhere(problem, device, rows):
        matrix = features(problem, device, rows)
        exact = (matrix == matrix.round(3)) | ~logs
        return np.where(exact, matrix, np.nextafter(matrix, np.float32(1e9)))

    monkeypatch.setattr(FAMILY, "features", elsewhere)  # as if on another processor
    load_model(model_folder)
