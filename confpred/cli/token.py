"""`confpred token`: who may ask the HTTP service, and who may manage it."""

from __future__ import annotations

from pathlib import Path

import click

from confpred.errors import InvalidInput
from confpred.service import tokens


@click.command(name="token")
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
    help="What the token is for: to ask, or to manage the server too.",
)
@click.option("--revoke", is_flag=True, help="Remove the token of that name.")
def command(name: str, path: Path, scope: tokens.Scope, revoke: bool) -> None:
    """Make an access token called NAME for `confpred serve --tokens FILE`, and print it, once.

    The file keeps its SHA-256 alone. A server that runs reads the file again at its next reload.
    """
    with tokens.alone(path):
        known = tokens.read(path) if revoke or path.exists() else ()
        others = tuple(token for token in known if token.name != name)
        if revoke:
            if len(others) == len(known):
                raise InvalidInput("name", name, f"the name of a token in {path}")
            tokens.write(path, others)
            click.echo(f"revoked {name}; servers follow at their next reload")
            return
        if len(others) != len(known):
            raise InvalidInput("name", name, f"a name that no token in {path} has")
        if not name.isprintable() or not 1 <= len(name) <= 64:
            raise InvalidInput("name", name, "1 to 64 printable characters")
        secret, token = tokens.make(name, scope)
        tokens.write(path, (*known, token))
    click.echo(secret)
