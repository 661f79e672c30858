"""The whole of `confpred retrain`, but for the GPU: real processes, files, training and judging."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import made_up_kernel
import pytest
import recorded_jobs
import synthetic
from synthetic import SMALL, problems

from confpred.cli.update import NOT_BETTER, retrain_and_report, verdict_lines
from confpred.data.measurements import Measurement, Run, problem_of_row
from confpred.data.parquet import write_rows
from confpred.data.suites import Entry, Suite, suite_of_calls
from confpred.errors import DataError, InvalidInput, UnknownDevice
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.measure.timing import Outcome
from confpred.model.folder import NewestModels, load_model
from confpred.predict.predictor import Predictor
from confpred.problem import device as devices
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.problem.device import Device, get_device
from confpred.retraining import offers
from confpred.retraining.offers import to_judge_by, to_learn_from
from confpred.retraining.retrain import (
    Pair,
    Request,
    RetrainingReport,
    Session,
    check_suite,
    compare,
    pairs_of,
    retrain,
    save,
)
from confpred.sampler.run import Sampling
from confpred.sampler.store import measured_in
from confpred.training.cross_validate import without_networks

SUITE = Suite("made-up", tuple(Entry(p, names) for p, names in problems(networks=24)))
#: A GPU that is in no table.
BOARD = replace(get_device("h100"), key="test-board", product="NVIDIA Test Board")


def use(places: Path, patch: pytest.MonkeyPatch) -> None:
    """The user's models and caches in `places`; the board is described."""
    patch.setenv("CONFPRED_MODELS_DIR", str(places / "models"))
    patch.setenv("CONFPRED_CACHE_DIR", str(places / "cache"))
    patch.setattr(offers, "PICKED", 7)  # fewer configs a problem
    patch.setattr(offers, "RANDOM", 7)  # fewer configs a problem
    devices.remember("580.1", asdict(BOARD))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders."""
    use(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folders after a first session, which published a model."""
    places = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        use(places, patch)
        assert retrain(request_of(places)).published is not None
    return places


@pytest.fixture
def published(first: Path, places: Path) -> Path:
    """Return a copy of those."""
    return Path(shutil.copytree(first, places, dirs_exist_ok=True))


def request_of(folder: Path, device: Device = BOARD, **changes) -> Request:
    settings = Sampling(processes=1, compile=recorded_jobs.COMPILE, measure=recorded_jobs.MEASURE)
    run = Run(os.urandom(4).hex(), device.key, device.product, "580.1", "13.0", "test")
    made = Request(device, {0: run}, SUITE, 3600.0, (), folder / "session", settings, SMALL)
    return replace(made, **changes)


def session(folder: Path) -> dict:
    return json.loads((folder / "session" / "session.json").read_text())


def test_the_first_model_of_a_board_answers(published: Path) -> None:
    layer = to_judge_by(SUITE)[0].problem
    (folder,) = (published / "models").iterdir()
    choice = Predictor.load().choose(layer, "test-board")
    assert (choice.source, choice.model, choice.is_guess) == ("predicted", folder.name, False)
    card = load_model(folder).card
    assert card.measured_with == {"driver": ["580.1"], "cudnn": ["9.19.0"]}
    assert session(published)["done"]
    assert not list((published / "session").glob("model-*"))
    assert not list(published.rglob("*.tmp"))

    # Another machine has not asked the driver; the model brings the description along.
    (published / "cache" / "devices" / "test-board.json").unlink()
    assert Predictor.load().choose(layer, "test-board") == choice
    with pytest.raises(UnknownDevice):
        Predictor.load().choose(layer, "another-board")


