"""A server that makes a model of what it is sent, and hands it on as files."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from click.testing import CliRunner, Result
from layers import H100
from served import ONE, Server, copy_model, eventually, running

import confpred.models
from confpred.cli import cli
from confpred.client import Client, transfer
from confpred.data.parquet import schema
from confpred.errors import InvalidInput, ModelError
from confpred.problem.conv2d import CONVOLUTION
from confpred.retraining import exchanged
from confpred.retraining.exchanged import Retrained
from confpred.retraining.retrain import Verdict
from confpred.service import Settings, keeper
from confpred.service.exchange import Exchange
from confpred.service.generations import publish, published

#: Entries of a model's card that make it one of another device.
BOARD = {"device": "board", "board": asdict(replace(H100, key="board"))}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server that has no model for the H100, and is sent measurements of one."""
    folder = tmp_path_factory.mktemp("publishing")
    copy_model(model_folder, folder / "models" / "board-1", **BOARD)
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


@pytest.mark.slow(reason="a model is trained, at the system's idle priority")
@pytest.mark.timeout(1500)
def test_a_better_model_is_published_and_rolled_back(server: Server, tmp_path: Path) -> None:
    rows = [
        {**row, "time_ms": 30 * float(str(row["time_ms"])), "spread_ms": 1e-3}
        for row in synthetic.rows(networks=20, configs=40)  # which are faster than a device can be
    ]
    base = server.log.parent / "exchange" / "base" / "part-own.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema(CONVOLUTION)), base)
    assert in_use(server).keys() == {"board"}
    first = job(server)
    assert first["state"] == "published", first
    assert "against PyTorch" in first["reason"]
    eventually(lambda: "h100" in in_use(server))
    digest = in_use(server)["h100"]
    answer = server.predict({**ONE, "device": "h100"})
    assert f"h100={digest}" in answer.headers["x-confpred-model"]
    rolled = server.post("/v1/models/rollback").json()
    assert rolled["outcome"] == "rolled_back"
    assert in_use(server).keys() == {"board"}
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
    digest = in_use(server)["board"]
    source = Path(server.log.parent / "models" / "board-1")
    pulls = tmp_path / "cache" / "confpred" / "pulls" / digest
    pulls.mkdir(parents=True)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    name = max(files, key=lambda each: len(files[each]))
    (pulls / f"{name}.part").write_bytes(files[name][:1000])  # where it was cut off
    (pulls / "card.json").write_bytes(b"{}")  # damaged
    done = run("models", "pull", "--url", server.url, "--device", "board")
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
    assert "models unsigned as far as is known" in server.said()
    verified = run("models", "verify", "--url", server.url)
    assert verified.exit_code == 0, verified.output
    (made / name).write_bytes(files[name][:-1])
    assert "damaged" in run("models", "verify").output
    assert run("models", "verify").exit_code == 1


def test_a_pull_of_other_bytes_puts_nothing_there(
    server: Server, models_folder: Path, tmp_path: Path
) -> None:
    digest = in_use(server)["board"]
    pulls = tmp_path / "cache" / "confpred" / "pulls" / digest
    pulls.mkdir(parents=True)
    (pulls / "card.json.part").write_bytes(b"x" * 1000)  # the beginning of another file
    done = run("models", "pull", "--url", server.url, "--device", "board")
    assert done.exit_code == 1
    assert "is damaged" in str(done.exception)
    assert not models_folder.exists()
    assert run("models", "pull", "--url", server.url, "--device", "board").exit_code == 0
    for words in (["--device", "h900"], ["--digest", "00000000"], []):
        assert run("models", "pull", "--url", server.url, *words).exit_code != 0
    for path in (f"{digest}/../x", f"{'0' * 64}/card.json", f"{digest}/models"):
        assert server.get(f"/v1/models/{path}").status_code == 404


@contextmanager
def offering(listed: dict[str, Any], files: dict[str, bytes]) -> Iterator[str]:
    """Run a server that offers a model, whatever it is; gives its address."""

    class Offers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"models": [listed]}).encode() if self.path == "/v1/models" else None
            name = unquote(self.path.partition(f"/{listed['digest']}/")[2])
            found = files.get(name) if body is None else body
            self.send_response(200 if found is not None else 404)
            self.send_header("content-length", str(len(found or b"")))
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *words: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Offers) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}"
        finally:
            made.shutdown()
            thread.join()


CARDS: dict[str, tuple[dict[str, Any], str]] = {
    "another device": ({"device": "h200"}, "is for 'h200', not for h100"),
    "a path as its device": ({"device": "../../x"}, "is no key of a device"),
    "a date to come": ({"created": "9999-01-01T00:00:00+00:00"}, "missing or in the future"),
    "a file of another kind": ({"files": {".bashrc": "0" * 64}}, "has a file '.bashrc'"),
}


