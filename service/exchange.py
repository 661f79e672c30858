"""The folder of uploaded measurements and of published models, shared by all processes.

    exchange.sqlite      state of each upload and each job
    uploads/             files that were acknowledged, unchanged
    admitted/            new rows of admitted uploads, as parts: the model in use is trained on them
    models/, withdrawn/  models that a retraining published, and those that were withdrawn
    base/, holdout/, controls/  the operator's own measurements, which no upload enters: to train
                                on, to judge by, and times of control configs (anchors)

The id of an upload is the SHA-256 of its bytes. It is acknowledged once its file and its row in the
database are on the disk, so a crash at any moment loses no acknowledged upload. The database alone
has its state; a part counts while its upload is admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from confpred.errors import InvalidInput, StorageError

from . import Settings
from .generations import PUBLISHED, WITHDRAWN, published, set_aside
from .requests import RequestError, shorten
from .schema import PARQUET, Job, Submission

UPLOADS, ADMITTED = "uploads", "admitted"
BASE, HOLDOUT, CONTROLS = "base", "holdout", "controls"
_ROOMS = (UPLOADS, ADMITTED, PUBLISHED, WITHDRAWN, BASE, HOLDOUT, CONTROLS)
_TABLES = """
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, rows INTEGER, reason TEXT, received REAL NOT NULL,
    token TEXT NOT NULL, bytes INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL DEFAULT 0, in_all INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS uploads_by_state ON uploads (state, received);
CREATE INDEX IF NOT EXISTS uploads_by_token ON uploads (token, received);
CREATE TABLE IF NOT EXISTS distrusted (
    token TEXT NOT NULL, run_id TEXT NOT NULL, PRIMARY KEY (token, run_id));
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, device TEXT NOT NULL, state TEXT NOT NULL,
    started TEXT, ended TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS new_rows (
    upload TEXT NOT NULL, device TEXT NOT NULL, rows INTEGER NOT NULL,
    PRIMARY KEY (upload, device));
