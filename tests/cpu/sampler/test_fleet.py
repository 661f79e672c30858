"""The sampler on Ray: real Ray, processes and files. GPUs are made up, and a timer is in place of
the measurement (`fleet_jobs`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fleet_jobs
import pytest
import sampler_run
from sampler_run import rows, suite_of
from served import eventually

from confpred.cuda.compiler import compile_kernel, compiled_before
from confpred.errors import InvalidInput
from confpred.problem.device import get_device
from confpred.sampler.run import Here, Sampling, Tally, sample
from confpred.sampler.tasks import Choosing, Task, Unit, plan

ray = pytest.importorskip("ray")
from confpred.sampler import fleet  # noqa: E402 -- imports Ray
from confpred.sampler.fleet import Fleet  # noqa: E402

GPUS = 3
SUITE = suite_of(8)
CONFIGS = 3


@pytest.fixture(scope="module", autouse=True)
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a Ray with made-up GPUs, and yield the folder of faults."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("FAULTS_IN", str(folder))
        patch.setenv("CONFPRED_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init("local", num_gpus=GPUS, num_cpus=GPUS + 2, **quiet)
        try:
            yield folder
        finally:
            ray.shutdown()


def chosen(**changes) -> Sampling:
    own = {"configs": CONFIGS, "processes": 0, "pytorch": False, "silence_s": 60.0}
    functions = {"compile": fleet_jobs.COMPILE, "measure": fleet_jobs.MEASURE}
    return Sampling(**own | functions | changes)


def run(folder: Path, suite=SUITE, describe=fleet_jobs.DESCRIBE, kind=None, **changes) -> Tally:
    own = {name: changes.pop(name) for name in ("interrupts", "show") if name in changes}
    settings = chosen(**changes)
    with Fleet(settings, describe=describe, kind=kind) as engine:
        return sample(suite, folder, engine, settings, **own)


def by_batch(folder: Path, kind: str = "rows") -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for row in rows(folder, kind):
        found.setdefault(row["n"], []).append(row)
    return found


def measured(folder: Path) -> list[tuple]:
    """Return what does not depend on who measured, and when."""
    names = [n for n in rows(folder)[0] if n not in ("run_id", "time", "project", "driver")]
    return sorted(tuple(map(str, (row[name] for name in names))) for row in rows(folder))


def test_a_fleet_measures_what_this_machine_does(tmp_path):
    tally = run(tmp_path / "ray")
    assert (tally.finished, tally.lost, tally.gpus, tally.set_aside) == (True, 0, GPUS, [])
    settings = chosen()
    here = Here(sampler_run.runs("here", "h100", "h100"), settings)
    sample(SUITE, tmp_path / "here", here, settings)
    assert measured(tmp_path / "ray") == measured(tmp_path / "here")
    found = by_batch(tmp_path / "ray")
    assert all(len({row["run_id"] for row in of_one}) == 1 for of_one in found.values())
    assert len({row["run_id"] for row in rows(tmp_path / "ray")}) == GPUS
    again = run(tmp_path / "ray", configs=CONFIGS + 1)
    assert again.total_rows == again.rows > 0


def test_lost_actors_cost_no_row_and_none_is_there_twice(tmp_path, faults):
    """One actor is killed, and a unit kills each that it comes to."""
    for name in ("die-3", "kill-7"):
        (faults / name).touch()
    tally = run(tmp_path)
    (faults / "kill-7").unlink()
    assert not (faults / "die-3").exists()
    assert (tally.finished, tally.lost) == (True, 3)
    found = by_batch(tmp_path)
    assert {n: len({row["config"] for row in of_one}) for n, of_one in found.items()} == {
        entry.problem.n: CONFIGS for entry in SUITE.entries
    }
    assert len(rows(tmp_path)) == CONFIGS * len(SUITE.entries)
    failed = [row for row in rows(tmp_path) if row["status"] != "ok"]
    assert {(row["n"], row["status"]) for row in failed} == {(7, "launch_error")}
    assert all(row["message"].startswith("killed 2 workers: ") for row in failed)
    assert run(tmp_path).total_rows == 0, "a failure is a row, and is not tried again"


@pytest.mark.slow(reason="hangs are waited for")
def test_what_hangs_is_killed_by_the_watch(tmp_path, faults):
    """The first actor is stopped as a whole, the other's child hangs in a measurement."""
    for name in ("stop-4", "hang-6"):
        (faults / name).touch()
    tally = run(tmp_path, silence_s=20.0)
    (faults / "hang-6").unlink()
    assert (tally.finished, tally.lost) == (True, 1)
    assert tally.statuses == {"ok": CONFIGS * 7, "timeout": CONFIGS}
    statuses = {row["n"]: row["status"] for row in rows(tmp_path)}
    assert (statuses[4], statuses[6]) == ("ok", "timeout")
    assert len(rows(tmp_path)) == CONFIGS * len(SUITE.entries)


