"""docs/service.md tells all of the settings, errors and metrics, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from test_service_errors import REFUSALS

from confpred import Predictor
from confpred.cli import cli
from confpred.cli.serve import command
from confpred.service.metrics import Metrics
from confpred.service.predict import REFUSALS as REFUSED_WORK
from confpred.service.schema import EXAMPLE
from confpred.service.settings import Settings

PAGE = (Path(__file__).parents[3] / "docs" / "service.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if "|" in line
]


def test_every_setting_is_documented_with_its_variable_and_default() -> None:
    documented = {row[0]: row[1:3] for row in ROWS if row[0].startswith("`--")}
    assert len(documented) == len(fields(Settings))
    for field in fields(Settings):
        default = "" if field.default is None else str(field.default)
        option = f"`--{field.name.replace('_', '-')}`"
        variable = f"`CONFPRED_SERVE_{field.name.upper()}`"
        assert documented[option] == [variable, default.lower() if default == "True" else default]


def test_every_setting_is_an_option_with_help() -> None:
    said = CliRunner().invoke(cli, ["serve", "--help"])
    assert said.exit_code == 0
    assert {p.name for p in command.params} == {field.name for field in fields(Settings)}
    for field in fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in said.output


@pytest.mark.parametrize(
    ("variable", "value", "name", "expected"),
    [
        ("CONFPRED_SERVE_PORT", "9999", "port", 9999),
        ("CONFPRED_SERVE_MAX_BATCH", "7", "max_batch", 7),
        ("CONFPRED_SERVE_ACCESS_LOG", "false", "access_log", False),
    ],
)
def test_the_environment_sets_what_the_command_line_does_not(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str, expected: object
) -> None:
    monkeypatch.setenv(variable, value)
    with command.make_context("serve", []) as context:
        assert context.params[name] == expected
    with command.make_context(
        "serve", ["--port", "1", "--max-batch", "1", "--access-log"]
    ) as context:
        assert context.params[name] in (1, True)
        assert isinstance(context.command, click.Command)


def test_the_error_table_is_what_the_contract_test_sees() -> None:
    documented = {(int(row[0]), row[1].strip("`")) for row in ROWS if row[0].isdigit()}
    # The others need a faulty, an unready and a busy server, which have tests of their own.
    busy = {(503, code) for code, _ in REFUSED_WORK.values()}
    seen = {(status, code) for _, status, code in REFUSALS.values()}
    assert documented == seen | busy | {(500, "internal_error"), (503, "not_ready")}


def test_the_metrics_table_is_what_the_server_exposes() -> None:
    documented = {row[0].strip("`") for row in ROWS if row[0].startswith("`confpred_")}
    exposed = set(re.findall(r"^# HELP (\S+)", Metrics().text().decode(), re.MULTILINE))
    assert documented == {name for name in exposed if not name.endswith("_created")}


def test_the_shown_replies_have_the_form_of_real_ones() -> None:
    shown = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
    choice = shown[0]["choices"][0][0]
    real = Predictor.load().choose(EXAMPLE, "h100").to_json()
    assert list(choice) == list(real)
    assert list(choice["problem"]) == list(real["problem"])
    assert list(shown[1]["error"]) == ["code", "message", "field", "value", "allowed"]


def test_the_documented_body_limit_is_the_default() -> None:
    assert Settings().max_body_bytes == 2**20
