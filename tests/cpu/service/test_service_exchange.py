"""Measurements that are sent to a server: what is kept, what is checked, and who may send."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uploads
from fastapi.testclient import TestClient
from served import eventually, head
from uploads import PARQUET, Site, changed, killed, whole

from confpred import Predictor
from confpred.client import AsyncClient, Client
from confpred.client.transfer import submitting
from confpred.data.measurements import Measurement, Run
from confpred.data.parquet import operation_in, schema, write
from confpred.data.remote import folder_at
from confpred.errors import ServiceError
from confpred.families.kernel_text import identity_of
from confpred.families.registry import all_families
from confpred.measure.timing import Outcome
from confpred.model.folder import Model, NewestModels
from confpred.problem.device import get_device
from confpred.problem.norm import BATCH_NORM, BatchNorm
from confpred.retraining.admission import RefusedShard, check_shard
from confpred.service import Settings
from confpred.service.app import create_app


@pytest.fixture(scope="module")
def rows(repository: Path) -> pa.Table:
    """Return measurements of a real GPU, a few hundred of each provider."""
    return pq.read_table(next((repository / "datasets" / "h100").glob("*.parquet"))).slice(
        0, 60_000
    )


@pytest.fixture(scope="module")
def anchors(repository: Path) -> Path:
    return next((repository / "datasets" / "anchors" / "h100").glob("*.parquet"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, anchors: Path) -> Iterator[Site]:
    """Run a server that knows control configs."""
    folder = tmp_path_factory.mktemp("exchange")
    (folder / "exchange" / "controls").mkdir(parents=True)
    shutil.copy(anchors, folder / "exchange" / "controls")
    scopes = {"read": "read", "write": "write", "greedy": "write", "admin": "admin"}
    with uploads.site(folder, scopes, "--max-upload-mib", "1", "--quota-mib", "3") as made:
        yield made


def test_what_is_sent_twice_is_in_the_data_once(site: Site, rows: pa.Table) -> None:
    part = rows.slice(0, 400)
    body = whole(part)
    first = site.sent(body, "write")
    assert (first["state"], first["rows"]) == ("admitted", 400)
    again = site.send(body, "write")
    assert (again.status_code, again.json()) == (202, first)
    # The same rows in other bytes, and some new ones.
    other = whole(rows.slice(200, 400), compression="zstd")
    assert site.sent(other, "write")["rows"] == 200
    twice = whole(pa.concat_tables([rows.slice(600, 10), rows.slice(600, 10)]))
    assert site.sent(twice, "write")["rows"] == 10
    files = sorted((site.exchange / "admitted").glob("*.parquet"))
    assert sum(pq.read_metadata(file).num_rows for file in files) == 610
    listed = site.get("/v1/measurements", "read").json()["measurements"]
    assert sum(each["rows"] for each in listed) == 610
    fetched = site.get(f"/v1/measurements/{first['id']}/rows", "read")
    assert pq.read_table(io.BytesIO(fetched.content)).num_rows == 400


def test_who_may_send(site: Site, rows: pa.Table) -> None:
    body = whole(rows.slice(0, 10))
    assert site.send(body, None).status_code == 401
    assert site.send(body, "confpred_wrong").status_code == 401
    refused = site.send(body, "read")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert "scope write" in refused.text
    for secret, status in (("write", 403), ("admin", 202)):
        assert site.ask_for_job(secret).status_code == status


def test_what_is_not_meant_is_not_kept(site: Site, rows: pa.Table) -> None:
    body = whole(rows.slice(20_000, 3_000))
    before = {path.name for path in site.folder.rglob("*.parquet")}
    wrong = site.send(body, "write", **{"idempotency-key": "0" * 64})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "idempotency-key")
    assert site.send(body, "write", **{"idempotency-key": "me"}).status_code == 422
    assert site.send(body, "write", **{"content-type": "x/y"}).status_code == 415
    large = site.send(bytes(2**20 + 1), "write")
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    lines = (f"authorization: Bearer {site.secrets['write']}", f"content-length: {len(body)}")
    key = f"idempotency-key: {hashlib.sha256(body).hexdigest()}"
    start = head(*lines, key).replace(b"/v1/predict", b"/v1/measurements", 1)
    start = start.replace(b"application/json", PARQUET["content-type"].encode())
    with site.server.connect() as connection:  # truncated: the client goes after the half
        connection.sendall(start + body[: len(body) // 2])
    eventually(lambda: not list((site.exchange / "uploads").glob(".*")))
    unknown = site.get(f"/v1/measurements/{hashlib.sha256(body).hexdigest()}", "read")
    assert unknown.status_code == 404
    assert {path.name for path in site.folder.rglob("*.parquet")} == before


def test_a_token_has_a_quota(site: Site) -> None:
    for number in range(3):
        reply = site.send(bytes([number]) * 1_000_000, "greedy")
        assert reply.status_code == 202
    refused = site.send(b"x" * 1_000_000, "greedy")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert "retry-after" in refused.headers
    found = site.became(reply.json()["id"], "write")
    assert (found["state"], found["reason"][:32]) == (
        "quarantined",
        "the file is not a whole file of ",
    )


LIES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "halved": (lambda t: changed(t, "time_ms", lambda ms: ms * 0.6), "of what model h100-"),
    "impossible": (lambda t: changed(t, "time_ms", lambda ms: ms * 0.01), "at least"),
    "too fast here and there": (
        lambda t: changed(t, "time_ms", lambda ms: ms * np.where(np.arange(len(ms)) % 20, 1, 0.55)),
        "beside their neighbours",
    ),
    "noise": (lambda t: changed(t, "spread_ms", lambda ms: ms * 0 + 1e3), "times spread by"),
    "another kernel": (
        lambda t: changed(t, "source_digest", lambda each: ["0123456789abcdef"] * len(each)),
        "which this version does not have",
    ),
    "a family of another version": (
        lambda t: changed(t, "family", lambda each: ["grouped_fprop_2"] * len(each)),
        "the nearest is",
    ),
    "a config of another version": (
        lambda t: changed(t, "config", lambda each: ["block_n=3"] * len(each)),
        "is not allowed",
    ),
    "a device of nobody": (
        lambda t: changed(t, "device", lambda each: ["h900"] * len(each)),
        "device='h900' is not allowed",
    ),
    "no column": (lambda t: t.drop_columns(["registers"]), "is not a whole file of measurements"),
    "no operation": (lambda t: t.replace_schema_metadata({}), "lacks the metadata 'operation'"),
    "another operation": (
        lambda t: t.replace_schema_metadata({"operation": "linear_chain"}),
        "is not a whole file of measurements",
    ),
    "no rows": (lambda t: t.slice(0, 0), "allowed: 1 to"),
}


@pytest.fixture(scope="module")
def own(rows: pa.Table) -> pa.Table:
    return rows.filter(pa.compute.equal(rows["family"], "depthwise_wgrad")).slice(1_000, 400)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {"h100": NewestModels()["h100"]}


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_is_refused_with_its_reason(
    own: pa.Table, models: dict[str, Model], tmp_path: Path, kind: str
) -> None:
    change, reason = LIES[kind]
    (tmp_path / "part-a.parquet").write_bytes(whole(change(own)))
    with pytest.raises(RefusedShard, match=re.escape(reason)):
        check_shard(tmp_path / "part-a.parquet", models, [])


def test_what_is_refused_is_quarantined(site: Site, own: pa.Table) -> None:
    change, reason = LIES["noise"]
    found = site.sent(whole(change(own)), "write")
    assert found["state"] == "quarantined"
    assert reason in found["reason"]
    assert str(site.folder) not in found["reason"]
    assert (site.exchange / "uploads" / f"part-{found['id']}.parquet").exists()
    assert not (site.exchange / "admitted" / f"part-{found['id']}.parquet").exists()


def norms() -> pa.Table:
    """Return made-up times of batch norms."""
    family, device = all_families()["batch_norm_one_pass"], get_device("h100")
    run = Run("", "h100", "H100", "0", "13", "test")
    rows = []
    for c in (64, 96, 128):
        problem = BatchNorm(32, 56, 56, c)
        for config in np.flatnonzero(family.legal(problem, device))[:5].tolist():
            ms = 1500 * device.roofline_s(problem)
            digest = identity_of(family.launch(problem, config).source)
            outcome = Outcome(config, "ok", ms, 0.01 * ms, 3)
            rows.append(Measurement(problem, ("net",), family.name, digest, run, outcome, "now"))
    return pa.Table.from_pylist([row.to_row() for row in rows], schema(BATCH_NORM))


@pytest.mark.parametrize("operation", ["linear_chain", "batch_norm"])
def test_every_operation_is_taken_and_checked(site: Site, repository: Path, operation: str) -> None:
    """Times of batch norms are made up; those of linear chains are an H100's."""
    chains = next((repository / "datasets" / "chains" / "h100").glob("*.parquet"))
    table = norms() if operation == "batch_norm" else pq.read_table(chains)
    table = changed(table, "run_id", lambda each: ["one of both"] * len(each))
    found = site.sent(whole(table), "write")
    assert (found["state"], found["rows"]) == ("admitted", table.num_rows), found
    stored = site.exchange / "admitted" / f"part-{found['id']}.parquet"
    assert operation_in(stored) == operation
    own = table.filter(pa.compute.not_equal(table["family"], "pytorch"))
    for kind in ("impossible", "another kernel", "a config of another version"):
        change, reason = LIES[kind]
        found = site.sent(whole(change(own)), "write")
        assert (found["state"], reason in found["reason"]) == ("quarantined", True), found


