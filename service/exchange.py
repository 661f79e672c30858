"""The folder that measurements come back to and models are published from, shared by all processes.

    exchange.sqlite      each upload and each job, and what became of it
    incoming/            uploads that were acknowledged and are not checked yet
    admitted/            rows that passed, as parts: a retraining learns from them
    controls/            times of control configs (anchors), which uploads are compared with
    quarantine/          uploads that failed, as they came
    models/, withdrawn/  models that a retraining published, and those that were rolled back

An upload is known by the SHA-256 of its bytes. It is acknowledged once its file and its row in the
database are on the disk, so a crash at any moment loses nothing that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from confpred.errors import InvalidInput, ModelError, StorageError
from confpred.model.card import CARD, Card, read_card, refusing
from confpred.model.folder import model_folders, shipped_models

from . import Settings
from .requests import RequestError, shorten
from .schema import PARQUET, Job, Submission

INCOMING, ADMITTED, CONTROLS, QUARANTINE = "incoming", "admitted", "controls", "quarantine"
PUBLISHED, WITHDRAWN = "models", "withdrawn"
#: Published models of a device that are kept.
KEPT = 5
_TABLES = """
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, rows INTEGER, reason TEXT, received REAL NOT NULL,
    token TEXT NOT NULL, bytes INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS uploads_by_state ON uploads (state, received);
CREATE INDEX IF NOT EXISTS uploads_by_token ON uploads (token, received);
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT NOT NULL, upload TEXT NOT NULL, PRIMARY KEY (run_id, upload));
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, device TEXT NOT NULL, state TEXT NOT NULL,
    started TEXT, ended TEXT, reason TEXT);
