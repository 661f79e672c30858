"""Fetch a service's models and measurements as files; send a sampler's shards as it writes them."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx

from confpred import errors
from confpred.client.answers import check_address
from confpred.client.clients import Client
from confpred.client.served import TOKEN
from confpred.data.remote import Folder, read_bytes, write_bytes
from confpred.errors import ConfpredError, ModelError, ServiceError, StorageError
from confpred.files import raising, user_folder
from confpred.model.card import CARD, SIGNATURE, Card, card_of, read_files, signed_by
from confpred.model.folder import FILES, models_in, publish

log = logging.getLogger(__name__)
#: Seconds for a connection, and for each part of a file.
_TIMEOUT_S = 30.0
#: Seconds between two looks for new shards of a sampler, and for an upload with its retries.
_LOOK_S, _UPLOAD_S = 2.0, 120.0
#: Bytes of a file of a model, of which the largest has 3 MB, and of a signature.
_MOST_BYTES, _MOST_SIGNATURE = 2**26, 2**16
#: In a sampler's folder: the names of the shards that were sent, a line each.
SENT = ".submitted"


def _headers() -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}


def _json(http: httpx.Client, path: str) -> dict[str, Any]:
    """Return the reply to a request."""
    try:
        reply = http.get(path)
        content: dict[str, Any] = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServiceError(f"no reply to {path}: {error}", None, "-") from error
    if reply.status_code != 200:
        said = content.get("error", {}).get("message", "")
        request = reply.headers.get("x-request-id", "-")
        raise ServiceError(f"{path}: {reply.status_code} {said}", reply.status_code, request)
    return content


@contextmanager
def _service(url: str) -> Iterator[httpx.Client]:
    check_address(url)
    with httpx.Client(base_url=url, headers=_headers(), timeout=_TIMEOUT_S) as http:
        yield http


def models_at(url: str) -> list[dict[str, Any]]:
    """Return the models that a service lists, as its ``/v1/models`` does."""
    with _service(url) as http:
        return list(_json(http, "/v1/models")["models"])


def pull(url: str, digest: str, device: str, models: Path, signers: Path | None = None) -> Path:
    """Fetch the model of `digest` from a service, and put it among `models`: whole or not at all.

    A pull that was cut off goes on where it was. Each file is compared with its SHA-256: that of
    the card is the digest, and the card has the others.

    Args:
        url: address of the service.
        digest: SHA-256 of the model's card.
        device: key of the device that the model has to be for.
        models: folder of model folders.
        signers: file of signers, one of whom must have signed the card; None accepts any card.

    Returns:
        The folder of the model, which may have been there.

    Raises:
        ServiceError: the service does not answer, or lacks the model.
        ModelError: the files are not those of such a model, or it is not signed.
        StorageError: the file system refused.
    """
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ModelError(f"{url} names a model {digest[:80]!r}, which is no SHA-256")
    for path in models_in(models):
        if hashlib.sha256((path / CARD).read_bytes()).hexdigest() == digest:
            read_files(path)  # which says if it is damaged
            if signers is not None:
                signed_by(path, signers)
            return path
    begun = user_folder("cache") / "pulls" / digest
    with raising(StorageError, f"write {begun}"):
        begun.mkdir(parents=True, exist_ok=True)
        with _service(url) as http:
            _fetch(http, f"/v1/models/{digest}/{CARD}", begun / CARD, digest)
            card = card_of(begun).card
            _check_card(card, device)
            for name, wanted in card.files.items():
                _fetch(http, f"/v1/models/{digest}/{name}", begun / name, wanted)
            signature = http.get(f"/v1/models/{digest}/{SIGNATURE}")
        if signature.status_code == 200:
            (begun / SIGNATURE).write_bytes(signature.content[:_MOST_SIGNATURE])
        if signers is not None:
            signed_by(begun, signers)
        read_files(begun).check_trees(begun)
        made = publish(begun, models)
        shutil.rmtree(begun, ignore_errors=True)
    return made


def _check_card(card: Card, device: str) -> None:
    """Refuse a card that a model for `device` of this version cannot have."""
    if card.device != device:
        raise ModelError(f"the model is for {card.device!r}, not for {device}")
    latest = datetime.now(timezone.utc) + timedelta(days=1)
    if not card.created or card.created[:10] > f"{latest:%Y-%m-%d}":
        raise ModelError(f"the model's date is {card.created!r}, missing or in the future")
    if unknown := [name for name in card.files if not FILES.fullmatch(name)]:
        raise ModelError(f"the model has a file {unknown[0][:80]!r}, which no model has")


def _fetch(http: httpx.Client, path: str, file: Path, digest: str) -> None:
    """Fetch the bytes that `file` lacks of a file with this SHA-256."""
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == digest:
        return
    part = file.with_name(f"{file.name}.part")
    begun = part.stat().st_size if part.exists() else 0
    try:
        with http.stream("GET", path, headers={"range": f"bytes={begun}-"}) as reply:
            if reply.status_code == 416:  # all of it is here
                pass
            elif reply.status_code not in (200, 206):
                request = reply.headers.get("x-request-id", "-")
                raise ServiceError(f"{path}: {reply.status_code}", reply.status_code, request)
            else:
                with part.open("ab" if reply.status_code == 206 else "wb") as out:
                    for piece in reply.iter_bytes():
                        if out.tell() + len(piece) > _MOST_BYTES:
                            raise ModelError(f"{path} has more than {_MOST_BYTES} bytes")
                        out.write(piece)
    except httpx.HTTPError as error:
        message = f"{path} was cut off: {error}; the same command goes on from there"
        raise ServiceError(message, None, "-") from error
    if hashlib.sha256(part.read_bytes()).hexdigest() != digest:
        part.unlink()
        raise ModelError(f"{path} of {http.base_url} is damaged: its SHA-256 is not {digest}")
    os.replace(part, file)


def fetch_rows(url: str, folder: Path) -> None:
    """Fetch the rows of all uploads that a service has admitted, a file each; uploads that are
    taken back meanwhile are skipped.

    Raises:
        ServiceError: the service does not answer, or takes no measurements.
    """
    with _service(url) as http:
        for upload in _json(http, "/v1/measurements")["measurements"]:
            reply = http.get(f"/v1/measurements/{upload['id']}/rows")
            if reply.status_code == 404:
                log.warning("%s has no rows of %.12s any more", url, upload["id"])
            elif reply.status_code != 200 or not re.fullmatch("[0-9a-f]{64}", upload["id"]):
                raise ServiceError(f"no rows of {upload['id']:.64}", reply.status_code, "-")
            else:
                (folder / f"part-{upload['id']}.parquet").write_bytes(reply.content)


@contextmanager
def submitting(url: str, folder: Folder) -> Iterator[None]:
    """Send the shards of a sampler's `folder` to the service at `url` while the block runs, and
    the remaining ones at its end, control configs first. A refusal is logged and stops nothing; the
    same command sends the remaining shards later."""
    done = threading.Event()
    with Client(url, token=os.environ.get(TOKEN) or None, timeout_s=_UPLOAD_S) as client:

        def work() -> None:
            while not done.wait(_LOOK_S):
                _send(client, folder)

        thread = threading.Thread(target=work, name="submit")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            _send(client, folder)


def _send(client: Client, folder: Folder) -> None:
    """Send each shard of `folder` that its file `SENT` does not list, and list it there.

    A failure is logged, and the next call tries again. Shards in a folder are whole.
    """
    record = folder / SENT
    try:
        sent = (read_bytes(record) or b"").decode(errors="replace").split()
        shards = [*folder.glob("anchors-*.parquet"), *folder.glob("rows-*.parquet")]
    except StorageError as error:
        log.warning("%s: nothing is sent to %s", error, client.url)
        return
    for shard in [shard for shard in shards if shard.name not in sent]:
        try:
            client.submit(shard)
            sent.append(shard.name)
            write_bytes(record, "\n".join(sent).encode())
        except (ConfpredError, OSError) as error:
            log.warning("%s was not sent to %s: %s", shard.name, client.url, error)
            if isinstance(error, errors.ServiceUnavailable):  # the others would fail, too
                return