def test_a_run_whose_control_configs_are_off_is_not_believed(
    site: Site, rows: pa.Table, anchors: Path
) -> None:
    controls = pq.read_table(anchors)
    for run, factor, state in (("good", 1.01, "admitted"), ("hot", 1.2, "quarantined")):
        named = changed(controls, "run_id", lambda each, run=run: [run] * len(each))
        times = changed(named, "time_ms", lambda ms, factor=factor: ms * factor)
        found = site.sent(whole(times), "write")
        assert (found["state"], found["rows"]) == (state, 0 if state == "admitted" else None)
        data = changed(rows.slice(2_000, 50), "run_id", lambda each, run=run: [run] * len(each))
        assert site.sent(whole(data), "write")["state"] == state
    assert pq.read_table(site.exchange / "controls").num_rows == controls.num_rows


def test_a_full_disk_refuses_and_is_got_over(site: Site, rows: pa.Table) -> None:
    body = whole(rows.slice(30_000, 12_000), compression="none", use_dictionary=False)
    body = body[:400_000] + bytes(1000)  # no file of measurements, and large
    workers = site.server.workers()
    for process in workers:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    try:
        refused = site.send(body, "write")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "no_storage")
        assert site.server.predict(headers=site.headers("read")).is_success
    finally:
        for process in workers:
            unlimited = (resource.RLIM_INFINITY,) * 2
            resource.prlimit(process, resource.RLIMIT_FSIZE, unlimited)
    assert site.send(body, "write").status_code == 202