"""
_DAY_S = 86_400
#: Bytes of an upload that are held in memory before they are written.
_PIECE = 262_144
#: A check may end its process so often before the upload is quarantined for it.
_MOST_ATTEMPTS = 2


class Exchange:
    """The folder of one server. Safe to share between threads and processes, not to fork."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`, which is made if it is missing.

        Raises:
            StorageError: it cannot be made or written to.
        """
        self.folder = folder
        self._lock = threading.Lock()
        try:
            for name in (INCOMING, ADMITTED, CONTROLS, QUARANTINE, PUBLISHED, WITHDRAWN):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                folder / "exchange.sqlite",
                timeout=30,
                isolation_level=None,
                check_same_thread=False,
            )
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_TABLES}")
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise StorageError(f"cannot use {folder}: {reason}") from error

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Change the database in one step, which is on the disk when the block ends."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    # Uploads

    def find(self, upload: str) -> Submission | None:
        """Return what became of an upload; None if it is not known."""
        return next(iter(self._submissions("WHERE id = ?", upload)), None)

    def admitted(self) -> list[Submission]:
        """Return the uploads whose rows are in the data, in the order in which they came."""
        return self._submissions("WHERE state = 'admitted' AND rows > 0 ORDER BY received")

    def latest(self, count: int) -> list[Submission]:
        """Return the latest uploads, the last one first."""
        return self._submissions("ORDER BY received DESC LIMIT ?", count)

    def _submissions(self, which: str, *values: Any) -> list[Submission]:
        query = f"SELECT id, state, rows, reason, received FROM uploads {which}"
        rows = self._rows(query, *values)
        return [Submission(i, s, n, reason, _shown(when)) for i, s, n, reason, when in rows]

    def used(self, token: str) -> int:
        """Return the bytes that were uploaded with a token within a day."""
        query = "SELECT coalesce(sum(bytes), 0) FROM uploads WHERE token = ? AND received > ?"
        return int(self._rows(query, token, time.time() - _DAY_S)[0][0])

    def keep(self, arrived: Path, upload: str, token: str, size: int) -> Submission:
        """Take a file that has arrived whole, as an upload if it is none yet. It is on the disk,
        and known, when this returns."""
        with self._changing() as db:
            known = db.execute("SELECT 1 FROM uploads WHERE id = ?", (upload,)).fetchone()
            if known is None:
                os.replace(arrived, self.path(INCOMING, upload))
                _flush(self.folder / INCOMING)
                columns = "uploads (id, state, received, token, bytes)"
                row = (upload, "received", time.time(), token, size)
                db.execute(f"INSERT INTO {columns} VALUES (?, ?, ?, ?, ?)", row)
        return self._submissions("WHERE id = ?", upload)[0]

    def path(self, room: str, upload: str) -> Path:
        """Return the file of an upload in a room of the folder."""
        return self.folder / room / f"part-{upload}.parquet"

    def next_received(self) -> str | None:
        """Return the upload to check, the oldest. One that has ended the checking process before is
        quarantined."""
        query = (
            "SELECT id, attempts FROM uploads WHERE state = 'received' ORDER BY received LIMIT 1"
        )
        for upload, attempts in self._rows(query):
            if attempts >= _MOST_ATTEMPTS:
                self.quarantine(upload, "the check of it did not come to an end")
                return self.next_received()
            with self._changing() as db:
                db.execute("UPDATE uploads SET attempts = attempts + 1 WHERE id = ?", (upload,))
            return str(upload)
        return None

    def parts_with(self, run_ids: Sequence[str]) -> list[Path]:
        """Return the parts that have rows of these runs already."""
        marks = ", ".join("?" * len(run_ids))
        query = f"SELECT DISTINCT upload FROM runs WHERE run_id IN ({marks}) ORDER BY upload"
        found = [str(upload) for (upload,) in self._rows(query, *run_ids)]
        paths = [self.path(room, name) for name in found for room in (ADMITTED, CONTROLS)]
        return [path for path in paths if path.exists()]

    def admit(self, upload: str, rows: int, run_ids: Sequence[str]) -> None:
        """Say that the rows of an upload are in the data, as they are from now on."""
        for room in (ADMITTED, CONTROLS):
            _flush(self.folder / room)
        with self._changing() as db:
            db.execute(
                "UPDATE uploads SET state = 'admitted', rows = ? WHERE id = ?", (rows, upload)
            )
            db.executemany(
                "INSERT OR IGNORE INTO runs VALUES (?, ?)", [(run, upload) for run in run_ids]
            )
        self.path(INCOMING, upload).unlink(missing_ok=True)

    def distrusted(self, run_ids: Sequence[str]) -> str | None:
        """Return one of these runs whose control configs took other times than elsewhere."""
        marks = ", ".join("?" * len(run_ids))
        query = f"SELECT run_id FROM runs WHERE run_id IN ({marks}) AND upload IN "
        quarantined = "(SELECT id FROM uploads WHERE state = 'quarantined')"
        return next((str(row[0]) for row in self._rows(query + quarantined, *run_ids)), None)

    def quarantine(self, upload: str, reason: str, run_ids: Sequence[str] = ()) -> None:
        """Put an upload aside, and distrust the runs `run_ids` from now on."""
        for room in (ADMITTED, CONTROLS):
            self.path(room, upload).unlink(missing_ok=True)
        with self._changing() as db:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path(INCOMING, upload), self.path(QUARANTINE, upload))
            _flush(self.folder / QUARANTINE)
            db.execute(
                "UPDATE uploads SET state = 'quarantined', reason = ? WHERE id = ?",
                (reason, upload),
            )
            db.executemany(
                "INSERT OR IGNORE INTO runs VALUES (?, ?)", [(run, upload) for run in run_ids]
            )

    def tidy(self) -> None:
        """Remove what a killed process left: uploads without an end, and files that were not
        acknowledged."""
        known = {row[0] for row in self._rows("SELECT id FROM uploads WHERE state = 'received'")}
        for path in (self.folder / INCOMING).iterdir():
            old = time.time() - path.stat().st_mtime > _DAY_S
            if old and path.stem.removeprefix("part-") not in known:
                path.unlink(missing_ok=True)

    # Jobs

    def jobs(self) -> list[Job]:
        """Return all jobs, the latest first."""
        query = "SELECT id, kind, device, state, started, ended, reason FROM jobs ORDER BY id DESC"
        return [Job(*row) for row in self._rows(query)]

    def add_job(self, device: str) -> Job:
        """Ask for a retraining for a device, unless one waits already."""
        waits = "SELECT id FROM jobs WHERE device = ? AND state = 'queued'"
        with self._changing() as db:
            if db.execute(waits, (device,)).fetchone() is None:
                new = ("retrain", device, "queued")
                db.execute("INSERT INTO jobs (kind, device, state) VALUES (?, ?, ?)", new)
        return next(job for job in self.jobs() if job.device == device)

    def set_job(self, number: int, state: str, reason: str | None = None) -> None:
        """Say how a job is: ``running``, or how it ended."""
        column, now = "started" if state == "running" else "ended", _shown(time.time())
        with self._changing() as db:
            db.execute(
                f"UPDATE jobs SET state = ?, reason = ?, {column} = ? WHERE id = ?",
                (state, reason, now, number),
            )

    def counts(self) -> list[list[Any]]:
        """Return how many uploads, bytes and jobs there are in each state, as metrics have them."""
        uploads = self._rows("SELECT state, count(*), sum(bytes) FROM uploads GROUP BY state")
        jobs = self._rows("SELECT state, count(*) FROM jobs GROUP BY state")
        return [
            *(["confpred_uploads", state, count] for state, count, _ in uploads),
            ["confpred_upload_bytes", sum(size for *_, size in uploads)],
            *(["confpred_jobs", state, count] for state, count in jobs),
        ]


@dataclass(frozen=True, slots=True)
class Published:
    """The card of a published model, and the digest of the card."""

    card: Card
    digest: str


def published(folder: Path) -> list[tuple[Path, Published]]:
    """Return the models that an exchange in `folder` has published, the newest first."""
    found = []
    for path in sorted((folder / PUBLISHED).glob(f"*/{CARD}")):
        with contextlib.suppress(ModelError):  # it has just been removed, or is none
            text, content = read_card(path.parent)
            with refusing(path.parent):
                known = Published(Card.from_json(content), hashlib.sha256(text).hexdigest())
            found.append((path.parent, known))
    return sorted(found, key=lambda each: each[1].card.created, reverse=True)


def newest_models(settings: Settings) -> dict[str, Path]:
    """Return the newest model folder for each device, of those of the operator and those that a
    retraining has published.

    Raises:
        ModelError: a card is damaged.
    """
    found = model_folders(shipped_models() if settings.model is None else Path(settings.model))
    if settings.exchange is None:
        return found
    for path, known in reversed(published(Path(settings.exchange))):
        own = found.get(known.card.device)
        if own is None or str(read_card(own)[1].get("created")) < known.card.created:
            found[known.card.device] = path
    return found


def withdraw(settings: Settings, generation: Path | None) -> bool:
    """Withdraw published models, so that no reload takes them up again: those newer than the models
    of the generation in a folder, or without one the newest; whether there were any."""
    if settings.exchange is None:
        return False
    folder, passed, gone = Path(settings.exchange), set(), 0
    cards = () if generation is None else generation.glob(f"{PUBLISHED}/*/{CARD}")
    digests = {hashlib.sha256(card.read_bytes()).hexdigest() for card in cards}
    for path, known in published(folder)[: 1 if generation is None else None]:
        if known.digest in digests:
            passed.add(known.card.device)
        if known.card.device not in passed:
            os.replace(path, folder / WITHDRAWN / f"{path.name}-{secrets.token_hex(4)}")
            gone += 1
    return gone > 0


def _shown(when: float) -> str:
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="seconds")


def _flush(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Arriving:
    """An upload on its way to the disk. Its methods take their time, so they run in threads."""

    def __init__(self, exchange: Exchange, settings: Settings, token: str, announced: int) -> None:
        self._exchange, self._settings, self._token = exchange, settings, token
        self._size, self._hash = 0, hashlib.sha256()
        self._check(announced)
        handle, name = tempfile.mkstemp(".tmp", ".", exchange.folder / INCOMING)
        self._file, self._path = os.fdopen(handle, "wb"), Path(name)

    def _check(self, size: int) -> None:
        limit, quota = (
            2**20 * n for n in (self._settings.max_upload_mib, self._settings.quota_mib)
        )
        if size > limit:
            allowed = f"{limit} bytes"
            message = f"the body has {size} bytes or more; allowed: {allowed}"
            raise RequestError(413, "body_too_large", message, "body", f"{size} bytes", allowed)
        used = self._exchange.used(self._token)
        if used + size > quota:
            message = f"{used} bytes came with this token within a day; allowed: {quota}"
            later = {"retry-after": "3600"}
            raise RequestError(
                429, "quota_exceeded", message, "body", None, f"{quota} bytes", later
            )

    def write(self, piece: bytes) -> None:
        self._size += len(piece)
        self._check(self._size)
        self._hash.update(piece)
        self._file.write(piece)

    def end(self, piece: bytes, wanted: str) -> Submission:
        """Write the last piece, and keep the file if it is what the client meant to send."""
        self.write(piece)
        found = self._hash.hexdigest()
        if found != wanted:
            raise InvalidInput("idempotency-key", wanted, f"the SHA-256 of the body, {found}")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._exchange.keep(self._path, found, self._token, self._size)

    def discard(self) -> None:
        """Remove what is left of it."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def announced_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the id that the head of a request gives to the upload in its body.

    Raises:
        RequestError: 415 for another body.
        InvalidInput: the key is no SHA-256.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind != PARQUET or b"content-encoding" in headers:
        said = f"the body is {shorten(kind) or 'of no type'}; allowed: {PARQUET}, uncompressed"
        raise RequestError(415, "unsupported_media_type", said, "content-type", None, PARQUET)
    key = headers.get(b"idempotency-key", b"").decode("latin-1").strip('"').lower()
    if not re.fullmatch(r"[0-9a-f]{64}", key):
        raise InvalidInput("idempotency-key", key or None, "the SHA-256 of the body, 64 hex digits")
    return key


