"""Devices of the service that no table has: a model brings its own description along."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from layers import H100
from served import copy_model

from confpred.errors import ModelError
from confpred.model.folder import load_model
from confpred.predict.predictor import Predictor
from confpred.service import Settings
from confpred.service.app import create_app

BOARD = replace(H100, key="board-of-a-model", product="NVIDIA Board of a Model")
ONE = {
    "device": BOARD.key,
    "problem": {"n": 24, "c": 160, "h": 30, "w": 30, "k": 160, "r": 3, "s": 3, "groups": 20},
}


def of_a_board(folder: Path, model_folder: Path, **changes: object) -> Path:
    """Return a copy of a model that says that it is of `BOARD`."""
    copy_model(model_folder, folder, device=BOARD.key, board=asdict(BOARD) | changes)
    return folder


def test_a_board_of_no_table_is_served_and_listed(model_folder: Path, tmp_path: Path) -> None:
    folder = of_a_board(tmp_path / "board-1", model_folder)
    with TestClient(create_app(Settings(), Predictor.load(folder))) as client:
        (choice,) = client.post("/v1/predict", json=ONE).json()["choices"][0]
        assert (choice["device"], choice["source"]) == (BOARD.key, "predicted")
        served = {device["key"]: device for device in client.get("/v1/devices").json()["devices"]}
        assert served[BOARD.key]["model"] == "board-1"
        assert {name: served[BOARD.key][name] for name in asdict(BOARD)} == asdict(BOARD)
        other = client.post("/v1/predict", json=ONE | {"device": "rtx-4090"}).json()
        assert other["choices"][0][0]["source"] == "transferred"
        assert other["choices"][0][0]["model"] == "board-1"


@pytest.mark.parametrize("changes", [{"sm_count": 0}, {"tensor_flops": "fast"}, {"arch": ""}])
def test_a_damaged_description_is_a_damaged_model(
    model_folder: Path, tmp_path: Path, changes: dict
) -> None:
    folder = of_a_board(tmp_path / "board-1", model_folder, **changes)
    with pytest.raises(ModelError, match=next(iter(changes))):
        load_model(folder)