def test_gpus_of_other_kinds_and_versions_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidInput, match=r"device='2 x h100, 1 x h200'.*--device"):
        run(tmp_path, describe=fleet_jobs.DESCRIBE_KINDS)
    tally = run(tmp_path / "h200", describe=fleet_jobs.DESCRIBE_KINDS, kind="h200")
    assert (tally.finished, tally.gpus) == (True, 1)
    assert all("GPU" in text and "is of kind h100" in text for text in tally.set_aside)
    assert {row["device"] for row in rows(tmp_path / "h200")} == {"h200"}
    tally = run(tmp_path / "one", describe=fleet_jobs.DESCRIBE_VERSIONS)
    (text,) = tally.set_aside
    assert "GPU 0 has confpred 0.0.9, and this is" in text
    assert (tally.finished, tally.gpus) == (True, GPUS - 1)
    assert "0.0.9" not in {row["project"] for row in rows(tmp_path / "one")}


def test_a_gpu_whose_anchors_are_off_is_set_aside(tmp_path):
    (task,) = plan(suite_of(1), get_device("h100"), Choosing(configs=1, pytorch=False), {})
    where = (task.problem, (), task.provider, task.source_digest, task.config_ids)
    anchors = (Task(*where, anchor=True),)
    tally = run(tmp_path, measure=fleet_jobs.MEASURE_UNLIKE, anchors=anchors)
    (text,) = tally.set_aside
    assert "GPU 2 takes 1.20 of the others' time for the anchors: set aside" in text
    assert (tally.finished, tally.gpus) == (True, GPUS - 1)
    assert len(rows(tmp_path, "anchors")) == GPUS
    off = max(rows(tmp_path, "anchors"), key=lambda row: row["time_ms"])
    assert off["run_id"] not in {row["run_id"] for row in rows(tmp_path)}


@pytest.mark.slow(reason="two runs of 40 units")
def test_ctrl_c_ends_after_the_units_in_flight(tmp_path):
    asked = []

    def show(tally: Tally) -> None:
        asked.extend([1] if tally.rows else [])

    tally = run(tmp_path, suite_of(40), interrupts=lambda: bool(asked), show=show)
    assert not tally.finished
    assert Counter(row["n"] for row in rows(tmp_path)) == dict.fromkeys(by_batch(tmp_path), CONFIGS)
    assert len(rows(tmp_path)) == tally.rows
    assert run(tmp_path, suite_of(40)).rows == 40 * CONFIGS - tally.rows


@pytest.mark.slow(reason="actors and compilers start")
def test_kernels_are_compiled_by_the_cluster_and_fetched_by_other_hosts(tmp_path, monkeypatch):
    tally = run(tmp_path / "out", suite_of(2), configs=1, processes=2)
    assert (tally.finished, tally.kernels) == (True, tally.total_kernels)
    (task, *_) = plan(suite_of(2), get_device("h100"), chosen(configs=1), {})
    kernels = Unit((task,)).kernels()
    cubin = compile_kernel(kernels[0], "sm_90a").cubin
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path / "another host's"))
    fleet.fetch([(kernels[0], ray.put(cubin))], "sm_90a")
    assert compiled_before(kernels[0], "sm_90a").cubin == cubin


_DRIVER = """
import sys, pathlib, test_fleet
from confpred.sampler import store
store.FLUSH_SECONDS = 0.2
folder = pathlib.Path(sys.argv[1])
sys.exit(not test_fleet.run(folder, test_fleet.suite_of(40)).finished)
"""


@contextmanager
def cluster() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a Ray of its own, of made-up GPUs that are slow; the value is its head and address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1"]
        words += [f"--port={port}", f"--temp-dir={short}"]
        words += [f"--num-gpus={GPUS}", f"--num-cpus={GPUS + 2}", "--include-dashboard=false"]
        ray_command = str(Path(sys.executable).with_name("ray"))
        head = subprocess.Popen(
            [ray_command, *words], env=os.environ | {"ROW_S": "0.1"}, preexec_fn=os.setpgrp
        )
        try:
            yield head, f"127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            head.wait()


def driver(folder: Path, address: str) -> subprocess.Popen[bytes]:
    host, port = address.split(":")
    eventually(lambda: socket.socket().connect_ex((host, int(port))) == 0)
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # for a head that is lost; a minute
    environment = os.environ | patience | {"RAY_ADDRESS": address}
    return subprocess.Popen([sys.executable, "-c", _DRIVER, str(folder)], env=environment)


@pytest.mark.slow(reason="clusters start")
@pytest.mark.parametrize("fault", ["the driver is killed", "the head is lost", "two drivers"])
def test_a_cluster_that_fails_loses_and_doubles_no_row(tmp_path, fault):
    with cluster() as (head, address):
        first = second = driver(tmp_path, address)
        if fault == "two drivers":
            second = driver(tmp_path, address)
        eventually(lambda: rows(tmp_path))
        if fault == "the driver is killed":
            first.kill()
            assert len(rows(tmp_path)) < 40 * CONFIGS
        elif fault == "the head is lost":
            os.killpg(head.pid, signal.SIGKILL)
        ended = {each.wait(300) for each in (first, second)}
        assert (0 in ended) == (fault == "two drivers")
        if fault != "the head is lost":
            assert driver(tmp_path, address).wait(300) == 0
    if fault == "the head is lost":
        with cluster() as (_, address):
            assert driver(tmp_path, address).wait(300) == 0
    assert Counter(row["n"] for row in rows(tmp_path)) == dict.fromkeys(range(2, 42), CONFIGS)
    assert len(measured(tmp_path)) == len(set(measured(tmp_path)))
