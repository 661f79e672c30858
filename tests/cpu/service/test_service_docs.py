"""docs/service.md lists all errors, metrics and modules, and ``--help`` all settings."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from test_service_errors import REFUSALS

from confpred import Predictor
from confpred.cli import cli
from confpred.cli.serve import serve as command
from confpred.errors import InvalidInput
from confpred.service import Settings
from confpred.service.app import create_app
from confpred.service.predict import REFUSALS as REFUSED_WORK
from confpred.service.schema import EXAMPLE
from confpred.service.supervisor import GaveUp

PAGE = (Path(__file__).parents[3] / "docs" / "service.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if "|" in line
]


def test_every_setting_is_an_option_with_its_variable_and_default_in_help() -> None:
    asked = CliRunner().invoke(cli, ["serve", "--help"], terminal_width=100)
    assert asked.exit_code == 0
    assert "confpred serve --help" in PAGE
    described = "".join(asked.output.split())
    named = {field.name for field in fields(Settings)}
    assert {p.name for p in command.params} == {"config", *named}
    for field in fields(Settings):
        option = field.name.replace("_", "-")
        default = "" if field.default is None else f";default:{field.default}"
        if isinstance(field.default, bool):
            default = f";default:{'' if field.default else 'no-'}{option}"
        assert f"--{option}" in described
        assert f"[envvar:CONFPRED_SERVE_{field.name.upper()}{default}" in described


#: Errors with tests of their own: they need another server or client than the contract's test.
ELSEWHERE = {
    *((400, "bad_request"), (401, "unauthorized"), (403, "forbidden"), (408, "request_timeout")),
    *((409, "reload_refused"), (409, "rollback_refused"), (431, "head_too_large")),
    *((404, "no_exchange"), (429, "quota_exceeded"), (507, "no_storage")),
    *((500, "internal_error"), (503, "not_ready"), (503, "stopping")),
}


def test_the_error_table_is_what_the_contract_test_sees() -> None:
    documented = {(int(row[0]), row[1].strip("`")) for row in ROWS if re.match(r"\d{3}$", row[0])}
    seen = {(status, code) for *_, status, code in REFUSALS.values()}
    busy = {(429, code) for code, _ in REFUSED_WORK.values()}
    assert documented == seen | busy | ELSEWHERE


def test_the_exit_statuses_are_those_of_the_command() -> None:
    documented = [int(row[0]) for row in ROWS if re.match(r"\d$", row[0])]
    assert documented == [0, 1, 2, GaveUp.exit_code]


def test_the_metrics_table_is_what_the_server_exposes() -> None:
    documented = {name for row in ROWS for name in re.findall(r"`(confpred_\w+)`", row[0])}
    with TestClient(create_app(Settings(), Predictor.load())) as client:
        text = client.get("/metrics").text
    exposed = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    assert documented == {name for name in exposed if not name.endswith("_created")}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CONFPRED_SERVE_WORKER", "WORKERS"),
        ("CONFPRED_SERVE_MAXBATCH", "MAX_BATCH"),
        ("CONFPRED_SERVE_X", "CONFIG or HOST or PORT or "),
    ],
)
def test_a_misspelled_variable_names_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "2")
    done = CliRunner().invoke(cli, ["serve", "--port", "0", "--host", "192.0.2.1"])
    assert isinstance(done.exception, InvalidInput)
    assert f"{name}='2'" in str(done.exception)
    assert f"allowed: CONFPRED_SERVE_ and {meant}" in str(done.exception)


@pytest.mark.parametrize("form", ["toml", "json"])
def test_an_option_goes_before_a_variable_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    file = tmp_path / f"serve.{form}"
    settings = {"port": 1, "workers": 2, "max_batch": 3, "access_log": False, "log_format": "json"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    file.write_text(json.dumps(settings) if form == "json" else "\n".join(lines))
    monkeypatch.setenv("CONFPRED_SERVE_CONFIG", str(file))
    monkeypatch.setenv("CONFPRED_SERVE_WORKERS", "20")
    monkeypatch.setenv("CONFPRED_SERVE_MAX_BATCH", "30")
    with command.make_context("serve", ["--max-batch", "300"]) as context:
        found = Settings(**context.params)
    assert found == Settings(port=1, workers=20, max_batch=300, access_log=False, log_format="json")
    monkeypatch.delenv("CONFPRED_SERVE_CONFIG")
    with command.make_context("serve", ["--config", str(file), "--port", "9"]) as context:
        assert (context.params["port"], context.params["log_format"]) == (9, "json")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "ports = 1", "ports=1 is not allowed; allowed: port"),
        ("a.toml", 'port = "1"', "port='1'"),
        ("a.toml", "port = true", "an integer"),
        ("a.toml", "port = 1.5", "an integer"),
        ("a.toml", "access_log = 1", "true or false"),
        ("a.toml", "model = 1", "a string"),
        ("a.toml", "port = 65536", "65535"),
        ("a.toml", 'log_format = "xml"', "'text', 'json'"),
        ("a.toml", "port 1", "is not TOML"),
        ("a.json", "port = 1", "is not JSON"),
        ("a.json", "[]", "is not an object"),
    ],
)
def test_a_file_that_is_not_valid_names_the_field(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(cli, ["serve", "--config", str(tmp_path / name)])
    assert done.exit_code != 0
    assert said in f"{done.output} {done.exception}"


def test_the_shown_replies_have_the_form_of_real_ones() -> None:
    shown = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
    choice = shown[0]["choices"][0][0]
    real = Predictor.load().choose(EXAMPLE, "h100").to_json()
    assert list(choice) == list(real)
    assert list(choice["problem"]) == list(real["problem"])
    assert list(shown[1]["error"]) == ["code", "message", "field", "value", "allowed"]


def test_every_module_is_in_the_table(repository: Path) -> None:
    named = re.findall(r"`(\w+\.py)`", PAGE.partition("\n## The code\n")[2])
    there = {path.name for path in (repository / "service").glob("*.py")} - {"__init__.py"}
    assert sorted(named) == sorted(there)
