"""Retraining on measurements of others, some of which are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from click.testing import CliRunner

from confpred.cli import cli
from confpred.data.measurements import problem_of_row
from confpred.data.parquet import schema
from confpred.data.remote import folder_at
from confpred.errors import DataError, InvalidInput
from confpred.families.protocol import PYTORCH
from confpred.model.folder import Model, load_model
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import CONVOLUTION, Problem
from confpred.retraining.admission import trusted
from confpred.retraining.exchanged import measurements_at, pairs, retrain_from
from confpred.retraining.offers import is_held_out
from confpred.training.dataset import read_dataset
from confpred.training.train import train

NETWORKS, CONFIGS = 20, 40
#: The loss of a choice that is no fault of wrong rows: the noise of times, and that between trees.
NOISE = 1.05
Row = dict[str, object]


def written(rows: list[Row], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema(CONVOLUTION)), path)
    return path


def some(rows: list[Row], share: float) -> np.ndarray:
    """Return the numbers of a random share of the timed rows."""
    timed = np.flatnonzero([row["status"] == "ok" for row in rows])
    return np.random.default_rng(0).permutation(timed)[: int(share * len(timed))]


def halved(rows: list[Row]) -> None:
    for number in some(rows, 0.05):
        rows[number]["time_ms"] = float(str(rows[number]["time_ms"])) / 2


def swapped(rows: list[Row]) -> None:
    chosen = some(rows, 0.05)
    for one, other in zip(chosen[::2], chosen[1::2], strict=False):
        first, second = rows[one]["time_ms"], rows[other]["time_ms"]
        rows[one]["time_ms"], rows[other]["time_ms"] = second, first


def one_lying_host(rows: list[Row]) -> None:
    """All times of a twentieth of the problems are made up by the host that measured them."""
    rng = np.random.default_rng(0)
    problems = sorted({str(problem_of_row(row, Problem)) for row in rows})
    lies = set(rng.permutation(problems)[: len(problems) // 20])
    for row in rows:
        if row["status"] == "ok" and str(problem_of_row(row, Problem)) in lies:
            row["time_ms"] = float(str(row["time_ms"])) * float(np.exp(rng.normal(-0.5, 0.5)))


ATTACKS = {"halved": halved, "swapped": swapped, "one lying host": one_lying_host}


def true_ms(model: Model, rows: list[Row]) -> dict[Problem, float]:
    """Return what the choice of a model takes in truth, for each problem of `rows`."""
    theirs = {problem_of_row(r, Problem): r["time_ms"] for r in rows if r["family"] == PYTORCH}
    predictor, found = Predictor({"h100": model}), {}
    for problem in theirs:
        choice = predictor.choose(problem, "h100").candidate
        ids = np.array([choice.config_id], np.intp)
        is_theirs = choice.provider == PYTORCH
        found[problem] = theirs[problem] if is_theirs else synthetic.true_ms(problem, ids)[0]
    return {problem: float(str(ms)) for problem, ms in found.items()}


@pytest.fixture(scope="module")
def honest() -> list[Row]:
    return list(synthetic.rows(NETWORKS, CONFIGS))


@pytest.fixture(scope="module")
def in_use(honest: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model of a third of the networks."""
    folder = tmp_path_factory.mktemp("in-use")
    few = [
        r for r in honest if any(f"net{3 * i}" in str(r["networks"]).split(",") for i in range(7))
    ]
    written(few, folder / "rows" / "few.parquet")
    train(read_dataset([folder / "rows"]), folder / "old", hyper=synthetic.SMALL)
    return load_model(folder / "old")