"""
_DAY_S = 86_400
#: Bytes of an upload that are held in memory before they are written.
_PIECE = 262_144
#: Seconds that an upload waits which the server could not check; twice as long each time.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 3600.0
_MOST_REASON = 500  # characters
_log = logging.getLogger(__name__)


Counts = Mapping[str, int]  # by device


class Exchange:
    """The folder of one server. Safe to share between threads and processes, not to fork."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`, which is made if it is missing.

        Raises:
            StorageError: `folder` cannot be made or written to.
        """
        self.folder = folder
        self._lock, self._turns = threading.Lock(), dict[str, float]()  # last turn by token
        try:
            for name in _ROOMS:
                (folder / name).mkdir(parents=True, exist_ok=True)
            file = folder / "exchange.sqlite"
            self._db = sqlite3.connect(file, 30, isolation_level=None, check_same_thread=False)
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_TABLES}")
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise StorageError(f"cannot use {folder}: {reason}") from error

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Change the database in one transaction, which is on the disk when the block ends."""
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
        """Return the state of an upload; None if there is none with this id."""
        return next(iter(self._submissions("WHERE id = ?", upload)), None)

    def admitted(self) -> list[Submission]:
        """Return the uploads whose rows are in the data, in the order of their arrival."""
        return self._submissions("WHERE state = 'admitted' AND rows > 0 ORDER BY received")

    def latest(self, count: int) -> list[Submission]:
        """Return the latest uploads, the last one first."""
        return self._submissions("ORDER BY received DESC LIMIT ?", count)

    def named(self, name: str) -> list[Submission]:
        """Return the uploads of a token, or the one with an id, of which 8 digits are enough.

        Raises:
            InvalidInput: there is no such upload.
        """
        uploads = self._submissions("WHERE token = ?", name)
        if not uploads and re.fullmatch(r"[0-9a-f]{8,64}", name):
            uploads = self._submissions("WHERE id GLOB ?", f"{name}*")
        if not uploads:
            raise InvalidInput("name", name, "the name of a token with uploads, or an upload's id")
        return uploads

    def _submissions(self, which: str, *values: Any) -> list[Submission]:
        what = f"id, state, rows, substr(reason, 1, {2 * _MOST_REASON}), received, token"
        query = f"SELECT {what} FROM uploads {which}"
        rows = self._rows(query, *values)
        return [Submission(i, s, n, why, _shown(at), token) for i, s, n, why, at, token in rows]

    def used(self, token: str) -> int:
        """Return the bytes that were uploaded with a token within a day."""
        query = "SELECT coalesce(sum(bytes), 0) FROM uploads WHERE token = ? AND received > ?"
        return int(self._rows(query, token, time.time() - _DAY_S)[0][0])

    def keep(self, arrived: Path, upload: str, token: str, size: int) -> Submission:
        """Take a file that has arrived whole as an upload, unless it is one already. File and row
        are on the disk when this returns."""
        with self._changing() as db:
            stored = db.execute("SELECT 1 FROM uploads WHERE id = ?", (upload,)).fetchone()
            if stored is None:
                os.replace(arrived, self.path(UPLOADS, upload))
                _flush(self.folder / UPLOADS)
                columns = "uploads (id, state, received, token, bytes)"
                row = (upload, "received", time.time(), token, size)
                db.execute(f"INSERT INTO {columns} VALUES (?, ?, ?, ?, ?)", row)
        return self._submissions("WHERE id = ?", upload)[0]

    def path(self, room: str, upload: str) -> Path:
        """Return the file of an upload in a room of the folder."""
        return self.folder / room / f"part-{upload}.parquet"

    def due(self) -> Submission | None:
        """Return the next upload to check: of the token whose last turn is the longest ago, the one
        that has waited longest."""
        by = "WHERE state = 'received' AND due <= ? GROUP BY token ORDER BY min(max(due, received))"
        waiting = self._submissions(by, time.time())
        upload = min(waiting, key=lambda u: self._turns.get(u.token, 0.0), default=None)
        if upload is not None:
            self._turns[upload.token] = time.monotonic()
        return upload

    def postpone(self, upload: Submission, reason: str) -> None:
        """Have an upload wait, because the server could not check it; the more often, the
        longer."""
        ((attempts,),) = self._rows("SELECT attempts FROM uploads WHERE id = ?", upload.id)
        due = time.time() + min(_FIRST_WAIT_S * 2.0 ** min(attempts, 30), _LONGEST_WAIT_S)
        self._set([upload], f"attempts = {attempts + 1}, due = {due}", "received", reason)
        _log.error("upload %s cannot be checked: %s", upload.id[:12], readable(reason))

    def files(self, room: str) -> list[Path]:
        """Return the measurements in a room of the folder."""
        return sorted((self.folder / room).glob("*.parquet"))

    def data(self) -> list[Path]:
        """Return the parts of the data: those of admitted uploads, and files that the operator has
        put beside them."""
        others = {row[0] for row in self._rows("SELECT id FROM uploads WHERE state != 'admitted'")}
        files = self.files(ADMITTED)
        return [path for path in files if path.stem.removeprefix("part-") not in others]

    def admit(self, upload: str, rows: int, in_all: int, devices: Counts, wanted: int) -> None:
        """Record that `rows` rows of an upload, whose part is written, are in the data. In the same
        transaction ask for a retraining of each of `devices`, with its number of rows, that has
        `wanted` new ones."""
        _flush(self.folder / ADMITTED)
        counted = "SELECT sum(rows) FROM new_rows WHERE device = ?"
        done = "UPDATE uploads SET state = 'admitted', rows = ?, in_all = ?, reason = NULL "
        with self._changing() as db:
            which = "WHERE id = ? AND state = 'received'"
            if not db.execute(done + which, (rows, in_all, upload)).rowcount:
                return  # it was revoked meanwhile
            for device, count in devices.items():
                row = (upload, device, count)
                db.execute("INSERT OR REPLACE INTO new_rows VALUES (?, ?, ?)", row)
                if wanted and db.execute(counted, (device,)).fetchone()[0] >= wanted:
                    self._ask(db, device)

    def distrusted(self, token: str) -> set[str]:
        """Return the runs of a token whose control configs take other times than the operator's."""
        query = "SELECT run_id FROM distrusted WHERE token = ?"
        return {run for (run,) in self._rows(query, token)}

    def quarantine(self, upload: Submission, refused: str, run_ids: Sequence[str] = ()) -> None:
        """Quarantine an upload for the reason `refused`, and distrust the runs `run_ids` of its
        token from now on."""
        with self._changing() as db:  # first, so that after a kill in between it is checked again
            runs = [(upload.token, run) for run in run_ids]
            db.executemany("INSERT OR IGNORE INTO distrusted VALUES (?, ?)", runs)
        self._set([upload], "rows = NULL", "quarantined", refused)
        _log.warning("upload %s is quarantined: %s", upload.id[:12], readable(refused))

    def revoke(self, name: str) -> list[str]:
        """Remove the rows of a token, or of an upload, from the data, and withdraw the published
        models that were trained on them. Other uploads with some of the same rows are checked
        again. Return the names of the models."""
        uploads, withdrawn = self.named(name), []
        self._set(uploads, "rows = NULL", "revoked", "revoked by the operator")
        for path, read in published(self.folder):
            if {upload.id for upload in uploads} & set(read.card.content.get("uploads", ())):
                set_aside(path)
                withdrawn.append(path.name)
        self._requeue(self._submissions("WHERE state = 'admitted' AND rows < in_all"))
        return withdrawn

    def requeue(self, name: str) -> None:
        """Have the uploads of a token, or one upload, checked again, in whatever state. Its runs
        are trusted until then."""
        uploads = self.named(name)
        with self._changing() as db:
            tokens = [(upload.token,) for upload in uploads]
            db.executemany("DELETE FROM distrusted WHERE token = ?", tokens)
        self._requeue(uploads)

    def _requeue(self, uploads: Sequence[Submission]) -> None:
        self._set(uploads, "rows = NULL, attempts = 0, due = 0", "received", None)

    def _set(self, uploads: Iterable[Submission], change: str, state: str, why: str | None) -> None:
        """Set the state of uploads that are not in the data any more."""
        said = None if why is None else readable(why)
        query = f"UPDATE uploads SET {change}, state = ?, reason = ? WHERE id = ?"
        with self._changing() as db:
            db.executemany(query, [(state, said, upload.id) for upload in uploads])
            forgotten = "DELETE FROM new_rows WHERE upload = ?"
            db.executemany(forgotten, [(upload.id,) for upload in uploads])

    def tidy(self) -> None:
        """Remove the remains of a killed process: files that were not acknowledged, and parts of
        uploads that are not admitted. An upload whose part was removed is revoked."""
        for upload in self._submissions(""):
            part = self.path(ADMITTED, upload.id)
            if upload.state != "admitted":
                part.unlink(missing_ok=True)
            elif upload.rows and not part.exists():
                self._set([upload], "rows = NULL", "revoked", "its part was removed")
        for path in (self.folder / UPLOADS).iterdir():
            old = time.time() - path.stat().st_mtime > _DAY_S
            if old and self.find(path.stem.removeprefix("part-")) is None:
                path.unlink(missing_ok=True)

    # Jobs

    def jobs(self) -> list[Job]:
        """Return all jobs, the latest first."""
        query = "SELECT id, kind, device, state, started, ended, reason FROM jobs ORDER BY id DESC"
        return [Job(*row) for row in self._rows(query)]

    def job(self, number: int) -> Job:
        return next(job for job in self.jobs() if job.id == number)

    def add_job(self, device: str) -> Job:
        """Ask for a retraining for a device, unless one waits already."""
        with self._changing() as db:
            self._ask(db, device)
        return next(job for job in self.jobs() if job.device == device)

    def _ask(self, db: sqlite3.Connection, device: str) -> None:
        waits = "SELECT id FROM jobs WHERE device = ? AND state = 'queued'"
        if db.execute(waits, (device,)).fetchone() is None:
            new = ("retrain", device, "queued")
            db.execute("INSERT INTO jobs (kind, device, state) VALUES (?, ?, ?)", new)
        db.execute("DELETE FROM new_rows WHERE device = ?", (device,))

    def set_job(self, number: int, state: str, reason: str | None = None) -> None:
        """Set the state of a job: ``queued``, ``running``, or how it ended."""
        column, now = "started" if state == "running" else "ended", _shown(time.time())
        with self._changing() as db:
            db.execute(
                f"UPDATE jobs SET state = ?, reason = ?, {column} = ? WHERE id = ?",
                (state, reason, None if state == "queued" else now, number),
            )

    def counts(self) -> list[list[Any]]:
        """Return the numbers of uploads, bytes and jobs in each state, as rows of metrics."""
        uploads = self._rows("SELECT state, count(*), sum(bytes) FROM uploads GROUP BY state")
        jobs = self._rows("SELECT state, count(*) FROM jobs GROUP BY state")
        return [
            *(["confpred_uploads", state, count] for state, count, _ in uploads),
            ["confpred_upload_bytes", sum(size for *_, size in uploads)],
            *(["confpred_jobs", state, count] for state, count in jobs),
        ]