async def take(
    exchange: Exchange,
    settings: Settings,
    key: str,
    announced: bytes,
    receive: Receive,
    token: str,
    threads: Executor,
) -> Submission:
    """Stream the body of a request to the disk, and keep it as the upload `key`; its length may be
    `announced`.

    Raises:
        RequestError: 413 for a longer body, 429 beyond the quota of `token`, 507 for a full disk.
        InvalidInput: the key is not that of the body.
        ClientDisconnect: the connection closed before the end of the body.
    """
    loop = asyncio.get_running_loop()
    arriving = None
    try:
        size = int(announced[:20]) if announced.isdigit() else 0
        arriving = await loop.run_in_executor(threads, _Arriving, exchange, settings, token, size)
        pieces, held, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            pieces.append(message.get("body", b""))
            held += len(pieces[-1])
            more = message.get("more_body", False)
            if held >= _PIECE and more:
                await loop.run_in_executor(threads, arriving.write, b"".join(pieces))
                pieces, held = [], 0
        return await loop.run_in_executor(threads, arriving.end, b"".join(pieces), key)
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or error
        said = f"the upload cannot be kept: {reason}"
        raise RequestError(507, "no_storage", said, headers={"retry-after": "60"}) from error
    finally:
        if arriving is not None:
            threads.submit(arriving.discard)