def test_a_model_of_the_user_that_cannot_be_used_gives_way(
    published: Path, repository: Path, caplog
) -> None:
    """As after an upgrade that computes other features: the shipped model answers."""
    (own,) = (published / "models").iterdir()
    (shipped,) = (repository / "models").glob("h100-*")
    shutil.copytree(shipped, published / "models" / "h100-mine")
    assert NewestModels()["h100"].version == "h100-mine"
    (published / "models" / "h100-mine" / "measured.json").write_text("[]")
    assert NewestModels()["h100"].version == shipped.name
    assert "measured.json is damaged" in caplog.text
    assert NewestModels()["test-board"].version == own.name
    (own / "card.json").write_text("{")
    models = NewestModels()
    assert set(models) == {"h100", "h200"}
    assert models["h100"].version == shipped.name


@pytest.mark.slow(reason="a second session measures and trains")
def test_a_model_that_is_no_better_is_not_published_and_the_old_one_stays(
    published: Path, capsys
) -> None:
    (first,) = (published / "models").iterdir()
    stumps = replace(SMALL, trees=1, num_leaves=2, focus=0.0)  # it cannot learn much
    assert retrain_and_report(request_of(published, hyper=stumps)) == NOT_BETTER
    told = session(published)
    assert (told["number"], told["old"], told["done"]) == (2, load_model(first).digest, True)
    assert list((published / "models").iterdir()) == [first]
    assert not list((published / "session").glob("model-*"))
    out = capsys.readouterr().out
    assert f"not published: against model {first.name}, its choices are no faster" in out
    assert f"model {first.name} stays in use" in out


def test_the_verdict_is_told_with_its_reason(tmp_path: Path) -> None:
    none, better = compare([]), replace(compare([]), better=True, why="it is faster")
    assert verdict_lines(RetrainingReport(none, None, None)) == [
        f"not published: against PyTorch's operator, {none.why}",
        "PyTorch's operator stays in use",
    ]
    assert verdict_lines(RetrainingReport(better, tmp_path, "h100-1")) == [
        "published: against model h100-1, it is faster",
        f"in use from now on: {tmp_path}",
    ]


@pytest.mark.slow(reason="three sessions measure and train")
def test_a_run_that_is_stopped_goes_on_where_it_was(places: Path, monkeypatch, capsys) -> None:
    shown: list[int] = []
    stopped = retrain(
        request_of(places),
        interrupts=lambda: int(bool(shown) and shown[-1] > 100),
        show=lambda tally: shown.append(tally.rows),
    )
    assert stopped.verdict is stopped.published is None
    assert verdict_lines(stopped) == []
    first = session(places)
    assert (first["number"], first["done"]) == (1, False)
    assert first["learning_s"] > 0
    shards = {path.name: path.read_bytes() for path in (places / "session/rows").glob("*.parquet")}
    assert shards

    # This time it dies when all but the last step is done.
    with monkeypatch.context() as patch:
        # The process dies at its last step.
        patch.setattr("confpred.retraining.retrain.publish", None)
        with pytest.raises(TypeError):
            retrain(request_of(places))
    assert (places / "session/model-1/card.json").exists()
    assert not (places / "models").exists()

    assert retrain_and_report(request_of(places)) == 0
    said = capsys.readouterr()
    (folder,) = (places / "models").iterdir()
    assert f"in use from now on: {folder}" in said.out
    assert "against PyTorch's operator, its choices take" in said.out
    assert "training" not in said.err
    assert session(places)["number"] == 1
    assert session(places)["learning_s"] > first["learning_s"]
    for name, content in shards.items():
        assert (places / "session/rows" / name).read_bytes() == content


def test_learning_and_judging_share_no_layer() -> None:
    learn = {entry.problem.layer() for entry in to_learn_from(SUITE)}
    judge = {entry.problem.layer() for entry in to_judge_by(SUITE)}
    assert learn
    assert judge
    assert learn.isdisjoint(judge)


