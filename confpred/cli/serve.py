"""`confpred serve`: the HTTP service."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from confpred.service.settings import Settings

_TYPES: dict[str, click.ParamType[Any]] = {
    "port": click.IntRange(0, 65_535),
    "model": click.Path(exists=True, file_okay=False),
    "pins": click.Path(exists=True, dir_okay=False),
    "workers": click.IntRange(1, 64),
    "max_batch": click.IntRange(1, 100_000),
    "max_queue": click.IntRange(1, 10_000_000),
    "deadline": click.IntRange(1, 86_400),
    "cache_mib": click.IntRange(1, 65_536),
}
#: The names that options had in confpred 0.1.0.
_FORMER_FLAGS = {"pins": ("--plan",)}


def _option(field: Any) -> click.Option:
    flag = f"--{field.name.replace('_', '-')}"
    if isinstance(field.default, bool):
        flag += f"/--no-{flag[2:]}"
    return click.Option(
        [flag, *_FORMER_FLAGS.get(field.name, ())],
        type=_TYPES.get(field.name),
        default=field.default,
        help=field.metadata["help"],
        show_default=field.default is not None,
        show_envvar=True,
    )


def _serve(**values: Any) -> None:
    from confpred.service.server import serve  # the web stack, which `--help` can do without

    serve(Settings(**values))


command = click.Command(
    "serve",
    callback=_serve,
    params=[_option(field) for field in fields(Settings)],
    help="""Answer config queries over HTTP.

    \b
    confpred serve &
    curl http://127.0.0.1:8000/v1/predict --json '{"device": "h100", "problem":
      {"n": 32, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3, "groups": 8}}'

    The API's description is at /docs. Each option can also be set by the environment variable that
    is named beside it.""",
    context_settings={"auto_envvar_prefix": "CONFPRED_SERVE"},
)
