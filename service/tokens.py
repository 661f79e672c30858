"""Access tokens: who may ask, and who may manage the server.

A token is 256 random bits, shown once. Its SHA-256 is stored: no dictionary finds a token by its
digest, so a slow hash, as for passwords, would only add time to each request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from confpred.errors import DataError, InvalidInput, StorageError
from confpred.files import raising, read_json, write_json

FORMAT = "confpred-tokens/1"
#: Purpose of a token: to ask, to send measurements too, or to manage the server too.
Scope = Literal["read", "write", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_PREFIX = "confpred_"  # so that a leaked token is recognised, in a log for instance


@dataclass(frozen=True, slots=True)
class Token:
    """Record of a token: the owner's name, for the log; its scope, which includes those before it
    in `SCOPES`; and its SHA-256, in hexadecimal."""

    name: str
    scope: Scope
    sha256: str

    def allows(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


def make(name: str, scope: Scope) -> tuple[str, Token]:
    """Return a new token: the secret for its owner, and the record to keep."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    return secret, Token(name, scope, _hash(secret.encode()))


def read(path: str | Path) -> tuple[Token, ...]:
    """Return the tokens in the file at `path`, or raise a DataError that says what is wrong."""
    entries = read_json(Path(path), "a file of tokens", FORMAT).get("tokens")
    if not isinstance(entries, list):
        raise DataError(f"{path}: tokens is not a list")
    return tuple(_token(path, place, entry) for place, entry in enumerate(entries))


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock the file at `path` for reading, changing and writing it in the ``with`` block. The lock
    is on its folder, because the file is replaced; the folder is made if it is missing. Raise a
    StorageError if that fails."""
    with raising(StorageError, f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write(path: str | Path, tokens: Sequence[Token]) -> None:
    """Replace the file at `path`, which only its owner may read; raise a StorageError if the file
    system refuses."""
    content = {"format": FORMAT, "tokens": [asdict(token) for token in tokens]}
    write_json(Path(path), content, mode=0o600)


def find(tokens: Sequence[Token], secret: bytes) -> Token | None:
    """Return the token with this `secret`, compared in constant time."""
    hashed, match = _hash(secret), None
    for token in tokens:  # all of them, so that the time does not tell the position
        if hmac.compare_digest(token.sha256, hashed):
            match = token
    return match


def _hash(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _token(path: str | Path, place: int, entry: Any) -> Token:
    where = f"{path}: tokens[{place}]"
    if not isinstance(entry, dict) or entry.keys() != {"name", "scope", "sha256"}:
        raise DataError(f"{where} is not an object of name, scope and sha256")
    if entry["scope"] not in SCOPES:
        raise DataError(f"{where}: {InvalidInput('scope', entry['scope'], ' or '.join(SCOPES))}")
    digest = entry["sha256"]
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
        raise DataError(f"{where}: {InvalidInput('sha256', digest, '64 hexadecimal digits')}")
    return Token(str(entry["name"]), cast(Scope, entry["scope"]), digest)


def is_loopback(address: str) -> bool:
    """Return whether `address` is this machine's own; a name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