def readable(text: str) -> str:
    """Return the start of a client's text, on one line."""
    shown = text[:_MOST_REASON].encode("unicode_escape").decode()
    return shown if len(text) <= _MOST_REASON else f"{shown}..."


def _shown(when: float) -> str:
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="seconds")


def _flush(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Arriving:
    """An upload on its way to the disk. Its methods block, so they run in threads."""

    def __init__(self, exchange: Exchange, settings: Settings, token: str, announced: int) -> None:
        self._exchange, self._settings, self._token = exchange, settings, token
        self._size, self._hash = 0, hashlib.sha256()
        self._check(announced)
        handle, name = tempfile.mkstemp(".tmp", ".", exchange.folder / UPLOADS)
        self._file, self._path = os.fdopen(handle, "wb"), Path(name)

    def _check(self, size: int) -> None:
        settings = self._settings
        limit, quota = 2**20 * settings.max_upload_mib, 2**20 * settings.quota_mib
        if size > limit:
            allowed = f"{limit} bytes"
            message = f"the body has {size} bytes or more; allowed: {allowed}"
            raise RequestError(413, "body_too_large", message, "body", f"{size} bytes", allowed)
        used = self._exchange.used(self._token)
        if used + size > quota:
            message = f"{used} bytes came with this token within a day; allowed: {quota}"
            allowed, later = f"{quota} bytes", {"retry-after": "3600"}
            raise RequestError(429, "quota_exceeded", message, "body", None, allowed, later)

    def write(self, piece: bytes) -> None:
        self._size += len(piece)
        self._check(self._size)
        self._hash.update(piece)
        self._file.write(piece)

    def end(self, piece: bytes, wanted: str) -> Submission:
        """Write the last bytes, and keep the file if it has the SHA-256 `wanted`."""
        self.write(piece)
        digest = self._hash.hexdigest()
        if digest != wanted:
            raise InvalidInput("idempotency-key", wanted, f"the SHA-256 of the body, {digest}")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._exchange.keep(self._path, digest, self._token, self._size)

    def discard(self) -> None:
        """Remove its temporary file."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def announced_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the upload's id that the headers of a request announce.

    Raises:
        RequestError: 415 for another type of body.
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
    body: AsyncIterator[bytes],
    token: str,
    threads: Executor,
) -> Submission:
    """Stream the `body` of a request to the disk, and keep it as the upload `key`; its length may
    be `announced`.

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
        pieces, held = [], 0
        async for piece in body:
            pieces.append(piece)
            held += len(piece)
            if held >= _PIECE:
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
