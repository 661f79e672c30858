"""Measurements of several devices: one is learned for, and from all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from synthetic import SMALL

from confpred.model.folder import load_model
from confpred.problem.device import get_device
from confpred.training.dataset import Dataset, read_dataset
from confpred.training.evaluate import folds_of
from confpred.training.train import train

H100, H200 = get_device("h100"), get_device("h200")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements of an H200, of some networks that the H100's have and one that they lack."""
    path = synthetic.write(tmp_path_factory.mktemp("h200") / "h200.parquet", networks=7, seed=0)
    table = pq.read_table(path)
    for name, value in (("device", "h200"), ("device_name", H200.product)):
        column = pa.array([value] * table.num_rows, table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, path)
    return path


@pytest.fixture(scope="module")
def both(measurements: Path, elsewhere: Path) -> Dataset:
    return read_dataset([measurements, elsewhere], "h100")


def test_what_other_devices_took_is_kept_apart(measurements, elsewhere, both) -> None:
    alone = read_dataset([measurements])
    (other,) = both.others
    assert (both.device, other.device) == (H100, H200)
    assert both.rows == alone.rows
    assert {t.device for t in both.timings} == {H100}
    assert len(both.everywhere) == len(both.timings) + len(other.timings)
    assert len(both.pytorch_everywhere) == len(both.pytorch_ms) + len(other.pytorch_ms)
    assert both.digest != alone.digest
    assert read_dataset([elsewhere, measurements], "h200").device == H200


def test_devices_without_a_description_are_left_out(measurements, elsewhere, tmp_path) -> None:
    table = pq.read_table(elsewhere)
    field = table.schema.field("device")
    column = pa.array(["b999"] * table.num_rows, field.type)
    index = table.schema.get_field_index("device")
    pq.write_table(table.set_column(index, field, column), tmp_path / "b999.parquet")
    assert read_dataset([measurements, tmp_path / "b999.parquet"], "h100").others == ()


def test_a_layer_that_is_held_out_is_held_out_on_all_devices(both) -> None:
    folds = folds_of(both, 3, 0)
    assert {t.device for fold in folds for t in fold.test} == {H100}
    for fold in folds:
        tested = {t.problem.layer() for t in fold.test}
        assert {t.device for t in fold.train} == {H100, H200}
        assert not tested & {t.problem.layer() for t in fold.train}


def test_a_model_says_whom_it_learned_from(both, tmp_path) -> None:
    train(both, tmp_path / "model", exclude=["net0"], hyper=SMALL)
    card = json.loads((tmp_path / "model" / "card.json").read_text())
    assert card["device"] == "h100"
    assert 0 < card["data"]["other_devices"]["h200"] < both.others[0].rows
    model = load_model(tmp_path / "model")
    assert model.device == H100
    assert model.families["grouped_fprop"].registers is not None
