"""The files that operators start from are parsed, and run as far as this machine can."""

from __future__ import annotations

import json
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient
from served import COMMAND, ONE, running

from confpred.cli.serve import serve as command
from confpred.service import Settings, tokens
from confpred.service.app import SCOPES, create_app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"
UNIT = (DEPLOY / "confpred.service").read_text()
NGINX = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())


@pytest.fixture
def secret(tmp_path: Path) -> str:
    said, token = tokens.make("host", "read")
    tokens.write(tmp_path / "tokens.json", [token])
    return said


pytestmark = pytest.mark.usefixtures("small_model")


def unit() -> ConfigParser:
    # A list may be written as one key more than once, as systemd has it; none is here.
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT)
    return parser


@pytest.mark.parametrize("checker", ["systemd-analyze", "nginx"])
def test_the_program_itself_takes_its_file(tmp_path: Path, checker: str) -> None:
    if shutil.which(checker) is None:  # other tests read the file without it
        return
    if checker == "nginx":
        plain = re.sub(r"ssl_\S+ [^;]*;", "", NGINX).replace("443 ssl", "8443")
        path, text = tmp_path / "nginx.conf", f"events {{}} http {{ {plain} }}"
        check = ["nginx", "-t", "-p", str(tmp_path), "-c", str(path)]
    else:
        path, text = tmp_path / "a.service", UNIT.replace("/opt/confpred/bin/confpred", COMMAND)
        check = ["systemd-analyze", "verify", "--man=no", str(path)]
    path.write_text(text)
    done = subprocess.run(check, check=True, capture_output=True, text=True, timeout=60)
    assert checker == "nginx" or path.name not in done.stderr  # where it warns


def test_the_unit_fits_the_settings_beside_it() -> None:
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[1:] == ["serve", "--config", "/etc/confpred/serve.toml"]
    settings = Settings(**tomllib.loads((DEPLOY / "serve.toml").read_text()))
    assert int(service["TimeoutStopSec"]) >= settings.grace + 10
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert settings.tokens is not None


def test_the_unit_s_reload_fails_when_it_is_refused(tmp_path: Path, model_folder: Path) -> None:
    words = shlex.split(unit()["Service"]["ExecReload"])
    assert int(unit()["Service"]["TimeoutStartSec"]) > int(words[words.index("--max-time") + 1])
    folder, path = tmp_path / "models" / "a", tmp_path / "tokens.json"
    shutil.copytree(model_folder, folder)
    secret, kept = tokens.make("systemd", "admin")
    tokens.write(path, [kept])
    (tmp_path / "reload.header").write_text(f"Authorization: Bearer {secret}\n")
    with running(tmp_path, "--model", str(folder.parent), "--tokens", str(path)) as server:

        def reload() -> subprocess.CompletedProcess[str]:
            command = [word.replace("/etc/confpred", str(tmp_path)) for word in words]
            command = [word.replace(":8000", f":{server.port}") for word in command]
            return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

        assert (reload().returncode, '"outcome":"unchanged"' in reload().stdout) == (0, True)
        (folder / "card.json").write_text("{")
        done = reload()
        assert done.returncode != 0
        assert json.loads(done.stdout)["error"]["code"] == "reload_refused"
        (tmp_path / "reload.header").unlink()
        assert reload().returncode != 0
    assert reload().returncode != 0


@pytest.mark.slow(reason="a server is told to reload, and its watchdog is looked at")
def test_systemd_is_told_how_the_server_is(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "models" / "a"
    shutil.copytree(model_folder, folder)
    name, said = str(tmp_path / "notify"), queue.SimpleQueue[dict[str, str]]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name)

        def listen() -> None:
            while True:
                lines = systemd.recv(4096).decode().splitlines()
                said.put(dict(line.split("=", 1) for line in lines))

        threading.Thread(target=listen, daemon=True).start()

        def heard(key: str) -> dict[str, str]:
            """Return the next message that has `key`."""
            end = time.monotonic() + 60
            while key not in (message := said.get(timeout=60)):
                assert time.monotonic() < end
            return message

        told = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "400000"}
        with running(tmp_path, "--model", str(folder.parent), **told) as server:
            assert heard("READY") == {"READY": "1"}
            for status in ("generation [0-9a-f]{12} answers", "reload refused: .*card.json is .*"):
                before = time.monotonic() * 1e6
                server.process.send_signal(signal.SIGHUP)
                begun = heard("RELOADING")
                assert before < int(begun["MONOTONIC_USEC"]) < time.monotonic() * 1e6
                ended = heard("READY")
                assert re.fullmatch(status, ended["STATUS"])
                (folder / "card.json").write_text("{")
            start = time.monotonic()
            for _ in range(6):
                heard("WATCHDOG")
            assert 0.6 < time.monotonic() - start < 10


