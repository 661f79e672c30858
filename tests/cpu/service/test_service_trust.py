"""Who is trusted with what in an exchange: uploads are taken back, wait, or are refused, and no
host speaks for another."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uploads
from click.testing import CliRunner
from served import copy_model, eventually
from uploads import Site, changed, whole

from confpred.cli import cli
from confpred.client.transfer import fetch_rows
from confpred.service import Settings, generations, keeper
from confpred.service.exchange import ADMITTED, UPLOADS, Exchange


@pytest.fixture(scope="module")
def rows(repository: Path) -> pa.Table:
    """Return measurements of a real GPU."""
    file = next((repository / "datasets" / "h100").glob("*.parquet"))
    return pq.read_table(file).slice(0, 20_000)


@pytest.fixture(scope="module")
def anchors(repository: Path) -> pa.Table:
    return pq.read_table(repository / "datasets" / "anchors" / "h100" / "part-2026-11-23.parquet")


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, repository: Path, anchors: pa.Table
) -> Iterator[Site]:
    """Run a server with the operator's control configs, and a model of its own."""
    folder = tmp_path_factory.mktemp("trust")
    (folder / "exchange" / "controls").mkdir(parents=True)
    pq.write_table(anchors, folder / "exchange" / "controls" / "own.parquet")
    copy_model(repository / "models" / "h100-2026.11.29", folder / "models" / "h100-1")
    scopes = dict.fromkeys(("one", "another", "third", "loud", "quiet"), "write")
    scopes["operator"] = "admin"
    with uploads.site(folder, scopes, "--model", str(folder / "models")) as made:
        yield made


@pytest.fixture
def exchange(site: Site) -> Exchange:
    return Exchange(site.exchange)


def called(table: pa.Table, run_id: str) -> pa.Table:
    """Return rows under another run id, measured at another time of day."""
    table = changed(table, "run_id", lambda each: [run_id] * len(each))
    return changed(table, "time", lambda each: ["2031-01-01T00:00:00Z"] * len(each))


def command(site: Site, *words: str) -> str:
    done = CliRunner().invoke(cli, ["exchange", *words, "--exchange", str(site.exchange)])
    assert done.exit_code == 0, done.output
    return done.output


def test_an_uploader_is_listed_revoked_and_queued_again(
    site: Site,
    exchange: Exchange,
    rows: pa.Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = site.sent(whole(rows.slice(1_000, 100)), "third")
    second = site.sent(whole(rows.slice(1_050, 100)), "another")
    assert (first["rows"], second["rows"], first["token"]) == (100, 50, "third")
    learned = site.exchange / "models" / "h100-2"
    copy_model(site.folder / "models" / "h100-1", learned, uploads={first["id"]: "third"})
    assert first["id"][:12] in command(site, "list", "third")
    said = command(site, "revoke", "third")
    assert "revoked by the operator" in said
    assert "withdrawn: h100-2" in said
    assert not learned.exists()
    # The rows that both had sent are the other's now.
    eventually(lambda: exchange.named(second["id"])[0].rows == 100, site.server.said)
    assert site.get(f"/v1/measurements/{first['id']}/rows", "one").status_code == 404
    again = site.send(whole(rows.slice(1_000, 100)), "third")
    assert again.json()["state"] == "revoked"
    command(site, "requeue", first["id"][:8])
    assert site.became(first["id"], "third")["rows"] == 50
    for words in (["revoke", "nobody"], ["revoke"], ["requeue", "0000000"]):
        done = CliRunner().invoke(cli, ["exchange", *words, "--exchange", str(site.exchange)])
        assert done.exit_code != 0
    exchange.path(ADMITTED, first["id"]).unlink()  # by hand
    assert site.get(f"/v1/measurements/{first['id']}/rows", "one").status_code == 404
    monkeypatch.setenv("CONFPRED_TOKEN", site.secrets["one"])
    fetch_rows(site.server.url, tmp_path)
    found = {path.stem.removeprefix("part-") for path in tmp_path.glob("*.parquet")}
    assert second["id"] in found
    assert first["id"] not in found


def test_a_fault_of_the_server_is_no_fault_of_the_file(
    site: Site, exchange: Exchange, rows: pa.Table
) -> None:
    damaged = site.exchange / "controls" / "damaged.parquet"
    trees = site.folder / "models" / "h100-1" / "card.json"
    text, process = trees.read_bytes(), site.keeper()

    def small(least: int) -> None:
        for each in children(process):
            resource.prlimit(each, resource.RLIMIT_FSIZE, (least, resource.RLIM_INFINITY))

    faults = (
        (lambda: damaged.write_bytes(b"PAR1"), damaged.unlink, "damaged.parquet"),
        (lambda: trees.write_bytes(b"{"), lambda: trees.write_bytes(text), "card.json"),
        (lambda: small(1_000), lambda: small(resource.RLIM_INFINITY), "File too large"),
    )
    for number, (begin, end, reason) in enumerate(faults):
        begin()
        try:
            upload = site.send(whole(rows.slice(2_000 + 500 * number, 500)), "one")
            name = upload.json()["id"]
            eventually(lambda name=name: exchange.named(name)[0].reason, site.server.said)
            assert reason in exchange.named(name)[0].reason
            assert exchange.named(name)[0].state == "received"
        finally:
            end()
        found = site.became(name, "one")
        assert (found["state"], found["rows"], found["reason"]) == ("admitted", 500, None)


def children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in path.read_text().split()]