def test_what_tuning_measured_is_learned_from_and_not_measured_again(
    published: Path, monkeypatch
) -> None:
    """Its layers have no network; those to judge by are left out all the same."""
    kept, folder = published / "session/rows", published / "again"
    judged, run = to_judge_by(SUITE)[0].problem, next(iter(request_of(folder).runs.values()))
    outcome = Outcome(0, "ok", 1.0, 0.1, 3)
    row = Measurement(judged, (), "grouped_fprop", "digest", run, outcome, "now").to_row()
    write_rows([row], CONVOLUTION, kept / "rows-judged.parquet")
    before = measured_in(kept, CONVOLUTION, BOARD.key)
    given = []
    # Training begins, which takes long, and its data are seen.
    monkeypatch.setattr(
        "confpred.retraining.retrain.train",
        lambda dataset, *_, **__: given.append(dataset) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        retrain(request_of(folder, kept=(kept,), budget_s=6.0))
    new = measured_in(folder / "session/rows", CONVOLUTION, BOARD.key)
    assert not any(
        new[key] & before[key] for key in new.keys() & before.keys() if key.provider != "pytorch"
    )
    learned = {t.problem for t in given[0].timings}
    assert judged not in learned
    assert {key.problem for key in before} - learned == {judged}


def test_no_layer_to_judge_by_is_learned_from_under_another_device_or_name(
    places: Path, monkeypatch
) -> None:
    own, other, judged = places / "own", places / "other", to_judge_by(SUITE)[0].problem
    rows = list(synthetic.rows(networks=24, configs=2))
    write_rows(rows, CONVOLUTION, other / "rows-h100.parquet")
    alone = synthetic.row_of(judged, ("another",), Candidate("grouped_fprop", 0), 1.0)
    learned = {entry.problem for entry in to_learn_from(SUITE)}
    mine = [row for row in rows if problem_of_row(row, Problem) in learned]
    mine = [row | {"device": BOARD.key} for row in [*mine, alone]]
    write_rows(mine, CONVOLUTION, own / "rows.parquet")
    save(places / "session", Session(1, None, learning_s=3600.0))
    given = []
    # Training begins, which takes long, and its data are seen.
    monkeypatch.setattr(
        "confpred.retraining.retrain.train",
        lambda dataset, *_, exclude=(), **__: given.append((dataset, exclude)) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        retrain(request_of(places, kept=(own,), data=(other,)))
    ((dataset, exclude),) = given
    assert dataset.timings
    assert [other.device.key for other in dataset.others] == ["h100"]
    used = {t.problem.layer() for t in without_networks(dataset.everywhere, exclude)}
    assert used.isdisjoint(entry.problem.layer() for entry in to_judge_by(SUITE))


def test_a_suite_without_networks_to_judge_by_is_refused() -> None:
    with pytest.raises(DataError, match="one network in ten"):
        check_suite(Suite("few", SUITE.entries[:1]))
    check_suite(SUITE)
    kernels = suite_of_calls("product", made_up_kernel.calls(30))
    with pytest.raises(InvalidInput, match="of a Triton kernel, sample more into its folder"):
        check_suite(kernels)


def test_equal_choices_count_in_proportion_to_what_was_measured() -> None:
    layers = [Problem(n, 64, 14, 14, 64, 3, 3, padding=1, groups=8) for n in range(1, 9)]
    new, other = Candidate("grouped_fprop", 1), Candidate("grouped_fprop", 2)
    picked = [(Entry(p, (f"net{p.n}",)), PYTORCH_OPERATOR, new) for p in layers[:4]]
    shared = ("net5", "net7")  # one of which is held out
    picked += [(Entry(p, shared), other, other) for p in layers[4:]]
    times = {(layers[0], new): 2.0, (layers[0], PYTORCH_OPERATOR): 3.0}
    times |= {(layers[1], new): 2.0, (layers[1], PYTORCH_OPERATOR): 1.0}
    times |= {(layers[2], new): 2.0}  # PyTorch's was not measured
    assert pairs_of(picked, times) == [
        Pair("net1", 3.0, 2.0),
        Pair("net2", 1.0, 2.0),
        Pair("net7", 1.0, 1.0),
        Pair("net7", 1.0, 1.0),
    ]