def test_the_unit_s_command_runs_by_its_settings(
    tmp_path: Path, model_folder: Path, secret: str
) -> None:
    text = (DEPLOY / "serve.toml").read_text()
    text = text.replace("/srv/confpred/models", str(model_folder))
    text = text.replace("/etc/confpred", str(tmp_path)).replace("workers = 4", "workers = 2")
    (tmp_path / "serve.toml").write_text(text)
    with running(tmp_path, "--config", str(tmp_path / "serve.toml")) as server:
        header = {"authorization": f"Bearer {secret}"}
        assert server.predict(headers=header).status_code == 200
        assert server.predict().status_code == 401
        assert len(server.workers()) == 2


def instructions() -> dict[str, str]:
    """Return the last of each kind in the container file."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split(None, 1) for line in lines)


def test_the_container_s_command_runs_and_is_healthy(tmp_path: Path, secret: str) -> None:
    found = instructions()
    known = "FROM RUN COPY USER EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD"
    assert found.keys() == set(known.split())
    program, *words = json.loads(found["ENTRYPOINT"]) + json.loads(found["CMD"])
    assert (program, words[0], found["STOPSIGNAL"]) == ("confpred", "serve", "SIGTERM")
    assert int(found["USER"]) > 0
    assert found["EXPOSE"] == words[words.index("--port") + 1]
    words[words.index("--port") + 1] = "0"
    words[words.index("--tokens") + 1] = str(tmp_path / "tokens.json")
    with command.make_context("serve", words[1:]) as context:
        assert Settings(**context.params).host == "0.0.0.0"
    text = (DEPLOY / "Containerfile").read_text()
    left_out = re.search(r"pip uninstall --yes ([\w ]+?) &&", text)
    assert left_out is not None
    # Every process of the server runs this first.
    blocked = f"import sys; sys.modules.update(dict.fromkeys({left_out[1].split()!r}))"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    with running(tmp_path, *words[1:], PYTHONPATH=str(tmp_path)) as server:
        header = {"authorization": f"Bearer {secret}"}
        choice = server.predict(headers=header).json()["choices"][0][0]
        assert choice["source"] == "predicted"
        kind, _, check = found["HEALTHCHECK"].partition(" CMD ")
        assert "--interval" in kind
        python, *rest = json.loads(check.replace(":8000/", f":{server.port}/"))
        assert python == "python"
        subprocess.run([sys.executable, *rest], check=True, timeout=60)


def test_the_unit_lets_the_exchange_be_written() -> None:
    writable = unit()["Service"]["ReadWritePaths"].split()
    settings = re.findall(r'^#? ?exchange = "(.*)"$', (DEPLOY / "serve.toml").read_text(), re.M)
    assert settings == [path.removeprefix("-") for path in writable]


def test_the_proxy_fits_the_service() -> None:
    assert NGINX.count("{") == NGINX.count("}")
    statements = [part.strip() for part in re.split(r"[;{}]", NGINX) if part.strip()]
    values = {first: rest for first, _, rest in (s.partition(" ") for s in statements)}
    assert int(values["keepalive_timeout"][:-1]) < Settings().idle_timeout
    assert int(values["client_max_body_size"][:-1]) * 2**20 >= Settings().max_body_bytes
    closed = re.findall(r"location (?:~ |= )(\S+) \{\s*return 403;", NGINX)
    # Jobs are listed from outside, and a token of scope admin starts one.
    admin = [path for path, scope in SCOPES.items() if scope == "admin" and path != "/v1/jobs"]
    for path in (*admin, "/metrics"):
        assert any(re.search(pattern, path) for pattern in closed), path
    assert not any(re.search(pattern, "/v1/models") for pattern in closed)


def test_the_alerts_ask_for_metrics_that_there_are() -> None:
    with TestClient(create_app(Settings())) as client:
        client.post("/v1/predict", json=ONE)
        text = client.get("/metrics").text
    there = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    assert len(group["rules"]) == 13
    for rule in group["rules"]:
        assert {"alert", "expr", "annotations"} <= rule.keys()
        for name in re.findall(r"confpred_\w+", rule["expr"]):
            assert name.removesuffix("_bucket") in there
    asked = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert 'status!="503"' in asked["ConfpredErrors"]  # overload is an alert of its own