@pytest.mark.slow(reason="five models are trained")
@pytest.mark.timeout(1200)
def test_wrong_rows_make_no_choice_worse_by_more_than_the_noise(
    honest: list[Row], in_use: Model, tmp_path: Path
) -> None:
    before = true_ms(in_use, honest)

    def after(name: str, rows: list[Row]) -> dict[Problem, float]:
        data = written(rows, tmp_path / name / "rows.parquet").parent
        models, out = {"h100": in_use}, tmp_path / f"{name}-model"
        retrain_from([data], models, out, hyper=synthetic.SMALL)
        return true_ms(load_model(out), honest)  # though it may not be published

    clean = after("clean", [dict(row) for row in honest])
    for name, attack in ATTACKS.items():
        rows = [dict(row) for row in honest]
        attack(rows)
        made = after(name, rows)
        worse = {p: made[p] / max(before[p], clean[p]) for p in made}
        assert max(worse.values()) <= NOISE, (name, max(worse, key=lambda p: worse[p]))
        logs = np.log([made[p] / clean[p] for p in made])
        assert np.exp(logs.mean()) < 1.01, name


def test_times_far_from_what_is_expected_are_left_out(
    measurements: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = load_model(model_folder)
    data = read_dataset([measurements])
    _, honestly = trusted(data, model)
    assert honestly < 0.02 * data.rows
    rows = pq.read_table(measurements).to_pylist()
    halved(rows)
    wrong = read_dataset([written(rows, tmp_path / "halved.parquet")])
    kept, left_out = trusted(wrong, model)
    assert left_out > 0.04 * data.rows
    true = {
        (t.problem, int(r)): ms
        for t in data.timings
        for r, ms in zip(t.rows, t.time_ms, strict=True)
    }
    ratios = [
        ms / true[t.problem, int(row)]
        for t in kept.timings
        for row, ms in zip(t.rows, t.time_ms, strict=True)
    ]
    assert np.mean(np.array(ratios) < 0.9) < 0.005  # of 5 %


def test_a_model_is_judged_by_networks_that_are_held_out(
    measurements: Path, model_folder: Path, tmp_path: Path
) -> None:
    model, data = load_model(model_folder), read_dataset([measurements])
    found = list(pairs(data, model, model))
    assert {pair.network for pair in found} == {"net7"}
    assert is_held_out(["net7"])
    assert all(pair.old_ms == pair.new_ms for pair in found)
    against_pytorch = list(pairs(data, None, model))
    assert any(pair.new_ms < 0.5 * pair.old_ms for pair in against_pytorch)


def test_data_that_cannot_be_judged_is_refused(
    few_measurements: Path, tmp_path: Path, repository: Path
) -> None:
    with pytest.raises(DataError, match=r"of 3 networks 0 are held out by their names"):
        retrain_from([few_measurements], {}, tmp_path / "model")
    chains = next((repository / "datasets" / "chains" / "h100").glob("*.parquet"))
    with pytest.raises(DataError, match=r"of 3 networks 0"):  # others' rows are passed over
        retrain_from([chains, few_measurements], {}, tmp_path / "model")
    with pytest.raises(DataError, match="no file has measurements of conv2d"):
        retrain_from([chains], {}, tmp_path / "model")
    with (
        pytest.raises(InvalidInput, match="a folder or its URL, or the address of a service"),
        measurements_at(str(tmp_path / "none")),
    ):
        pass


def test_measurements_are_of_a_folder_or_a_url(few_measurements: Path, tmp_path: Path) -> None:
    own = few_measurements.parent
    for source in (str(own), own.as_uri()):
        with measurements_at(source) as folder:
            assert folder == own
    store = folder_at(f"memory://{tmp_path.name}/runs")
    with (
        pytest.raises(DataError, match=f"{store} has no measurements"),
        measurements_at(str(store)),
    ):
        pass
    (store / "rows-a-00000.parquet").write_bytes(few_measurements.read_bytes())
    with measurements_at(str(store)) as folder:
        assert read_dataset([folder]).digest == read_dataset([own]).digest
    assert not folder.exists()
    done = CliRunner().invoke(cli, ["retrain", "--from", str(store)])
    assert "networks 0 are held out by their names" in str(done.exception)
    done = CliRunner().invoke(cli, ["retrain", "--from", "moon://runs"])
    assert "folder='moon://runs' is not allowed; allowed: a folder, or a URL" in str(done.exception)