def bombs(rows: pa.Table) -> dict[str, bytes]:
    """Return files of some kilobytes that stand for gigabytes, or for minutes."""
    many = rows.take([0] * 400_000)
    large = pa.array([0] * many.num_rows, pa.int32())
    texts = pa.DictionaryArray.from_arrays(large, pa.array(["x" * 8_000]))
    at = many.schema.get_field_index("project")
    small = rows.slice(0, 10)
    device = pa.array(["h" * 20_000] * small.num_rows)
    found = {
        "a text for many rows": many.set_column(at, "project", texts),
        "a long name": small.set_column(small.schema.get_field_index("device"), "device", device),
        "a long family": changed(small, "family", lambda each: ["f" * 20_000] * len(each)),
    }
    return {
        name: whole(table.replace_schema_metadata(rows.schema.metadata), compression="zstd")
        for name, table in found.items()
    }


def test_a_file_that_is_too_large_to_check_is_refused_before_it_is_read(
    site: Site, rows: pa.Table
) -> None:
    for name, body in bombs(rows).items():
        assert len(body) < 500_000
        start = time.monotonic()
        found = site.sent(body, "one")
        assert found["state"] == "quarantined", name
        assert "has a text of " in found["reason"], found
        assert time.monotonic() - start < 30
    process = site.keeper()
    for checker in children(process):
        status = Path(f"/proc/{checker}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) < 2_000_000, peak  # kB


def kept(exchange: Exchange, body: bytes, token: str = "one") -> str:
    """Store an upload as the server does, and return its name."""
    arrived = exchange.folder / "arrived"
    arrived.write_bytes(body)
    return exchange.keep(arrived, sha256(body).hexdigest(), token, len(body)).id


def test_a_check_has_limits_of_time_and_memory(
    tmp_path: Path, rows: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Exchange(tmp_path)

    def arrived(number: int) -> str:
        return kept(exchange, whole(rows.slice(100 * number, 100)))

    limits = {
        "MOST_S = 0": ("quarantined", "s of a processor"),
        "MOST_MEMORY = 2**10": ("quarantined", "bytes of memory"),
        "_check = lambda *each: k.os._exit(3)": ("received", "ended with 3"),
    }
    for limit, (state, reason) in limits.items():
        program = f"import confpred.service.keeper as k; k.{limit}; k.main()"
        words = [sys.executable, "-c", program]
        # The limits of the checker's process are others.
        monkeypatch.setattr(keeper, "command", lambda _, *more, own=words: (*own, *more))
        checking = keeper.Keeper(Settings(exchange=str(tmp_path)), os.getpid())
        upload = arrived(len(limit))  # of another number each
        checking._check(exchange.named(upload)[0])
        found = exchange.named(upload)[0]
        assert (found.state, reason in (found.reason or "")) == (state, True), found
    due = exchange.due()
    assert due is None  # it waits, and others go first
    monkeypatch.undo()
    keeper.Keeper(Settings(exchange=str(tmp_path)), os.getpid())._check(
        exchange.named(arrived(3))[0]
    )
    assert {each.state for each in exchange.latest(9)} == {"quarantined", "received", "admitted"}


def test_what_was_sent_is_shown_on_one_line_and_short(site: Site, anchors: pa.Table) -> None:
    forged = "\nERROR:    forged <b>line</b> " + "x" * 1_500
    table = changed(called(anchors, forged), "time_ms", lambda ms: 2 * ms)
    found = site.sent(whole(table), "loud")
    assert found["state"] == "quarantined"
    assert "\\nERROR:" in found["reason"]
    assert len(found["reason"]) < 700
    assert "\nERROR:    forged" not in site.server.said()
    page = site.get("/", "one")
    assert "<b>line" not in page.text


def test_no_host_speaks_for_another(site: Site, rows: pa.Table, anchors: pa.Table) -> None:
    """Control configs that are sent are no reference, and a run id is its token's own."""
    factor = 1.0
    for number in range(8):
        factor *= 1.02
        table = changed(anchors, "time_ms", lambda ms, factor=factor: factor * ms)
        site.sent(whole(called(table, f"drifting {number}")), "loud")
    honest = changed(anchors, "time_ms", lambda ms: 0.98 * ms)
    found = site.sent(whole(called(honest, "honest")), "quiet")
    assert found["state"] == "admitted", found
    wrong = changed(called(anchors, "shared"), "time_ms", lambda ms: 1.3 * ms)
    assert site.sent(whole(wrong), "loud")["state"] == "quarantined"
    data = called(rows.slice(5_000, 50), "shared")
    assert site.sent(whole(data), "quiet")["state"] == "admitted"
    more = called(rows.slice(5_100, 50), "shared")
    found = site.sent(whole(more), "loud")
    assert (found["state"], "of run shared" in found["reason"]) == ("quarantined", True)
    assert [path.name for path in (site.exchange / "controls").iterdir()] == ["own.parquet"]


def test_a_kill_between_publishing_and_saying_so_is_made_up_for(
    site: Site, exchange: Exchange
) -> None:
    def in_use() -> str:
        models = site.get("/v1/models", "operator").json()["models"]
        return next(m["digest"] for m in models if m["in_use"] and m["device"] == "h100")

    job = exchange.add_job("h100")
    eventually(
        lambda: job_now(exchange, job.id).ended, site.server.said, 250
    )  # as there is no base
    assert "operator's own" in (job_now(exchange, job.id).reason or "")
    exchange.set_job(job.id, "running")
    card = {"created": "2031-01-01", "job": [job.id, job_now(exchange, job.id).started]}
    made = site.exchange / "models" / "h100-2031"
    digest = copy_model(site.folder / "models" / "h100-1", made, why="made up", **card)
    site.kill_keeper()
    eventually(lambda: job_now(exchange, job.id).state == "published", site.server.said, 250)
    assert job_now(exchange, job.id).reason == "h100-2031: made up"
    eventually(lambda: in_use() == digest, site.server.said, 250)
    other = exchange.add_job("h100")
    eventually(lambda: job_now(exchange, other.id).ended, site.server.said, 250)
    exchange.set_job(other.id, "running")  # and the server is killed: it begins anew
    site.kill_keeper()
    eventually(lambda: job_now(exchange, other.id).state == "failed", site.server.said, 250)


def job_now(exchange: Exchange, number: int) -> Any:
    return next(job for job in exchange.jobs() if job.id == number)


def test_rows_that_start_a_retraining_are_counted_over_kills(
    tmp_path: Path, rows: pa.Table
) -> None:
    settings = Settings(exchange=str(tmp_path), retrain_rows=100)
    for number in range(2):
        exchange = Exchange(tmp_path)
        kept(exchange, whole(rows.slice(100 * number, 60)))
        keeper.Keeper(settings, os.getpid())._check(exchange.latest(1)[0])
        assert [job.device for job in exchange.jobs()] == ["h100"] * number


def test_files_follow_the_database_whatever_was_killed(tmp_path: Path, rows: pa.Table) -> None:
    """One step says what becomes of an upload; a kill leaves files that do not count."""
    exchange, ids = Exchange(tmp_path / "exchange"), {}
    for number, state in enumerate(("quarantined", "revoked", "received", "admitted", "gone")):
        upload = ids[state] = kept(exchange, whole(rows.slice(number, 1)))
        shutil.copy(exchange.path(UPLOADS, upload), exchange.path(ADMITTED, upload))
        if state in ("admitted", "gone"):
            exchange.admit(upload, rows=1, in_all=1, devices={"h100": 1}, wanted=0)
    exchange.path(ADMITTED, ids["gone"]).unlink()
    with exchange._changing() as db:
        for state in ("quarantined", "revoked"):
            db.execute("UPDATE uploads SET state = ? WHERE id = ?", (state, ids[state]))
    assert [path.stem[-64:] for path in exchange.data()] == [ids["admitted"]]
    exchange.tidy()
    parts = {path.stem[-64:] for path in (tmp_path / "exchange" / ADMITTED).glob("*.parquet")}
    assert parts == {ids["admitted"]}
    assert len([*(tmp_path / "exchange" / UPLOADS).glob("*.parquet")]) == 5
    assert exchange.named(ids["gone"])[0].reason == "its part was removed"
    # It was revoked while it was checked.
    exchange.revoke(ids["received"])
    exchange.admit(ids["received"], rows=1, in_all=1, devices={"h100": 1}, wanted=1)
    assert exchange.named(ids["received"])[0].state == "revoked"
    assert exchange.jobs() == []


def in_a_child(work: Callable[[], None]) -> int:
    if (child := os.fork()) == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow(reason="some hundred processes")
@pytest.mark.timeout(1200)
def test_a_kill_at_any_point_loses_and_doubles_nothing(tmp_path: Path, rows: pa.Table) -> None:
    """A process is killed at each file that it opens, moves or removes, and each statement."""
    body, folder, done = whole(rows.slice(0, 60)), tmp_path / "exchange", tmp_path / "done"
    settings, name = Settings(exchange=str(folder)), sha256(body).hexdigest()
    for model in generations.newest_models(settings).values():
        keeper._loaded(model)

    def check_all(exchange: Exchange) -> None:
        while upload := exchange.due():
            exchange.admit(upload.id, **keeper._check(settings, exchange, upload), wanted=60)

    def work(step: int) -> None:
        exchange, steps = Exchange(folder), itertools.count()

        def count(event: str, words: Any = (folder,)) -> None:
            named = event in ("SQL", "open", "os.rename", "os.remove")
            if named and str(folder) in str(words[0]) and next(steps) == step:
                os._exit(9)

        sys.addaudithook(count)
        exchange._db.set_trace_callback(lambda _: count("SQL"))
        arrived = folder / UPLOADS / ".arrived.tmp"
        arrived.write_bytes(body)
        for part in (
            lambda: exchange.keep(arrived, name, "one", len(body)),
            lambda: check_all(exchange),
            lambda: exchange.revoke("one"),
            lambda: exchange.requeue(name),
            lambda: check_all(exchange),
        ):
            part()
            with done.open("a") as file:
                file.write("+")

    def recover() -> None:
        exchange = Exchange(folder)
        exchange.tidy()
        check_all(exchange)

    for step in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        done.write_text("")
        ended = in_a_child(lambda step=step: work(step))
        assert in_a_child(recover) == 0
        exchange, parts = Exchange(folder), len(done.read_text())
        states = {upload.id: (upload.state, upload.rows) for upload in exchange.latest(9)}
        held = sum(pq.read_metadata(part).num_rows for part in exchange.data())
        jobs = [job.state for job in exchange.jobs()]
        exchange._db.close()
        allowed = [("admitted", 60), ("revoked", None)][: 1 + (parts in (2, 3))]
        if parts or states:
            assert [*states] == [name], step
            assert states[name] in allowed, step
            assert (held, jobs) == (states[name][1] or 0, ["queued"]), step
        if ended == 0:
            break
        assert ended == 9, step
    assert step > 30


def test_tokens_take_turns(tmp_path: Path) -> None:
    """A host with thousands of uploads does not keep those of another waiting."""
    exchange, order = Exchange(tmp_path), ""
    for number, host in enumerate("aaaabac"):
        (tmp_path / "arrived").write_bytes(b"")
        exchange.keep(tmp_path / "arrived", f"{number:064}", host, 1)
    while upload := exchange.due():
        order += f"{upload.token}{int(upload.id)}"
        exchange.admit(upload.id, rows=0, in_all=0, devices={}, wanted=0)
    assert order == "a0b4c6a1a2a3a5"
