"""`confpred models`: models as files, here and at a service."""

from __future__ import annotations

import json
from pathlib import Path

import click

from confpred.cli.arguments import aligned, json_option, require_packages
from confpred.errors import InvalidInput, ModelError
from confpred.problem.conv2d import CONVOLUTION

_url = click.option("--url", help="Service to ask, such as http://127.0.0.1:8000.")
_DIGITS = 12  # of a digest that are shown


@click.group("models")
def models() -> None:
    """List, fetch and verify models.

    A service's token is read from CONFPRED_TOKEN.

    \b
    confpred models list
    confpred models pull --url http://127.0.0.1:8000 --device h100
    confpred models verify --url http://127.0.0.1:8000
    """


def _here() -> list[dict[str, str]]:
    """Return name, folder, operation, device, digest and date of the models of this installation
    and user, the newest first."""
    import hashlib

    from confpred.model.card import CARD, read_card
    from confpred.model.folder import shipped_models, users_models

    found = []
    for folder in (shipped_models(), users_models()):
        for path in (*folder.glob(f"*/{CARD}"), *folder.glob(f"*/*/{CARD}")):
            text, card = read_card(path.parent)
            facts = {name: str(card[name]) for name in ("operation", "device", "created")}
            digest = hashlib.sha256(text).hexdigest()
            where = {"name": path.parent.name, "folder": str(path.parent)}
            found.append({**where, **facts, "digest": digest})
    return sorted(found, key=lambda each: each["created"], reverse=True)


@models.command("list")
@_url
@json_option(help="Print them as JSON.")
def list_models(url: str | None, as_json: bool) -> None:
    """List the models of this machine, or of a service."""
    if url is None:
        used: set[tuple[str, str]] = set()
        rows = []
        for each in _here():
            key = each["operation"], each["device"]
            shown = ("name", "operation", "device", "digest", "created")
            rows.append({**{name: each[name] for name in shown}, "in_use": key not in used})
            used.add(key)
    else:
        require_packages("client", "httpx")
        from confpred.client.transfer import models_at

        names = ("name", "device", "digest", "created", "in_use")  # all are of convolutions
        rows = [{name: each[name] for name in names} for each in models_at(url)]
    if as_json:
        return click.echo(json.dumps(rows, indent=1))
    table = [("model", "operation", "device", "digest", "created", "in use")]
    for row in rows:
        digits, yes = str(row["digest"])[:_DIGITS], "yes" if row["in_use"] else ""
        of = str(row.get("operation", CONVOLUTION.name))
        facts = (str(row["device"]), digits, str(row["created"]), yes)
        table.append((str(row["name"]), of, *facts))
    return click.echo("\n".join(aligned(table)))


@models.command("pull")
@click.option("--url", required=True, help="Service to fetch from.")
@click.option("--device", help="The model in use for this device.")
@click.option("--digest", help="The model of this digest, or of 8 or more digits of it.")
def pull(url: str, device: str | None, digest: str | None) -> None:
    """Fetch a model from a service, and use it if it is the newest for its device.

    A pull that was cut off goes on where it was; the model is there whole or not at all.
    """
    require_packages("client", "httpx")
    from confpred.client.transfer import models_at
    from confpred.client.transfer import pull as fetch
    from confpred.model.folder import users_models

    if (device is None) == (digest is None):
        raise click.UsageError("give either --device or --digest")
    offered = models_at(url)
    found = [
        each
        for each in offered
        if (each["in_use"] and each["device"] == device)
        or (digest is not None and len(digest) >= 8 and each["digest"].startswith(digest))
    ]
    if len(found) != 1:
        known = ", ".join(f"{each['device']} {each['digest'][:_DIGITS]}" for each in offered)
        raise InvalidInput("digest" if digest else "device", digest or device, f"one of {known}")
    made = fetch(url, found[0]["digest"], users_models())
    wanted = (CONVOLUTION.name, found[0]["device"])
    newest = next(e["folder"] for e in _here() if (e["operation"], e["device"]) == wanted)
    click.echo(f"{made}: {found[0]['digest']}")
    click.echo(
        "in use from now on" if newest == str(made) else f"{newest} is newer and stays in use"
    )


@models.command("verify")
@_url
def verify(url: str | None) -> None:
    """Compare each model's files with their digests, and with a service those in use.

    Exit code: 0 if all are whole, and the service's where one was asked; else 1.
    """
    from confpred.model.card import read_files

    broken: list[str] = []
    used: dict[str, str] = {}
    for model in _here():
        folder, name = Path(model["folder"]), model["name"]
        try:
            read_files(folder).check_trees(folder)
            click.echo(f"{name}: whole, {model['digest']}")
        except ModelError as error:
            broken.append(name)
            click.echo(f"{name}: {error}")
        if model["operation"] == CONVOLUTION.name:
            used.setdefault(model["device"], model["digest"])
    if url is not None:
        require_packages("client", "httpx")
        from confpred.client.transfer import models_at

        for each in models_at(url):
            device, digest = each["device"], each["digest"]
            if each["in_use"] and used.get(device) != digest:
                broken.append(device)
                click.echo(
                    f"{device}: {url} answers by {digest}, this machine by {used.get(device)}"
                )
    if broken:
        raise ModelError(f"not verified: {', '.join(broken)}")