def test_nothing_acknowledged_is_lost_where_processes_are_killed(
    site: Site, rows: pa.Table
) -> None:
    ids = []
    for number in range(6):
        body = whole(rows.slice(40_000 + 30 * number, 30))
        ids.append(site.send(body, "write").json()["id"])
        if number % 2:
            site.kill_keeper()
    eventually(lambda: any(map(killed, site.server.workers() - site.keepers())))
    found = [site.became(upload, "write") for upload in ids]
    assert [each["state"] for each in found] == ["admitted"] * 6
    assert sum(each["rows"] for each in found) == 180
    names = [f"part-{upload}.parquet" for upload in ids]
    parts = [pq.read_table(site.exchange / "admitted" / name) for name in names]
    assert sum(part.num_rows for part in parts) == 180


@pytest.mark.slow(reason="a job imports the trainer, at the system's idle priority")
def test_uploads_and_jobs_are_counted(site: Site, rows: pa.Table) -> None:
    bodies = (whole(rows.slice(50_100, 20)), b"no measurements")
    states = [site.sent(body, "admin")["state"] for body in bodies]
    assert states == ["admitted", "quarantined"]
    asked = site.ask_for_job("admin").json()
    job: dict[str, Any] = {}

    def ended() -> bool:
        jobs = site.get("/v1/jobs", "admin").json()["jobs"]
        job.update(next(each for each in jobs if each["id"] == asked["id"]))
        return job["ended"] is not None

    eventually(ended, site.server.said)
    assert (job["kind"], job["device"]) == ("retrain", "h100")
    assert job["state"] in ("kept", "failed")  # so few rows make no better model
    assert job["reason"]
    text = site.get("/metrics", "admin").text
    assert 'confpred_uploads{state="admitted"}' in text
    assert 'confpred_uploads{state="quarantined"}' in text
    assert f'confpred_jobs{{state="{job["state"]}"}}' in text
    assert site.ask_for_job("admin", "x").status_code == 422


