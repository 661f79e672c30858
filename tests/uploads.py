"""Uploads of measurements to a real server, for the tests of what becomes of them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner
from served import Server, eventually

from confpred.cli import cli

PARQUET = {"content-type": "application/vnd.apache.parquet"}


def token(folder: Path, name: str, scope: str) -> str:
    words = ["token", "--tokens", str(folder / "tokens.json"), name, "--scope", scope]
    return CliRunner().invoke(cli, words, catch_exceptions=False).output.strip()


def whole(table: pa.Table, **how: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **how)
    return file.getvalue()


def changed(table: pa.Table, column: str, change: Callable[[Any], Any]) -> pa.Table:
    """Return a table with other values in a column."""
    field = table.schema.field(column)
    values = pa.array(change(table[column].to_numpy(zero_copy_only=False)), field.type)
    return table.set_column(table.schema.get_field_index(column), field, values)


def send(server: Server, body: bytes, secret: str | None, **headers: str) -> httpx.Response:
    known = {"idempotency-key": hashlib.sha256(body).hexdigest(), **PARQUET, **headers}
    if secret is not None:
        known["authorization"] = f"Bearer {secret}"
    return server.post("/v1/measurements", content=body, headers=known)


def became(server: Server, upload: str, secret: str) -> dict[str, Any]:
    """Return an upload once it is checked."""
    found: dict[str, Any] = {}

    def checked() -> bool:
        headers = {"authorization": f"Bearer {secret}"}
        found.update(server.get(f"/v1/measurements/{upload}", headers=headers).json())
        return found["state"] != "received"

    eventually(checked, server.said)
    return found


def sent(server: Server, body: bytes, secret: str) -> dict[str, Any]:
    reply = send(server, body, secret)
    assert reply.status_code == 202, reply.text
    return became(server, reply.json()["id"], secret)


def admitted(folder: Path) -> pa.Table:
    files = sorted((folder / "exchange" / "admitted").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files])


def keepers(server: Server) -> set[int]:
    """Return the process that checks uploads, if there is one at the moment."""
    return {
        process
        for process in server.workers()
        if b"service.keeper" in Path(f"/proc/{process}/cmdline").read_bytes()
    }