@pytest.mark.parametrize("kind", [*CARDS, "a digest", "a size"])
def test_what_a_service_offers_is_believed_as_far_as_it_is_a_model(
    models_folder: Path,
    model_folder: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    change, said = CARDS.get(kind, ({}, "which is no SHA-256"))
    files["card.json"] = json.dumps(json.loads(files["card.json"]) | change).encode()
    digest = sha256(files["card.json"]).hexdigest()
    if kind == "a digest":
        digest = "../../../../tmp/x" + digest[17:]
    if kind == "a size":
        monkeypatch.setattr(transfer, "_MOST_BYTES", 1000)  # instead of gigabytes to send
        said = "has more than 1000 bytes"
    listed = {"device": "h100", "digest": digest, "in_use": True, "name": "x", "created": "2026"}
    with offering(listed, files) as url:
        done = run("models", "pull", "--url", url, "--device", "h100")
    assert done.exit_code == 1
    assert said in str(done.exception), done.exception
    assert not models_folder.exists()
    written = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert written <= {"card.json", "card.json.part"}


def test_nothing_is_asked_over_plain_http_elsewhere(
    monkeypatch: pytest.MonkeyPatch, models_folder: Path
) -> None:
    away = "http://192.0.2.1:8000"
    for words in (["list"], ["pull", "--device", "h100"], ["verify"]):
        done = run("models", *words, "--url", away)
        assert "CONFPRED_PLAIN_HTTP=1 allows" in str(done.exception)
    with pytest.raises(InvalidInput, match="https://"):
        Client(away, token="secret")
    Client(away).close()  # without a token nothing is to be kept
    Client("https://192.0.2.1", token="secret").close()
    monkeypatch.setenv("CONFPRED_PLAIN_HTTP", "1")
    Client(away, token="secret").close()


def signed(folder: Path, key: Path) -> None:
    words = ["ssh-keygen", "-q", "-Y", "sign", "-n", "confpred", "-f", key, folder / "card.json"]
    subprocess.run([*map(str, words)], check=True, capture_output=True)


def test_a_signature_says_whom_a_model_is_from(
    models_folder: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those that ship take seconds to verify.
    monkeypatch.setattr(confpred.models, "__path__", [str(tmp_path / "none")])
    own = tmp_path / "own" / "h100-1"
    shutil.copytree(model_folder, own)
    for name in ("operator", "somebody"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True)
    public = (tmp_path / "operator.pub").read_text()
    (tmp_path / "signers").write_text(f"operator@example.com {public}")
    signed_by = ("--signed-by", str(tmp_path / "signers"))
    settings = Settings(model=str(own.parent), signed_by=signed_by[1])
    with pytest.raises(ModelError, match="is not signed"):
        publish(settings, tmp_path / "home")
    signed(own, tmp_path / "somebody")
    with pytest.raises(ModelError, match="is not signed by one of"):
        publish(settings, tmp_path / "home")
    (own / "card.json.sig").unlink()
    signed(own, tmp_path / "operator")
    with running(tmp_path, "--model", str(own.parent), *signed_by) as server:
        pull = ("models", "pull", "--url", server.url, "--device", "h100")
        done = run(*pull, *signed_by)
        assert done.exit_code == 0, done.exception
        assert "signed by operator@example.com" in done.output
    assert "signed by operator@example.com" in run("models", "verify", *signed_by).output
    assert "signed, which --signed-by verifies" in run("models", "verify").output
    (made,) = models_folder.iterdir()
    (made / "card.json.sig").unlink()
    assert "unsigned" in run("models", "verify").output
    assert run("models", "verify", *signed_by).exit_code == 1


def test_a_rollback_withdraws_what_was_published(server: Server, model_folder: Path) -> None:
    """Models are put where a job would publish them."""
    published = server.log.parent / "exchange" / "models"
    digests = []
    for year in (2031, 2032):
        to = published / f"h100-{year}"
        digests.append(copy_model(model_folder, to, created=f"{year}-01-01"))
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
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a model take the place of trained ones; all else is real."""
    years = iter(range(2031, 2050))

    def trained(
        data: object, models: object, out: Path, *, device: str, facts: Any, **how: object
    ) -> Retrained:
        card = {"created": f"{next(years)}-01-01", **facts}
        copy_model(model_folder, out, **card | (BOARD if device == "board" else {}))
        return Retrained(device, Verdict(device != "no better", "made up", 10, 3), None)

    # Training eight models would take an hour.
    monkeypatch.setattr(exchanged, "retrain_from", trained)
    copy_model(model_folder, tmp_path / "models" / "board-1", **BOARD)
    settings = Settings(model=str(tmp_path / "models"), exchange=str(tmp_path / "exchange"))
    exchange = Exchange(tmp_path / "exchange")
    for device in ("board", *["h100"] * 7):
        keeper.retrain(settings, exchange, exchange.add_job(device))
    assert {job.state for job in exchange.jobs()} == {"published"}
    keeper.retrain(settings, exchange, exchange.add_job("no better"))
    assert [job.state for job in exchange.jobs()].count("kept") == 1
    kept = [(known.card.device, known.card.created[:4]) for _, known in published(exchange.folder)]
    assert kept == [*(("h100", str(year)) for year in range(2038, 2033, -1)), ("board", "2031")]
    digests = [known.digest for _, known in published(exchange.folder)]
    options = ("--model", str(settings.model), "--exchange", str(settings.exchange))
    with running(tmp_path, *options) as server:
        for digest, former in pairwise(digests[:5]):
            assert in_use(server) == {"h100": digest, "board": digests[5]}
            assert server.post("/v1/models/rollback").json()["outcome"] == "rolled_back"
            assert in_use(server) == {"h100": former, "board": digests[5]}
    assert len([*(exchange.folder / "withdrawn").iterdir()]) == 4


def test_a_model_that_is_being_written_is_not_published(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "models" / ".whole.x1y2.tmp")
    assert published(tmp_path) == []
    shutil.copytree(model_folder, tmp_path / "models" / "whole")
    assert [path.name for path, _ in published(tmp_path)] == ["whole"]