def test_the_client_sends(
    site: Site, rows: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, secrets = site.server.url, site.secrets
    for number, name in enumerate(("rows-a-00000", "rows-a-00001", "anchors-a-00002")):
        pq.write_table(rows.slice(50_000 + 20 * number, 20), tmp_path / f"{name}.parquet")
    shard = tmp_path / "rows-a-00000.parquet"
    with Client(url, token=secrets["write"]) as client:
        found = client.submit(shard)
        assert found.id == hashlib.sha256(shard.read_bytes()).hexdigest()
        eventually(lambda: client.submission(found.id).state == "admitted")
        assert client.submission(found.id).rows == 20

    async def again() -> str:
        async with AsyncClient(url, token=secrets["write"]) as client:
            assert (await client.submission(found.id)).state == "admitted"
            return (await client.submit(shard)).id

    assert asyncio.run(again()) == found.id
    with Client(url, token=secrets["read"]) as client, pytest.raises(ServiceError):
        client.submit(shard)
    monkeypatch.setenv("CONFPRED_TOKEN", secrets["write"])
    with submitting(url, tmp_path):  # a sampler's folder
        pass
    sent_names = (tmp_path / ".submitted").read_text().split()
    assert sent_names[0] == "anchors-a-00002.parquet"
    assert len(sent_names) == 3
    with submitting("http://127.0.0.1:9", tmp_path):  # nothing is left, so nobody is asked
        pass
    store = folder_at(f"memory://{tmp_path.name}/runs")
    write(rows.slice(50_060, 20), store / "rows-b-00000.parquet")
    for _ in range(2):
        with submitting(url, store):
            pass
    assert (store / ".submitted").read_bytes() == b"rows-b-00000.parquet"
    upload = hashlib.sha256((store / "rows-b-00000.parquet").read_bytes() or b"").hexdigest()
    assert site.became(upload, "write")["rows"] == 20


def test_a_server_without_a_folder_takes_nothing() -> None:
    app = create_app(Settings(), Predictor({}))
    with TestClient(app, client=("127.0.0.1", 1)) as client:
        headers = {"idempotency-key": "0" * 64, **PARQUET}
        reply = client.post("/v1/measurements", content=b"", headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_exchange")
        assert client.get("/v1/jobs").json() == {"jobs": []}
        assert client.post("/v1/jobs", params={"device": "h100"}).status_code == 404
