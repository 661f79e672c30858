"""Models that change while the service answers: together in all workers, or not at all."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import ONE, Server, copy_model, eventually, running


@dataclass
class Models:
    """A folder of versions, each of them a copy of a small one with another date."""

    folder: Path
    original: Path
    dates: Iterator[int] = field(default_factory=lambda: iter(range(2030, 2100)))

    def add(self, name: str, **changes: Any) -> str:
        """Put a version there that is newer than all others; return its digest."""
        changes = {"created": f"{next(self.dates)}-01-01", **changes}
        return copy_model(self.original, self.folder / name, **changes)


def made_in(folder: Path, model_folder: Path) -> Models:
    (folder / "models").mkdir()
    return Models(folder / "models", model_folder)


@pytest.fixture
def models(tmp_path: Path, model_folder: Path) -> Models:
    return made_in(tmp_path, model_folder)


@contextmanager
def serving(models: Models, *options: str, **environment: str) -> Iterator[Server]:
    options = ("--model", str(models.folder), *options)
    with running(models.folder.parent, *options, **environment) as server:
        yield server


TREES = "grouped_fprop.order.txt"
#: Pins, of which there are none.
NONE = '{"format": "confpred-pins/1", "pins": []}'
CRASHING = """
import os, signal, sys

def crash(event, arguments):
    # A published copy of the model "crash" is read, by a worker or by what is to spare it that.
    if event == "open" and not arguments[2] & os.O_WRONLY:
        path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
        if "/generations/" in str(path) and "/crash/card.json" in str(path):
            os.kill(os.getpid(), signal.SIGSEGV)

