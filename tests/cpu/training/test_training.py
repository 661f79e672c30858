"""Training writes a whole, reproducible model folder, or nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from command_line import worked
from joblib.externals.loky import get_reusable_executor
from shared import room_for
from synthetic import SMALL

from confpred.errors import DataError, InvalidInput, StorageError
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR
from confpred.families.registry import all_families
from confpred.model.folder import load_model
from confpred.model.trees import Trees
from confpred.problem.conv2d import Problem
from confpred.training.cross_validate import part_of
from confpred.training.dataset import read_dataset
from confpred.training.fit import fit_families, grow_order
from confpred.training.train import train


def card_of(folder: Path) -> dict:
    return json.loads((folder / "card.json").read_text())


def test_the_same_data_and_seed_give_the_same_model(measurements, model_folder, tmp_path):
    dataset = read_dataset([measurements])
    train(dataset, tmp_path / "again", exclude=["net0"], hyper=SMALL)
    names = sorted(path.name for path in model_folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert names == [
        "bound.txt",
        "card.json",
        "grouped_fprop.order.txt",
        "grouped_fprop.registers.json",
        "grouped_fprop.time.txt",
        "measured.json",
        "pytorch.txt",
    ]
    for name in set(names) - {"card.json"}:
        assert (tmp_path / "again" / name).read_bytes() == (model_folder / name).read_bytes()
    first, second = card_of(model_folder), card_of(tmp_path / "again")
    assert first.pop("created") <= second.pop("created")
    assert first == second


def test_a_part_of_the_data_is_learned_from_and_each_step_is_told(measurements, tmp_path):
    dataset, steps = read_dataset([measurements]), []
    part = {"families": ["grouped_fprop"], "problems": 20}
    said = {"hyper": SMALL, "say": lambda *told: steps.append(told)}
    train(dataset, tmp_path / "part", **part, **said)
    found = card_of(tmp_path / "part")["data"]
    assert found["problems"] == 20
    assert found["digest"] == part_of(dataset, seed=0, **part).digest != dataset.digest
    assert steps == [
        *(("cross-validating by network", done, 5) for done in range(6)),
        *(("fitting the model", done, 1) for done in range(2)),
        *(("comparing with PyTorch's operator", done, 1) for done in range(2)),
    ]


def test_the_card_says_what_the_model_is(measurements, model_folder):
    dataset, card = read_dataset([measurements]), card_of(model_folder)
    assert card["device"] == "h100"
    assert card["data"]["excluded_networks"] == ["net0"]
    assert 0 < card["data"]["rows"] < dataset.rows
    assert card["families"]["grouped_fprop"]["source"] == synthetic.SOURCE
    assert card["families"]["grouped_fprop"]["source_digests"] == list(
        dataset.kernels["grouped_fprop"]
    )
    assert card["bounds"]["median"] >= 1
    assert card["data"]["other_devices"] == {}
    assert set(card["libraries"]) == {"confpred", "lightgbm", "numpy", "scikit-learn"}


def test_excluded_layers_are_in_no_part_of_the_model(measurements, model_folder):
    timings, model = read_dataset([measurements]).timings, load_model(model_folder)
    hidden = {t.problem.layer() for t in timings if "net0" in t.networks}
    assert hidden
    assert not hidden & {Problem.parse(words).layer() for words in model.measured}


def test_measured_configs_are_the_fastest(measurements, model_folder):
    model = load_model(model_folder)
    dataset = read_dataset([measurements])
    by_problem = {t.problem: t for t in dataset.timings}
    providers = {best.candidate.provider for best in model.measured.values()}
    assert providers == {PYTORCH, "grouped_fprop"}
    for words, best in model.measured.items():
        problem = Problem.parse(words)
        ours, theirs = by_problem[problem].time_ms.min(), dataset.pytorch_ms[problem]
        assert best.time_ms == min(ours, theirs)
        if best.candidate != PYTORCH_OPERATOR:
            found = by_problem[problem].rows[by_problem[problem].time_ms.argmin()]
            assert best.candidate.config_id == found


def test_problems_with_few_configs_measured_do_not_count_as_measured(tmp_path):
    data = synthetic.write(tmp_path / "few.parquet", networks=3, configs=10)
    train(read_dataset([data]), tmp_path / "model", hyper=SMALL)
    for words in load_model(tmp_path / "model").measured:
        problem = Problem.parse(words)
        assert all_families()["grouped_fprop"].legal(problem, synthetic.DEVICE).sum() <= 10


def test_what_the_configs_of_a_problem_have_in_common_is_not_learned(measurements):
    """The best config of a problem may not have been measured; then the others' regrets are all too
    small by one factor, which says nothing of any of them."""
    timings = read_dataset([measurements]).timings
    number = np.repeat(np.arange(len(timings)), [len(t.rows) for t in timings])
    column = np.concatenate([t.rows for t in timings]) % 7

    def spread(*columns) -> float:
        matrix = np.stack(columns, axis=1).astype(np.float32)
        names = [f"column_{i}" for i in range(len(columns))]
        hyper = replace(SMALL, min_data_in_leaf=1)
        found = Trees(grow_order(matrix, names, timings, hyper, 0)).predict(matrix)
        return float(np.ptp(found))

    assert spread(number) == pytest.approx(0.0, abs=1e-3)
    assert spread(number, column) > 0.1


def test_how_hopeless_a_config_is_does_not_change_the_order(measurements):
    timings = read_dataset([measurements]).timings

    def slowed(times: int) -> str:
        some = [
            replace(t, time_ms=np.where(t.time_ms > np.median(t.time_ms), times, 1) * t.time_ms)
            for t in timings
        ]
        (fitted,) = fit_families(some, synthetic.DEVICE, replace(SMALL, focus=0.0), 0)
        return fitted.order

    assert slowed(100) == slowed(10_000)
    assert slowed(100) != slowed(2)  # which is not hopeless


def test_the_seed_changes_the_split_and_so_the_bound(measurements, model_folder, tmp_path):
    train(read_dataset([measurements]), tmp_path / "model", seed=1, hyper=SMALL)
    assert card_of(tmp_path / "model")["seed"] == 1
    first, second = card_of(tmp_path / "model"), card_of(model_folder)
    assert first["bounds"]["offsets"] != second["bounds"]["offsets"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ["depthwise_fprop"]}, "allowed: grouped_fprop$"),
        ({"exclude": ["net1O"]}, "exclude-network='net1O' is not allowed; allowed: net1 or net"),
        ({"out": "."}, "does not exist yet"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(measurements, tmp_path, options, message):
    data, out = read_dataset([measurements]), tmp_path / options.pop("out", "model")
    with pytest.raises(InvalidInput, match=message):
        train(data, out, hyper=SMALL, **options)
    assert list(tmp_path.iterdir()) == []


def test_data_of_one_network_is_refused(tmp_path):
    data = synthetic.write(tmp_path / "one.parquet", networks=1)
    with pytest.raises(DataError, match="at least 2 networks; found 1"):
        train(read_dataset([data]), tmp_path / "model", hyper=SMALL)


@pytest.mark.parametrize(
    ("limit", "what"),
    [(0, "what processes share"), (100, "{out}"), (5_000, "{out}")],
)
@pytest.mark.slow(reason="models are trained by new processes")
def test_a_refused_write_leaves_nothing_behind(measurements, tmp_path, limit, what):
    out = tmp_path / "models" / "full"
    refused = f"^cannot write {what.format(out=out)}: File too large"
    get_reusable_executor().shutdown(wait=True)  # helpers of other tests share what they need
    with room_for(limit), pytest.raises(StorageError, match=refused):
        train(read_dataset([measurements]), out, hyper=SMALL)
    assert [path for path in tmp_path.rglob("*") if path.name != "models"] == []


@pytest.mark.slow(reason="a model is trained as users do")
def test_command_trains_a_model_that_predicts(few_measurements, tmp_path):
    out = tmp_path / "models" / "mine"
    done = worked("train", few_measurements, "--out", out)
    assert f"p95 {load_model(out).card.metrics['regret']['p95']:.3f}" in done.stdout
