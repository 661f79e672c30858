"""The whole of `confpred retrain`, but for the GPU: real processes, files, training and judging."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import recorded_jobs
from synthetic import SMALL, problems

from confpred.cli.retrain import NOT_BETTER, retrain_and_report, told
from confpred.data.measurements import Run
from confpred.data.suites import Entry, Suite
from confpred.errors import DataError, UnknownDevice
from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.model.folder import load_model
from confpred.predict.predictor import Predictor
from confpred.problem import boards
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.retraining.judging import Pair
from confpred.retraining.offers import to_judge_by, to_learn_from
from confpred.retraining.retrain import Request, check_suite, pairs_of, retrain
from confpred.sampler.run import Settings

SUITE = Suite("made-up", tuple(Entry(p, names) for p, names in problems(networks=60)))
#: A GPU that is in no table.
BOARD = replace(get_device("h100"), key="test-board", product="NVIDIA Test Board")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders of the user's models and caches; the board is described."""
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path / "cache"))
    boards.remember("580.1", asdict(BOARD))
    return tmp_path


def request_of(folder: Path, device: Device = BOARD, **changes) -> Request:
    settings = Settings(processes=2, compile=recorded_jobs.COMPILE, measure=recorded_jobs.MEASURE)
    run = Run(os.urandom(4).hex(), device.key, device.product, "580.1", "13.0", "test")
    made = Request(device, {0: run}, SUITE, 60.0, (), folder / "session", settings, SMALL)
    return replace(made, **changes)


def session(folder: Path) -> dict:
    return json.loads((folder / "session" / "session.json").read_text())


def test_the_first_model_of_a_board_is_published_and_answers(places: Path, capsys) -> None:
    layer = to_judge_by(SUITE)[0].problem
    before = Predictor.load().choose(layer, BOARD)
    assert (before.source, before.is_guess) == ("transferred", True)
    assert retrain_and_report(request_of(places)) == 0

    (folder,) = (places / "models").iterdir()
    said = capsys.readouterr()
    assert f"in use from now on: {folder}" in said.out
    assert "against PyTorch's operator" in said.out
    choice = Predictor.load().choose(layer, "test-board")
    assert (choice.source, choice.model, choice.is_guess) == ("predicted", folder.name, False)
    card = load_model(folder).card
    assert card["measured_with"] == {"driver": ["580.1"], "cudnn": ["9.19.0"]}
    held_out = {name for entry in to_judge_by(SUITE) for name in entry.networks}
    assert set(card["data"]["excluded_networks"]) <= held_out
    assert session(places)["done"]
    assert not list((places / "session").glob("model-*"))
    assert not list(places.rglob("*.tmp"))

    # Another machine has not asked the driver; the model brings the description along.
    (places / "cache" / "devices" / "test-board.json").unlink()
    assert Predictor.load().choose(layer, "test-board") == choice
    with pytest.raises(UnknownDevice):
        Predictor.load().choose(layer, "another-board")


def test_a_model_that_is_no_better_is_not_published_and_the_old_one_stays(
    places: Path, capsys
) -> None:
    assert retrain_and_report(request_of(places)) == 0
    (first,) = (places / "models").iterdir()
    capsys.readouterr()
    # What is left to measure is little, and says nothing new.
    assert retrain_and_report(request_of(places, budget_s=2.0)) in (0, NOT_BETTER)
    second = session(places)
    assert (second["number"], second["old"]) == (2, load_model(first).digest)
    assert first.exists()  # whatever came of it


def test_the_verdict_is_told_with_its_reason(places: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RECORDED", json.dumps({"fail": "pytorch"}))  # nothing to compare with
    assert retrain_and_report(request_of(places)) == NOT_BETTER
    out = capsys.readouterr().out
    assert "not published: against PyTorch's operator, too little was compared" in out
    assert "PyTorch's operator stays in use" in out
    assert not (places / "models").exists()
    assert Predictor.load().choose(to_judge_by(SUITE)[0].problem, BOARD).source == "transferred"


def test_a_run_that_is_stopped_goes_on_where_it_was(places: Path) -> None:
    shown: list[int] = []
    stopped = retrain(
        request_of(places),
        interrupts=lambda: int(bool(shown) and shown[-1] > 100),
        show=lambda tally: shown.append(tally.rows),
    )
    assert stopped.verdict is stopped.published is None
    assert told(stopped) == []
    first = session(places)
    assert (first["number"], first["done"]) == (1, False)
    assert first["learning_s"] > 0
    shards = {path.name: path.read_bytes() for path in (places / "session/rows").glob("*.parquet")}
    assert shards

    again = retrain(request_of(places))
    assert again.published is not None
    assert session(places)["number"] == 1
    assert session(places)["learning_s"] > first["learning_s"]
    for name, content in shards.items():
        assert (places / "session/rows" / name).read_bytes() == content


def test_a_session_that_has_trained_is_only_judged(places: Path, monkeypatch) -> None:
    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("confpred.retraining.retrain.publish", None)  # dies before it publishes
        with pytest.raises(TypeError):
            retrain(request_of(places))
    assert (places / "session/model-1/card.json").exists()
    assert not (places / "models").exists()
    assert retrain(request_of(places), say=lines.append).published is not None
    assert not any("training" in line for line in lines)


def test_learning_and_judging_share_no_layer() -> None:
    learn = {entry.problem.layer() for entry in to_learn_from(SUITE)}
    judge = {entry.problem.layer() for entry in to_judge_by(SUITE)}
    assert learn
    assert judge
    assert learn.isdisjoint(judge)


def test_a_suite_without_networks_to_judge_by_is_refused() -> None:
    with pytest.raises(DataError, match="one network in ten"):
        check_suite(Suite("few", SUITE.entries[:1]))
    check_suite(SUITE)


def test_equal_choices_count_in_proportion_to_what_was_measured() -> None:
    layers = [Problem(n, 64, 14, 14, 64, 3, 3, padding=1, groups=8) for n in range(1, 9)]
    new, other = Candidate("grouped_fprop", 1), Candidate("grouped_fprop", 2)
    picked = [(Entry(p, (f"net{p.n}",)), PYTORCH_OPERATOR, new) for p in layers[:4]]
    picked += [(Entry(p, (f"net{p.n}",)), other, other) for p in layers[4:]]
    times = {(layers[0], new): 2.0, (layers[0], PYTORCH_OPERATOR): 3.0}
    times |= {(layers[1], new): 2.0, (layers[1], PYTORCH_OPERATOR): 1.0}
    times |= {(layers[2], new): 2.0}  # PyTorch's was not measured
    assert pairs_of(picked, times) == [
        Pair("net1", 3.0, 2.0),
        Pair("net2", 1.0, 2.0),
        Pair("net5", 1.0, 1.0),
        Pair("net6", 1.0, 1.0),
    ]
