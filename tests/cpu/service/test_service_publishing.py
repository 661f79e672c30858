"""A server that makes a model of what it is sent, and hands it on as files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from click.testing import CliRunner, Result
from served import ONE, Server, eventually, running

from confpred.cli import cli
from confpred.client import Client
from confpred.data.parquet import schema
from confpred.problem.conv2d import CONVOLUTION
from confpred.retraining.exchanged import Outcome
from confpred.retraining.retrain import Verdict
from confpred.service import Settings, keeper
from confpred.service.exchange import Exchange, published

DEVICES = ("h100", "h200")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Server]:
    """Run a server that has no model for the H100, and is sent measurements of one."""
    folder = tmp_path_factory.mktemp("publishing")
    (folder / "models").mkdir()
    shutil.copytree(repository / "models" / "h200-2026.11.25", folder / "models" / "h200-1")
    options = ("--model", str(folder / "models"), "--exchange", str(folder / "exchange"))
    with running(folder, *options) as made:
        yield made


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def in_use(server: Server) -> dict[str, str]:
    listed = server.get("/v1/models").json()["models"]
    return {model["device"]: model["digest"] for model in listed if model["in_use"]}


def job(server: Server) -> dict[str, Any]:
    """Ask for a retraining, and return how it ended."""
    number = server.post("/v1/jobs", params={"device": "h100"}).json()["id"]
    found: dict[str, Any] = {}

    def ended() -> bool:
        jobs = server.get("/v1/jobs").json()["jobs"]
        found.update(next(each for each in jobs if each["id"] == number))
        return found["ended"] is not None

    eventually(ended, server.said, within_s=600)
    return found


@pytest.mark.slow(reason="two models are trained, at the system's idle priority")
@pytest.mark.timeout(1500)
def test_a_better_model_is_published_and_rolled_back(server: Server, tmp_path: Path) -> None:
    rows = [
        {**row, "time_ms": 30 * float(str(row["time_ms"])), "spread_ms": 1e-3}
        for row in synthetic.rows(networks=20, configs=40)  # which are faster than a device can be
    ]
    shard = tmp_path / "rows-test-00000.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema(CONVOLUTION)), shard)
    with Client(server.url) as client:
        upload = client.submit(shard).id
        eventually(lambda: client.submission(upload).state != "received", within_s=300)
        assert client.submission(upload).state == "admitted", client.submission(upload)
    assert in_use(server).keys() == {"h200"}
    first = job(server)
    assert first["state"] == "published", first
    assert "against PyTorch" in first["reason"]
    eventually(lambda: "h100" in in_use(server))
    digest = in_use(server)["h100"]
    answer = server.predict({**ONE, "device": "h100"})
    assert f"h100={digest}" in answer.headers["x-confpred-model"]
    second = job(server)  # of the same rows: no better
    assert second["state"] == "kept", second
    assert in_use(server)["h100"] == digest
    rolled = server.post("/v1/models/rollback").json()
    assert rolled["outcome"] == "rolled_back"
    assert in_use(server).keys() == {"h200"}
    assert server.post("/v1/models/reload").json()["outcome"] == "unchanged"


@pytest.fixture
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this user's models, with caches of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


def test_a_pull_goes_on_and_is_whole_or_not_at_all(
    server: Server, models_folder: Path, tmp_path: Path
) -> None:
    digest = in_use(server)["h200"]
    source = Path(server.log.parent / "models" / "h200-1")
    pulls = tmp_path / "cache" / "confpred" / "pulls" / digest
    pulls.mkdir(parents=True)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    name = max(files, key=lambda each: len(files[each]))
    (pulls / f"{name}.part").write_bytes(files[name][:1000])  # where it was cut off
    (pulls / "card.json").write_bytes(b"{}")  # damaged
    done = run("models", "pull", "--url", server.url, "--device", "h200")
    assert done.exit_code == 0, done.output
    (made,) = models_folder.iterdir()
    assert {path.name: path.read_bytes() for path in made.iterdir()} == files
    assert f'{digest}/{name} HTTP/1.1" 206' in server.said()
    assert not pulls.exists()
    assert run("models", "pull", "--url", server.url, "--digest", digest[:12]).exit_code == 0
    assert len([*models_folder.iterdir()]) == 1
    listed = json.loads(run("models", "list", "--json").output)
    assert "linear_chain" in {m["operation"] for m in listed}
    assert [m["name"] for m in listed if m["in_use"] and m["digest"] == digest]
    assert digest[:12] in run("models", "list", "--url", server.url).output
    verified = run("models", "verify", "--url", server.url)
    assert verified.exit_code == 0, verified.output
    (made / name).write_bytes(files[name][:-1])
    assert "damaged" in run("models", "verify").output
    assert run("models", "verify").exit_code == 1


def test_a_pull_of_other_bytes_puts_nothing_there(
    server: Server, models_folder: Path, tmp_path: Path
) -> None:
    digest = in_use(server)["h200"]
    pulls = tmp_path / "cache" / "confpred" / "pulls" / digest
    pulls.mkdir(parents=True)
    (pulls / "card.json.part").write_bytes(b"x" * 1000)  # the beginning of another file
    done = run("models", "pull", "--url", server.url, "--device", "h200")
    assert done.exit_code == 1
    assert "is damaged" in str(done.exception)
    assert not models_folder.exists()
    assert run("models", "pull", "--url", server.url, "--device", "h200").exit_code == 0
    for words in (["--device", "h900"], ["--digest", "00000000"], []):
        assert run("models", "pull", "--url", server.url, *words).exit_code != 0
    for path in (f"{digest}/../x", f"{'0' * 64}/card.json", f"{digest}/models"):
        assert server.get(f"/v1/models/{path}").status_code == 404


def test_a_rollback_withdraws_what_was_published(server: Server, repository: Path) -> None:
    """Models are put where a job would publish them."""
    published = server.log.parent / "exchange" / "models"
    shipped = repository / "models" / "h100-2026.11.25"
    digests = []
    for year in (2031, 2032):
        away = published.with_name("copying")
        shutil.copytree(shipped, away)
        card = json.loads((away / "card.json").read_text()) | {"created": f"{year}-01-01"}
        (away / "card.json").write_text(json.dumps(card))
        away.rename(published / f"h100-{year}")
        digests.append(sha256((published / f"h100-{year}" / "card.json").read_bytes()).hexdigest())
        assert server.post("/v1/models/reload").json()["outcome"] == "reloaded"
        assert in_use(server)["h100"] == digests[-1]
    listed = {m["digest"]: m["in_use"] for m in server.get("/v1/models").json()["models"]}
    assert [listed[digest] for digest in digests] == [False, True]
    beside = server.get(f"/v1/models/{digests[0]}/card.json")
    assert sha256(beside.content).hexdigest() == digests[0]
    assert server.post("/v1/models/rollback").json()["outcome"] == "rolled_back"
    assert in_use(server)["h100"] == digests[0]
    assert server.post("/v1/models/reload").json()["outcome"] == "unchanged"
    assert [path.name for path in published.iterdir()] == ["h100-2031"]
    assert server.post("/v1/models/rollback").json()["outcome"] == "rolled_back"
    assert "h100" not in in_use(server)
    assert not [*published.iterdir()]
    assert server.post("/v1/models/rollback").status_code == 409


@pytest.mark.slow(reason="eight models are copied and loaded, and a server starts")
def test_the_last_five_models_are_kept_and_can_be_rolled_back_to(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of shipped models take the place of trained ones; all else is real."""
    shipped = {device: [*(repository / "models").glob(f"{device}-*")][-1] for device in DEVICES}
    years = iter(range(2031, 2050))

    def trained(data: object, models: object, out: Path, *, device: str, say: object) -> Outcome:
        shutil.copytree(shipped[device], out)
        card = json.loads((out / "card.json").read_text()) | {"created": f"{next(years)}-01-01"}
        (out / "card.json").write_text(json.dumps(card))
        return Outcome(device, Verdict(True, "made up", 10, 3), None, 0)

    monkeypatch.setattr(keeper, "retrain_from", trained)
    shutil.copytree(shipped["h200"], tmp_path / "models" / "h200-1")
    settings = Settings(model=str(tmp_path / "models"), exchange=str(tmp_path / "exchange"))
    exchange = Exchange(tmp_path / "exchange")
    for device in ("h200", *["h100"] * 7):
        keeper.retrain(settings, exchange, exchange.add_job(device).id, device)
    assert {job.state for job in exchange.jobs()} == {"published"}
    kept = [(known.card.device, known.card.created[:4]) for _, known in published(exchange.folder)]
    assert kept == [*(("h100", str(year)) for year in range(2038, 2033, -1)), ("h200", "2031")]
    digests = [known.digest for _, known in published(exchange.folder)]
    options = ("--model", str(settings.model), "--exchange", str(settings.exchange))
    with running(tmp_path, *options) as server:
        for digest, former in pairwise(digests[:5]):
            assert in_use(server) == {"h100": digest, "h200": digests[5]}
            assert server.post("/v1/models/rollback").json()["outcome"] == "rolled_back"
            assert in_use(server) == {"h100": former, "h200": digests[5]}
    assert len([*(exchange.folder / "withdrawn").iterdir()]) == 4
