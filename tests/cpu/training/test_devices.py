"""Measurements of several devices: one is learned for, and from all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from layers import first_kernel
from synthetic import SMALL

from confpred.errors import DataError
from confpred.families.kernel_text import source_digest
from confpred.families.registry import all_families
from confpred.model.folder import load_model
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device, get_device
from confpred.training.cross_validate import cross_validate
from confpred.training.dataset import Dataset, Timings, read_dataset
from confpred.training.evaluate import folds_of, judge_baselines
from confpred.training.fit import fit_families
from confpred.training.train import train

H100, H200 = get_device("h100"), get_device("h200")


def renamed(path: Path, out: Path, **names: str) -> Path:
    """Write the measurements at `path` to `out`, each of these columns with one value."""
    table = pq.read_table(path)
    for name, value in names.items():
        column = pa.array([value] * table.num_rows, table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, out)
    return out


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements of an H200, of some networks that the H100's have and one that they lack."""
    path = synthetic.write(tmp_path_factory.mktemp("h200") / "h200.parquet", networks=7, seed=0)
    return renamed(path, path, device="h200", device_name=H200.product)


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
    unknown = renamed(elsewhere, tmp_path / "b999.parquet", device="b999")
    assert read_dataset([measurements, unknown], "h100").others == ()


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


def layer(number: int) -> Problem:
    channels = 64 * (1 + number % 4)
    return Problem(1 + number, channels, 28, 28, channels, 3, 3, padding=1, groups=channels)


def timings(
    family: str, device: Device, times: float, count: int = 40, first: int = 0
) -> list[Timings]:
    """Make timings of layers of 8 networks, each of which takes `times` as long as the family
    estimates; of 60 legal configs, from the `first` on."""
    found = []
    for number in range(count):
        problem = layer(number)
        rows = np.flatnonzero(all_families()[family].legal(problem, device))[first:][:60]
        ms = 1e3 * times * all_families()[family].estimate_s(problem, device, rows)
        names = (f"net{number % 8}",)
        found.append(Timings(problem, names, family, rows, ms, np.zeros(len(rows)), device))
    return found


def dataset(device: Device, measured: list[Timings], others: tuple[Dataset, ...] = ()) -> Dataset:
    families = {name: all_families()[name] for name in {t.family for t in measured}}
    kernels = {n: (source_digest(first_kernel(f).file),) for n, f in families.items()}
    return Dataset(device, CONVOLUTION, tuple(measured), {}, {}, 0, kernels, {}, others)


def test_a_family_is_taken_over_where_what_it_competes_with_is_known(tmp_path) -> None:
    slow, fast = timings("grouped_fprop", H100, 50.0), timings("depthwise_fprop", H200, 1.0)
    elsewhere = dataset(H200, [*timings("grouped_fprop", H200, 50.0), *fast])
    train(dataset(H100, slow, (elsewhere,)), tmp_path / "model", hyper=SMALL)
    card = json.loads((tmp_path / "model" / "card.json").read_text())
    assert {name: entry["devices"] for name, entry in card["families"].items()} == {
        "depthwise_fprop": ["h200"],
        "grouped_fprop": ["h100", "h200"],
    }
    assert card["gate"]["families"] == ["depthwise_fprop", "grouped_fprop"]
    first = Predictor({"h100": load_model(tmp_path / "model")}).choose(layer(100), "h100")
    assert first.candidate.provider == "depthwise_fprop"
    assert first.regret_bound is None, "nothing of it was measured here"


def test_a_family_that_was_measured_for_other_problems_alone_is_not_taken_over() -> None:
    here = timings("grouped_fprop", H100, 1.0, count=20)
    there = timings("depthwise_fprop", H200, 1.0)
    names = [
        {family.name for f in fit_families(found, H100, SMALL, 0) for family in f.pool.families}
        for found in ([*here, *there], [*here, *there[20:]])
    ]
    assert names == [{"depthwise_fprop", "grouped_fprop"}, {"grouped_fprop"}]
    with pytest.raises(DataError, match="no measurements"):
        fit_families(there, H100, SMALL, 0)


def test_a_network_of_another_device_alone_can_be_left_out(both, tmp_path, monkeypatch) -> None:
    own = tuple(t for t in both.timings if "net6" not in t.networks)
    assert "net6" in names_of(both.others[0].timings)
    given: list[Dataset] = []
    # Training begins, which takes long, and its data are seen.
    monkeypatch.setattr(
        "confpred.training.train.cross_validate", lambda data, *_: given.append(data) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train(replace(both, timings=own), tmp_path / "model", exclude=["net6"], hyper=SMALL)
    assert "net6" not in names_of(given[0].everywhere)


def names_of(measured: Iterable[Timings]) -> set[str]:
    return {name for t in measured for name in t.networks}


@pytest.mark.parametrize("shared", [True, False])
def test_a_family_that_one_network_has_here_is_judged_where_it_can_be_learned(shared) -> None:
    """It can, from another device, where that measured some of the problems of here."""
    own = [*timings("grouped_fprop", H100, 2.0), *timings("depthwise_fprop", H100, 1.0)[:1]]
    there = timings("depthwise_fprop", H200, 1.0)
    if not shared:
        there = [replace(t, problem=replace(t.problem, h=27, w=27)) for t in there]
    data = dataset(H100, own, (dataset(H200, there),))
    folds = folds_of(data, 4, 0)
    judged = [t for fold in folds for t in fold.test]
    assert sum(t.family == "depthwise_fprop" for t in judged) == shared
    scores, missing = judge_baselines(folds, H100, 0)
    assert {len(of_method) for of_method in scores.values()} == {len(judged)}
    assert len(cross_validate(data, folds, SMALL, 0)[0]) == len(judged)
    assert not missing


def test_margins_learn_from_what_other_devices_were_held_out_of(both: Dataset) -> None:
    """Scores of each fold's problems on other devices, which the fold has not learned from."""
    (other,) = both.others
    for fold in folds_of(both, 3, 0):
        learned = {t.problem for t in fold.train if t.device == H200}
        held_out = {t.problem for t in other.timings} - learned
        assert {t.problem for t in fold.elsewhere} == held_out
        assert {t.device for t in fold.elsewhere} == {H200}
        assert min(len(learned), len(held_out)) > 0
    alone = replace(both, others=())
    margins = [
        cross_validate(data, folds_of(data, 3, 0), SMALL, 0)[1].margins for data in (alone, both)
    ]
    assert margins[0] != margins[1]
