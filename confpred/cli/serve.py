"""`confpred serve` and `confpred token`: the HTTP service, and its access tokens."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from confpred import training
from confpred.cli import leave_signals
from confpred.cli.arguments import aligned, require_packages
from confpred.errors import DataError, InvalidInput, nearest
from confpred.service import MODULES, Settings, tokens

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PATHS = {
    "model": click.Path(exists=True, file_okay=False),
    "plan": click.Path(exists=True),
    "tokens": click.Path(exists=True, dir_okay=False),
    "signed_by": click.Path(exists=True, dir_okay=False),
    "exchange": click.Path(file_okay=False),
}
#: Prefix of environment variables that are settings.
_PREFIX = "CONFPRED_SERVE_"


def _option(field: Any) -> click.Option:
    flag = f"--{field.name.replace('_', '-')}"
    if isinstance(field.default, bool):
        flag += f"/--no-{flag[2:]}"
    return click.Option(
        [flag],
        type=_type(field),
        default=field.default,
        help=field.metadata["help"],
        show_default=field.default is not None,
        show_envvar=True,
    )


def _type(field: Any) -> click.ParamType[Any] | None:
    allowed = field.metadata["allowed"]
    if allowed is None:
        return _PATHS.get(field.name)
    return click.IntRange(*allowed) if type(allowed[0]) is int else click.Choice(allowed)


def _read_config(context: click.Context, option: click.Parameter, path: str | None) -> None:
    """Use the settings in the file at `path` as defaults of the options."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_settings_in(Path(path))}


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
        settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        form = "JSON" if path.suffix == ".json" else "TOML (JSON is .json)"
        raise DataError(f"{path} is not {form}: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} is not an object of settings")
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, value in settings.items():
        if name not in defaults:
            raise InvalidInput(f"{path}: {name}", value, nearest(name, defaults))
        kind = str if defaults[name] is None else type(defaults[name])
        if type(value) is not kind:
            raise InvalidInput(f"{path}: {name}", value, _KINDS[kind])
    return settings


_KINDS = {str: "a string", int: "an integer", bool: "true or false"}


def _check_variables() -> None:
    """Refuse environment variables that have the prefix of settings but name none."""
    names = [str(parameter.name).upper() for parameter in serve.params]
    for variable, value in os.environ.items():
        name = variable.removeprefix(_PREFIX)
        if name not in (variable, *names):
            raise InvalidInput(variable, value, f"{_PREFIX} and {nearest(name, names)}")


def _serve(**values: Any) -> None:
    _check_variables()
    require_packages("serve", *MODULES)
    if values["exchange"] is not None:
        require_packages("train", *training.MODULES)
    from confpred.service.supervisor import serve as run  # `--help` does not need it

    leave_signals()
    run(Settings(**values))


_CONFIG = click.Option(
    ["--config"],
    type=click.Path(exists=True, dir_okay=False),
    callback=_read_config,
    is_eager=True,
    expose_value=False,
    show_envvar=True,
    help="File of settings, TOML or JSON (.json), by the names below with _ for -.",
)
serve = click.Command(
    "serve",
    callback=_serve,
    params=[_CONFIG, *(_option(field) for field in fields(Settings))],
    help="""Answer config queries over HTTP.

    \b
    confpred serve &
    curl http://127.0.0.1:8000/v1/predict --json '{"device": "h100", "problem":
      {"n": 32, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3, "groups": 8}}'

    The API's description is at /docs. Each option can also be set by the environment variable that
    is named beside it, and by a file: an option overrides a variable, a variable overrides the
    file.""",
    context_settings={"auto_envvar_prefix": _PREFIX.rstrip("_")},
)


@click.command("token")
@click.argument("name")
@click.option(
    "--tokens",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="CONFPRED_SERVE_TOKENS",
    show_envvar=True,
    help="File of tokens; made if missing.",
)
@click.option(
    "--scope",
    type=click.Choice(tokens.SCOPES),
    default="read",
    show_default=True,
    help="What the token is for: to ask, to send measurements too, or to manage the server too.",
)
@click.option("--revoke", is_flag=True, help="Remove the token of that name.")
def token(name: str, path: Path, scope: tokens.Scope, revoke: bool) -> None:
    """Make an access token called NAME for `confpred serve --tokens FILE`, and print it, once.

    The file has its SHA-256 alone. A running server reads the file again at its next reload.
    """
    with tokens.alone(path):
        present = tokens.read(path) if revoke or path.exists() else ()
        others = tuple(token for token in present if token.name != name)
        if revoke and others == present:
            raise InvalidInput("name", name, f"the name of a token in {path}")
        if not revoke and others != present:
            raise InvalidInput("name", name, f"a name that no token in {path} has")
        if not revoke and not (name.isprintable() and 1 <= len(name) <= 64):
            raise InvalidInput("name", name, "1 to 64 printable characters")
        secret, token = tokens.make(name, scope)
        tokens.write(path, others if revoke else (*present, token))
    click.echo(f"revoked {name}; servers follow at their next reload" if revoke else secret)


@click.command("exchange")
@click.argument("action", type=click.Choice(("list", "revoke", "requeue")))
@click.argument("name", required=False)
@click.option(
    "--exchange",
    "folder",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="CONFPRED_SERVE_EXCHANGE",
    show_envvar=True,
    help="The folder of confpred serve --exchange.",
)
def exchange(action: str, name: str | None, folder: Path) -> None:
    """List the uploads of hosts, revoke them, or have them checked again (requeue).

    NAME is that of a token, or an upload's id, of which 8 digits are enough. Published models that
    were trained on revoked rows are withdrawn; then reload the server.
    """
    require_packages("serve", *MODULES)
    from confpred.service.exchange import Exchange

    store = Exchange(folder)
    if name is None and action != "list":
        raise click.UsageError(f"{action} needs the NAME of a token or an upload")
    changed, withdrawn = store.latest(1000) if name is None else store.named(name), []
    if name is not None and action == "revoke":
        withdrawn = store.revoke(name)
    elif name is not None and action == "requeue":
        store.requeue(name)
    table = [("upload", "token", "state", "rows", "received", "reason")]
    for upload in filter(None, (store.find(upload.id) for upload in changed)):
        rows = "" if upload.rows is None else str(upload.rows)
        words = (upload.token, upload.state, rows, upload.received, upload.reason or "")
        table.append((upload.id[:12], *words))
    click.echo("\n".join([*aligned(table), *(f"withdrawn: {model}" for model in withdrawn)]))
