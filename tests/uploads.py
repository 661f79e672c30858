"""Uploads of measurements to a real server, for the tests of what becomes of them."""

from __future__ import annotations

import hashlib
import io
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner
from served import Server, eventually, running

from confpred.cli import cli

PARQUET = {"content-type": "application/vnd.apache.parquet"}


def whole(table: pa.Table, **how: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **how)
    return file.getvalue()


def changed(table: pa.Table, column: str, change: Callable[[Any], Any]) -> pa.Table:
    """Return a table with other values in a column."""
    field = table.schema.field(column)
    values = pa.array(change(table[column].to_numpy(zero_copy_only=False)), field.type)
    return table.set_column(table.schema.get_field_index(column), field, values)


@dataclass(frozen=True)
class Site:
    """A server with an exchange in a folder, and the secrets of its tokens by their names."""

    server: Server
    folder: Path
    secrets: Mapping[str, str]

    @property
    def exchange(self) -> Path:
        return self.folder / "exchange"

    def headers(self, name: str | None) -> dict[str, str]:
        """Return the headers of a token; of none, or of a secret that is no token's."""
        secret = name and self.secrets.get(name, name)
        return {"authorization": f"Bearer {secret}"} if secret else {}

    def get(self, path: str, name: str) -> httpx.Response:
        return self.server.get(path, headers=self.headers(name))

    def ask_for_job(self, name: str, device: str = "h100") -> httpx.Response:
        return self.server.post(f"/v1/jobs?device={device}", headers=self.headers(name))

    def send(self, body: bytes, name: str | None, **headers: str) -> httpx.Response:
        key = {"idempotency-key": hashlib.sha256(body).hexdigest()}
        known = key | PARQUET | headers | self.headers(name)
        return self.server.post("/v1/measurements", content=body, headers=known)

    def became(self, upload: str, name: str) -> dict[str, Any]:
        """Return an upload once it is checked."""
        found: dict[str, Any] = {}

        def checked() -> bool:
            found.update(self.get(f"/v1/measurements/{upload}", name).json())
            return found["state"] != "received"

        eventually(checked, self.server.said)
        return found

    def sent(self, body: bytes, name: str) -> dict[str, Any]:
        reply = self.send(body, name)
        assert reply.status_code == 202, reply.text
        return self.became(reply.json()["id"], name)

    def keepers(self) -> set[int]:
        """Return the process that checks uploads, if there is one at the moment."""
        return {p for p in self.server.workers() if b"service.keeper" in command_line(p)}

    def keeper(self) -> int:
        """Wait for the process that checks uploads, and return it."""
        seen: set[int] = set()
        eventually(lambda: seen.update(self.keepers()) or seen, self.server.said)
        return seen.pop()

    def kill_keeper(self) -> None:
        """Kill the process that checks uploads, as soon as there is one."""
        eventually(lambda: any(map(killed, self.keepers())), self.server.said)


def command_line(process: int) -> bytes:
    """Return what a process was started with; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def killed(process: int) -> bool:
    """Kill a process, and wait until its connections are closed; say whether it was still there."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    eventually(lambda: has_ended(process))
    return True


def has_ended(process: int) -> bool:
    """Return whether a process and all of its threads, which share its connections, are gone, or it
    alone waits to be collected by its parent."""
    folder = Path(f"/proc/{process}")
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(list((folder / "task").iterdir())) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def site(folder: Path, scopes: Mapping[str, str], *options: str) -> Iterator[Site]:
    """Run a server with an exchange in `folder`, and a token of each name with its scope."""
    tokens, secrets = str(folder / "tokens.json"), {}
    for name, scope in scopes.items():
        words = ["token", "--tokens", tokens, name, "--scope", scope]
        secrets[name] = CliRunner().invoke(cli, words, catch_exceptions=False).output.strip()
    own = ("--tokens", tokens, "--exchange", str(folder / "exchange"))
    with running(folder, *own, *options) as server:
        yield Site(server, folder, secrets)