sys.addaudithook(crash)
"""


@dataclass
class Shared:
    """A server of two workers and its models; version ``a`` answers, of this digest."""

    server: Server
    models: Models
    pins: Path
    digest: str = ""


@pytest.fixture(scope="module")
def running_shared(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    models, pins = made_in(folder, model_folder), folder / "pins.json"
    models.add("first")
    pins.write_text(NONE)
    (folder / "sitecustomize.py").write_text(CRASHING)
    options = ("--workers", "2", "--plan", str(pins))
    with serving(models, *options, PYTHONPATH=str(folder)) as server:
        yield Shared(server, models, pins)


@pytest.fixture
def shared(running_shared: Shared) -> Shared:
    """Return it with nothing but a new version ``a``."""
    shutil.rmtree(running_shared.models.folder, ignore_errors=True)  # which a test removes
    running_shared.models.folder.mkdir()
    running_shared.pins.write_text(NONE)
    running_shared.digest = running_shared.models.add("a")
    assert change(running_shared.server).status_code == 200
    return running_shared


def answering(server: Server, **query: str) -> str:
    """Return the digest of the model that answers on a new connection."""
    reply = server.predict(params=query)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-confpred-model"].removeprefix("h100=")


def all_answering(server: Server) -> set[str]:
    return {answering(server) for _ in range(10)}


def change(server: Server, word: str = "reload") -> httpx.Response:
    return server.post(f"/v1/models/{word}")


class Load:
    """Clients that ask without a pause, and note what model answered what was asked when."""

    def __init__(self, server: Server, clients: int) -> None:
        self.answers: list[tuple[float, str]] = []
        self.failures: list[object] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server,)) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, server: Server) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not self._stop.is_set():
                asked = time.monotonic()
                try:
                    reply = client.post("/v1/predict", json=ONE)
                except httpx.HTTPError as error:
                    self.failures.append(error)
                    continue
                if reply.status_code != 200:
                    self.failures.append(reply.text)
                found = reply.headers.get("x-confpred-model", "").removeprefix("h100=")
                self.answers.append((asked, found))


@pytest.mark.slow(reason="a server of several workers is asked without a pause")
def test_all_workers_switch_at_once_and_no_request_fails(models: Models) -> None:
    digest = models.add("a")
    with serving(models, "--workers", "2") as server, Load(server, 4) as load:
        workers = server.workers()
        for name in ("b", "c"):
            eventually(lambda: len(load.answers) > 20)
            assert load.answers[-1][1] == digest
            before, digest = digest, models.add(name)
            reply = change(server)
            switched = time.monotonic()
            assert (reply.status_code, reply.json()["outcome"]) == (200, "reloaded")
            assert [m["digest"] for m in reply.json()["models"]] == [digest]
            assert [m["digest"] for m in reply.json()["former"]] == [before]
            start = len(load.answers)
            eventually(lambda start=start: len(load.answers) > start + 40)
            late = [found for asked, found in load.answers if asked > switched]
            assert len(late) > 20
            assert set(late) == {digest}
        digest = models.add("d")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: load.answers[-1][1] == digest)
        assert server.workers() == workers
        eventually(lambda: "reloaded for SIGHUP" in server.said())  # it is said after the switch
    assert not load.failures


def test_the_identity_is_of_the_content_and_shown_wherever_it_costs_nothing(shared: Shared) -> None:
    server, digest = shared.server, shared.digest
    listed = server.get("/v1/models")
    assert listed.json()["models"][0]["digest"] == digest
    assert listed.headers["etag"] == f'"{listed.json()["generation"]}"'
    devices = {d["key"]: d["digest"] for d in server.get("/v1/devices").json()["devices"]}
    assert (devices["h100"], devices["a100"]) == (digest, None)
    assert answering(server) == digest
    info = f'confpred_model_info{{device="h100",digest="{digest}",version="a"}} 1.0'
    assert info in server.get("/metrics").text
    (shared.models.folder / "a").rename(shared.models.folder / "b")
    assert change(server).json()["outcome"] == "reloaded"  # as names are answered too
    assert answering(server) == digest
    assert server.predict().json()["choices"][0][0]["model"] == "b"


def test_versions_are_asked_for_by_name_and_digest_and_rolled_back_to(shared: Shared) -> None:
    server, first, second = shared.server, shared.digest, shared.models.add("b")
    assert change(server).status_code == 200
    for version, expected in {"a": first, first[:12]: first, "b": second}.items():
        assert answering(server, version=version) == expected
    for unknown in ("c", "", first[:4], "f" * 64):
        reply = server.predict(params={"version": unknown})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "version_not_loaded")
        assert reply.json()["error"]["field"] == "version"
    reply = change(server, "rollback")
    assert (reply.status_code, reply.json()["outcome"]) == (200, "rolled_back")
    assert all_answering(server) == {first}
    while reply.is_success:  # generations of other tests
        reply = change(server, "rollback")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "rollback_refused")
    assert change(server).json()["outcome"] == "reloaded"
    assert all_answering(server) == {second}


def damage_a_byte(models: Models) -> None:
    models.add("z")
    path = next((models.folder / "z").glob("*.time.txt"))
    path.write_bytes(path.read_bytes()[:-2] + b"9\n")


def lose_a_file(models: Models) -> None:
    models.add("z")
    (models.folder / "z" / "measured.json").unlink()


DAMAGES = (
    damage_a_byte,
    lose_a_file,
    lambda models: models.add("z", bounds="none"),  # which only the loading finds
    lambda models: models.add("z", format="confpred-model/99"),
    lambda models: shutil.rmtree(models.folder),
)


def test_a_broken_model_is_refused_and_the_old_one_stays(shared: Shared) -> None:
    server, models = shared.server, shared.models
    counted = 'confpred_reloads_total{outcome="refused"}'
    before, told = server.metric(counted), server.said().count("reload for a request refused: ")
    for damage in DAMAGES:
        damage(models)
        reply = change(server)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (409, "reload_refused")
        assert "/models" in error["message"]
        assert all_answering(server) == {shared.digest}
        shutil.rmtree(models.folder / "z", ignore_errors=True)
    assert server.said().count("reload for a request refused: ") == told + len(DAMAGES)
    assert "Traceback" not in server.said()
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "reload for SIGHUP refused: " in server.said())
    # A worker that starts now answers like the other, though the original is no more.
    server.kill_worker()
    assert all_answering(server) == {shared.digest}
    assert server.metric(counted) == before + len(DAMAGES) + 1


def test_trees_that_lead_nowhere_are_refused_though_their_digests_are_right(shared: Shared) -> None:
    trees = (shared.models.original / TREES).read_text()
    trees = re.sub("split_feature=[0-9]+", "split_feature=99999", trees, count=1)
    files = json.loads((shared.models.original / "card.json").read_text())["files"]
    shared.models.add("b", files=files | {TREES: sha256(trees.encode()).hexdigest()})
    (shared.models.folder / "b" / TREES).write_text(trees)
    reply = change(shared.server)
    assert reply.status_code == 409
    damaged = f"{shared.models.folder}/b/{TREES} is damaged"
    assert f"{damaged}: tree 0 has a split_feature" in reply.json()["error"]["message"]
    assert answering(shared.server) == shared.digest


def test_a_model_that_crashes_native_code_is_refused(shared: Shared) -> None:
    workers = shared.server.workers()
    shared.models.add("crash")
    reply = change(shared.server)
    assert reply.status_code == 409
    said = reply.json()["error"]["message"]
    assert "a process that tried crash ended by SIGSEGV" in said
    assert answering(shared.server) == shared.digest
    assert shared.server.workers() == workers


@pytest.mark.slow(reason="workers end and are replaced")
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_crash_after_a_switch_take_the_former_model_back(
    models: Models, workers: int
) -> None:
    digest = models.add("a")
    with serving(models, "--workers", str(workers)) as server:
        models.add("b")
        assert change(server).status_code == 200
        server.kill_worker(signal.SIGSEGV)
        eventually(lambda: "took generation " in server.said())
        assert all_answering(server) == {digest}
        assert server.metric('confpred_reloads_total{outcome="taken_back"}') == 1


@pytest.mark.slow(reason="workers end and are replaced")
def test_a_worker_that_is_killed_after_a_switch_is_no_reason_to_return(models: Models) -> None:
    models.add("a")
    with serving(models, "--workers", "2") as server:
        digest = models.add("b")
        assert change(server).status_code == 200
        server.kill_worker()
        assert all_answering(server) == {digest}


def test_a_model_replaced_in_place_is_not_seen_before_the_reload(shared: Shared) -> None:
    shutil.rmtree(shared.models.folder / "a")
    replaced = shared.models.add("a")
    assert all_answering(shared.server) == {shared.digest}
    change(shared.server)
    assert all_answering(shared.server) == {replaced}


@pytest.mark.slow(reason="a server loads its models many times")
def test_reloads_do_not_add_up_in_memory(models: Models) -> None:
    models.add("a")
    with serving(models) as server:
        sizes = []
        for number in range(24):
            models.add(f"v{number}")
            assert change(server).json()["outcome"] == "reloaded"
            shutil.rmtree(models.folder / f"v{number}")
            sizes.append(server.memory())
        # By the most of twelve, as the allocator gives back 20 MB now and then; 0.2 MB a reload
        # would be 2.4 MB.
        assert max(sizes[12:]) - max(sizes[:12]) < 1_500_000


def test_a_new_version_is_seen_if_asked_to_look(models: Models) -> None:
    models.add("a")
    with serving(models, "--watch-models", "1") as server:
        digest = models.add("b")
        eventually(lambda: answering(server) == digest)
        models.add("z", format="confpred-model/99")
        eventually(lambda: "reload for changed files refused: " in server.said())
        assert answering(server) == digest


def test_pins_are_read_again_too(shared: Shared) -> None:
    server = shared.server
    pin = {"device": "h100", "problem": ONE["problem"], "provider": "pytorch", "config": {}}
    found: list[object] = [server.predict().json()["choices"][0][0]["source"]]
    for text in (json.dumps({"format": "confpred-pins/1", "pins": [pin]}), "{}"):
        shared.pins.write_text(text)
        found.append(change(server).status_code)
        found.append(server.predict().json()["choices"][0][0]["source"])
    assert found == ["predicted", 200, "pinned", 409, "pinned"]
