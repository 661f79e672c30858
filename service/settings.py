"""The settings of ``confpred serve``: each is written here once, with its default and its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Settings:
    """How one server runs. The command line makes an option of every field."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 takes a free one.")
    model: str | None = _setting(None, "Model folder, instead of those that ship with confpred.")
    pins: str | None = _setting(
        None, "JSON file that pins the configs of chosen problems, or a plan."
    )
    workers: int = _setting(1, "Server processes that share the port.")
    max_batch: int = _setting(1000, "Most problems in one request.")
    max_queue: int = _setting(
        10_000, "Most problems that wait in one process; beyond it a request is answered 503."
    )
    deadline: int = _setting(
        30, "Seconds that working out a reply may take before it is answered 503."
    )
    cache_mib: int = _setting(64, "Memory for replies that were given, MiB in each process.")
    access_log: bool = _setting(True, "Log a line for each request.")

    @property
    def max_body_bytes(self) -> int:
        """Largest request body: 1 KiB a problem is some four times what one takes in full."""
        return 1024 * (self.max_batch + 24)
