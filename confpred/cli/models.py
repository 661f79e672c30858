"""`confpred models`: models as files, here and at a service."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from confpred.cli.arguments import FILE, aligned, json_option, require_packages
from confpred.errors import InvalidInput, ModelError
from confpred.problem.conv2d import CONVOLUTION

_url = click.option("--url", help="Service to ask, such as http://127.0.0.1:8000.")
_signed_by = click.option(
    "--signed-by", "signers", type=FILE, help="Accept only models signed by one of these signers."
)
_DIGITS = 12  # digits of a digest that are shown


@click.group("models")
def models() -> None:
    """List, fetch and verify models.

    A service's token is read from CONFPRED_TOKEN.

    \b
    confpred models list
    confpred models pull --url http://127.0.0.1:8000 --device h100
    confpred models verify --url http://127.0.0.1:8000
    """


_SHOWN: tuple[str, ...] = ("name", "operation", "device", "digest", "created", "in_use")


def _here(damaged: list[str] | None = None) -> list[dict[str, Any]]:
    """Return facts (`_SHOWN` and the folder) of the models of this installation and user, the
    newest first; the newest of an operation and device is in use. Those whose cards are damaged
    are named on stderr, and added to `damaged`."""
    import hashlib

    from confpred.model.card import read_card, refusing
    from confpred.model.folder import (
        models_in,
        other_shipped_models,
        shipped_models,
        users_models,
    )

    models: list[dict[str, Any]] = []
    shipped = [*models_in(shipped_models()), *other_shipped_models()]
    for folder in (*shipped, *models_in(users_models())):
        try:
            text, card = read_card(folder)
            with refusing(folder):
                facts = {name: str(card[name]) for name in ("operation", "device", "created")}
        except ModelError as error:
            click.echo(f"confpred: {error}", err=True)
            if damaged is not None:
                damaged.append(folder.name)
            continue
        digest = hashlib.sha256(text).hexdigest()
        models.append(facts | {"name": folder.name, "folder": folder, "digest": digest})
    models.sort(key=lambda model: model["created"], reverse=True)
    used: set[tuple[str, str]] = set()
    for model in models:
        key = model["operation"], model["device"]
        model["in_use"] = key not in used
        used.add(key)
    return models


def _by_device(models: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the models of convolutions that are in use."""
    mine = (model for model in models if model["operation"] == CONVOLUTION.name)
    return {model["device"]: model for model in mine if model["in_use"]}


@models.command("list")
@_url
@json_option(help="Print them as JSON.")
def list_models(url: str | None, as_json: bool) -> None:
    """List the models of this machine, or of a service."""
    if url is None:
        models, names = _here(), _SHOWN
    else:
        require_packages("client", "httpx")
        from confpred.client.transfer import models_at

        models = models_at(url)  # all are of convolutions
        names = tuple(name for name in _SHOWN if name != "operation")
    rows = [{name: model[name] for name in names} for model in models]
    if as_json:
        return click.echo(json.dumps(rows, indent=1))
    table = [("model", "operation", "device", "digest", "created", "in use")]
    for row in rows:
        digits, yes = row["digest"][:_DIGITS], "yes" if row["in_use"] else ""
        operation = row.get("operation", CONVOLUTION.name)
        table.append((row["name"], operation, row["device"], digits, row["created"], yes))
    return click.echo("\n".join(aligned(table)))


@models.command("pull")
@click.option("--url", required=True, help="Service to fetch from.")
@click.option("--device", help="The model in use for this device.")
@click.option("--digest", help="The model of this digest, or of 8 or more digits of it.")
@_signed_by
def pull(url: str, device: str | None, digest: str | None, signers: Path | None) -> None:
    """Fetch a model from a service, and use it if it is the newest for its device.

    A pull that was interrupted continues where it was; the model is added whole or not at all.
    """
    require_packages("client", "httpx")
    from confpred.client.transfer import models_at
    from confpred.client.transfer import pull as fetch
    from confpred.model.folder import users_models

    if (device is None) == (digest is None):
        raise click.UsageError("give either --device or --digest")
    offered = models_at(url)
    matching = [
        model
        for model in offered
        if (model["in_use"] and model["device"] == device)
        or (digest is not None and len(digest) >= 8 and model["digest"].startswith(digest))
    ]
    if len(matching) != 1:
        choices = ", ".join(f"{model['device']} {model['digest'][:_DIGITS]}" for model in offered)
        raise InvalidInput("digest" if digest else "device", digest or device, f"one of {choices}")
    wanted = device or str(matching[0]["device"])
    for model in _here():
        if model["digest"] == matching[0]["digest"] and signers is None:
            used = "in use" if model["in_use"] else "not in use, as a newer one is"
            click.echo(f"{model['folder']}: here already, and {used}")
            return
    made = fetch(url, str(matching[0]["digest"]), wanted, users_models(), signers)
    newest = _by_device(_here())[wanted]["folder"]
    click.echo(f"{made}: {matching[0]['digest']}, {_signed(made, signers)}")
    click.echo("in use from now on" if newest == made else f"{newest} is newer and stays in use")


def _signed(folder: Path, signers: Path | None) -> str:
    """Return in words who signed a model; raise an error if none of `signers` did."""
    from confpred.model.card import SIGNATURE, signed_by

    if signers is not None:
        return f"signed by {signed_by(folder, signers)}"
    return "signed, which --signed-by verifies" if (folder / SIGNATURE).exists() else "unsigned"


@models.command("verify")
@_url
@_signed_by
def verify(url: str | None, signers: Path | None) -> None:
    """Compare each model's files with their digests, and the models in use with a service's.

    Exit code: 0 if all are whole and, with --url, the service's; else 1.
    """
    from confpred.model.card import read_files

    broken: list[str] = []
    models = _here(broken)
    for model in models:
        folder, name = model["folder"], model["name"]
        try:
            read_files(folder).check_trees(folder)
            click.echo(f"{name}: whole, {model['digest']}, {_signed(folder, signers)}")
        except ModelError as error:
            broken.append(name)
            click.echo(f"{name}: {error}")
    if url is not None:
        require_packages("client", "httpx")
        from confpred.client.transfer import models_at

        used = {device: model["digest"] for device, model in _by_device(models).items()}
        for served in models_at(url):
            device, digest = served["device"], served["digest"]
            if served["in_use"] and used.get(device) != digest:
                broken.append(device)
                click.echo(
                    f"{device}: {url} answers by {digest}, this machine by {used.get(device)}"
                )
    if broken:
        click.echo(f"confpred: not verified: {', '.join(broken)}", err=True)
        sys.exit(1)
