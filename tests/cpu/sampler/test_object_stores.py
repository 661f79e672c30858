"""Measurements in an object store: fsspec's own in memory, and one that fails and waits.

A timer is in place of the measurement (`fleet_jobs`); processes, kernels and files are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import fleet_jobs
import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from sampler_rows import ROW, fill, other
from sampler_run import runs, suite_of

from confpred.cli.learn import merge as merge_command
from confpred.data.parquet import merge, operation_in, read, read_shards, schema, shards_in
from confpred.data.remote import LEASE_S, Lease, RemoteFolder, folder_at
from confpred.errors import ConfpredError, DataError, FolderBusy, InvalidInput, StorageError
from confpred.problem.conv2d import CONVOLUTION
from confpred.sampler import store as stores
from confpred.sampler.run import Here, Sampling, Tally, sample
from confpred.sampler.store import open_store


class Poor(MemoryFileSystem):
    """A store that refuses the next `refusals` writes, or loses its reply to them where they are
    `written`, and takes `wait_s` for each other one."""

    protocol = "poor"
    cachable = False
    refusals = 0
    written = False
    wait_s = 0.0

    def pipe_file(self, path, value, mode="overwrite", **options):
        if path.endswith(".parquet") and Poor.refusals:
            Poor.refusals -= 1
            if Poor.written:
                super().pipe_file(path, value, mode=mode, **options)
            raise ConnectionError("503 slow down")
        time.sleep(Poor.wait_s)
        return super().pipe_file(path, value, mode=mode, **options)


fsspec.register_implementation("poor", Poor, clobber=True)


@pytest.fixture(params=["memory", "poor"])
def folder(request, tmp_path) -> Iterator[RemoteFolder]:
    """An empty folder of an object store."""
    yield folder_at(f"{request.param}://{tmp_path.name}/runs/")
    MemoryFileSystem.store.clear()
    Poor.refusals, Poor.wait_s = 0, 0.0


@pytest.fixture
def poor(tmp_path) -> Iterator[RemoteFolder]:
    yield folder_at(f"poor://{tmp_path.name}")
    MemoryFileSystem.store.clear()
    Poor.refusals, Poor.wait_s = 0, 0.0


def run(folder, count: int = 4, **changes) -> Tally:
    own = {"configs": 2, "processes": 0, "pytorch": False, "measure": fleet_jobs.MEASURE}
    settings = Sampling(**own | changes)
    run_id = changes.get("run_id", f"r{count}")
    return sample(suite_of(count), folder, Here(runs(run_id, "h100"), settings), settings)


def test_a_run_is_stored_resumed_and_merged(folder, tmp_path):
    first = run(folder, 2)
    second = run(folder, 4)
    assert (first.rows, second.rows, run(folder, 4).total_rows) == (4, 4, 0)
    assert [path.name for path in shards_in(folder)] == [
        "rows-r2-0-00000.parquet",
        "rows-r4-0-00000.parquet",
    ]
    wanted = schema(CONVOLUTION)
    together = read_shards(folder, CONVOLUTION, wanted.names)
    assert (together.num_rows, together.schema) == (8, wanted)
    assert merge([folder], tmp_path / "all.parquet") == 8
    run(tmp_path / "here", 4)
    merge([tmp_path / "here"], tmp_path / "here.parquet")
    names = [n for n in schema(CONVOLUTION).names if n not in ("run_id", "time", "error")]
    stored = read(tmp_path / "all.parquet", CONVOLUTION, names)
    assert stored.equals(read(tmp_path / "here.parquet", CONVOLUTION, names))


def test_merge_takes_urls(folder, tmp_path):
    fill(folder, [ROW], [other(7)])
    said = CliRunner().invoke(merge_command, [str(folder), str(tmp_path / "all.parquet")])
    assert said.output == f"2 rows in {tmp_path / 'all.parquet'}\n"
    made = CliRunner().invoke(merge_command, [str(folder), str(tmp_path / "parts")])
    assert made.output.startswith("2 rows in ")


def test_a_url_of_files_is_a_folder(tmp_path):
    assert folder_at(tmp_path.as_uri()) == tmp_path
    assert folder_at("runs/a") == Path("runs/a")
    with pytest.raises(InvalidInput, match=r"folder='moon://a/b'.*s3://bucket/runs"):
        folder_at("moon://a/b")
    if find_spec("s3fs") is None:
        with pytest.raises(ConfpredError, match="s3://a/b cannot be used: Install s3fs"):
            folder_at("s3://a/b")


def test_a_damaged_object_is_named(folder):
    fill(folder, [ROW], [other(7)])
    bad = shards_in(folder)[1]
    bad.write_bytes(bad.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{bad} is not a whole file"):
        read_shards(folder, CONVOLUTION, ["n"])
    with open_store(folder, "r", CONVOLUTION) as store, pytest.raises(DataError, match=bad.name):
        store.measured("h100")
    assert operation_in(shards_in(folder)[0]) == CONVOLUTION.name


# Waits of seconds and minutes are patched to be short; nothing else of the sampler is.


@pytest.mark.parametrize("written", [False, True])
def test_a_store_that_refuses_now_and_then_loses_and_doubles_nothing(poor, monkeypatch, written):
    monkeypatch.setattr(stores, "_RETRY_S", 0.01)
    monkeypatch.setattr(stores, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(Poor, "written", written)
    Poor.refusals = 3
    assert run(poor).finished
    assert (Poor.refusals, read_shards(poor, CONVOLUTION, ["n"]).num_rows) == (0, 8)


def test_a_store_that_refuses_for_long_ends_the_run(poor, monkeypatch):
    monkeypatch.setattr(stores, "_RETRY_S", 0.01)
    monkeypatch.setattr(stores, "PATIENCE_S", 0.05)
    Poor.refusals = 10**6
    with pytest.raises(StorageError, match=f"cannot write {poor}/rows-.*: 503 slow down"):
        run(poor)
    Poor.refusals = 0
    assert run(poor).rows == 8, "the lease is given back"


def test_a_slow_store_delays_a_run(poor, monkeypatch):
    monkeypatch.setattr(stores, "FLUSH_SECONDS", 0.05)
    Poor.wait_s = 0.2
    assert run(poor, 6).finished
    assert read_shards(poor, CONVOLUTION, ["n"]).num_rows == 12


def test_one_sampler_at_a_time(folder):
    with open_store(folder, "a", CONVOLUTION):
        busy = rf"another sampler \(process {os.getpid()} of .*\) is writing to {folder}"
        with pytest.raises(FolderBusy, match=busy):
            run(folder)
    assert run(folder).finished
    assert folder.glob(".lease*") == []


def lease_of(folder: RemoteFolder, **changes) -> None:
    held = {"token": "x", "host": "elsewhere", "pid": 1, "time": time.time()}
    (folder / ".lease.json").write_bytes(json.dumps(held | changes).encode())


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("confpred.data.remote._RENEW_S", 0.2)
    monkeypatch.setattr("confpred.data.remote._SETTLED_S", 0.3)


def test_a_clock_that_is_ahead_takes_no_live_lease(folder, quick, monkeypatch):
    with Lease(folder, "alive") as alive, ThreadPoolExecutor(1) as pool:
        ahead = time.time() + LEASE_S + 1
        lease_of(folder, token=alive._holder["token"])
        renewing = pool.submit(renewed, alive, 20)
        with monkeypatch.context() as clocks:
            # Another host's clock, which no test can set.
            clocks.setattr("confpred.data.remote.time.time", lambda: ahead)
            with pytest.raises(FolderBusy), Lease(folder, "ahead"):
                pass
        renewing.result()


def renewed(lease, times):
    for _ in range(times):
        time.sleep(0.05)
        lease.renew()


@pytest.mark.slow(reason="takers wait for each other")
def test_one_of_two_gets_an_expired_lease(folder, quick):
    """Both have seen the old one, and each removes what is there."""
    for _ in range(3):
        lease_of(folder, time=time.time() - LEASE_S - 1)
        meet = threading.Barrier(2)

        def take(_: int, meet=meet) -> bool:
            meet.wait()
            try:
                with Lease(folder, "one of two"):
                    time.sleep(0.8)
            except FolderBusy:
                return False
            return True

        with ThreadPoolExecutor(2) as takers:
            assert sum(takers.map(take, range(2))) <= 1


def test_a_host_of_the_same_name_may_have_other_processes(folder, quick):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    with Lease(folder, "r") as lease:
        here = lease._holder
    for processes in ("another container", "", None):
        lease_of(folder, host=here["host"], pid=int(ended.stdout), processes=processes)
        with pytest.raises(FolderBusy), Lease(folder, "r"):
            pass
        (folder / ".lease.json").unlink()


def test_the_lease_of_a_dead_sampler_is_taken_over(folder, quick):
    lease_of(folder)
    with pytest.raises(FolderBusy, match="process 1 of elsewhere"):
        run(folder)
    lease_of(folder, time=time.time() - LEASE_S - 1)
    assert run(folder, 1).finished
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    with Lease(folder, "r") as lease:
        here = lease._holder
    lease_of(folder, **here | {"pid": int(ended.stdout), "token": "x"})
    assert run(folder, 2).finished
    (folder / ".lease.json").write_bytes(b"half")
    assert run(folder, 3).finished


def test_a_sampler_whose_lease_was_taken_over_writes_no_more(folder, monkeypatch):
    monkeypatch.setattr("confpred.data.remote._RENEW_S", 0.0)
    refused = pytest.raises(FolderBusy)
    with refused, open_store(folder, "r", CONVOLUTION) as store:
        store.add([ROW])
        lease_of(folder)
        store.flush()
    assert shards_in(folder) == []
    assert json.loads((folder / ".lease.json").read_bytes())["token"] == "x"
