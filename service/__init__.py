"""The HTTP service: its settings, each written once, with its default and its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Packages that a server imports.
MODULES = ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client", "jinja2")


def _setting(default: Any, help: str, allowed: Any = None) -> Any:
    """Declare a setting; `allowed` is an integer's least and greatest, or the words of a choice."""
    return field(default=default, metadata={"help": help, "allowed": allowed})


@dataclass(frozen=True, slots=True)
class Settings:
    """How one server runs. The command line makes an option of every field."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 takes a free one.", (0, 65_535))
    model: str | None = _setting(
        None, "Model folder, or a folder of such, instead of those that ship with confpred."
    )
    signed_by: str | None = _setting(
        None, "File of allowed signers (ssh-keygen) one of whom has to have signed each --model."
    )
    plan: str | None = _setting(
        None, "Plan to follow for the problems that it has: a file, or a folder with kernels."
    )
    workers: int = _setting(1, "Server processes that share the port.", (1, 64))
    max_batch: int = _setting(1000, "Most problems in one request.", (1, 100_000))
    max_queue: int = _setting(
        10_000,
        "Most problems that wait in one process; beyond it a request is answered 429.",
        (1, 10_000_000),
    )
    deadline: int = _setting(
        30,
        "Seconds that working out a reply may take; what would take longer is answered 429.",
        (1, 86_400),
    )
    cache_mib: int = _setting(
        64, "Memory for replies that were given, MiB in each process.", (1, 65_536)
    )
    access_log: bool = _setting(True, "Log a line for each request.")
    log_format: str = _setting("text", "Form of log lines.", ("text", "json"))
    tokens: str | None = _setting(
        None, "File of access tokens that `confpred token` wrote: who may ask, and who may manage."
    )
    allow_anonymous: bool = _setting(
        False, "Listen on other addresses than loopback without a file of tokens."
    )
    trusted_proxies: str = _setting(
        "127.0.0.1,::1", "Addresses whose X-Forwarded-For is believed; networks too, and *."
    )
    drift: str | None = _setting(
        None, "Folder of reports of `confpred drift --json`, for the page at /."
    )
    exchange: str | None = _setting(
        None, "Folder of measurements that are sent here, and of the models that they make."
    )
    max_upload_mib: int = _setting(16, "Largest upload of measurements, MiB.", (1, 1024))
    quota_mib: int = _setting(
        4096, "Most that may be uploaded with one token within a day, MiB.", (1, 1_048_576)
    )
    retrain_rows: int = _setting(
        0, "New rows of a device after which it is retrained; 0: only when asked.", (0, 10**9)
    )
    job_cores: int = _setting(1, "Processor cores that checks and retraining may use.", (1, 256))
    keep_models: int = _setting(
        1, "Former generations of models that stay loaded, to ask for and to roll back to.", (0, 16)
    )
    watch_models: int = _setting(
        0,
        "Seconds between looks for changed models or plans; 0 looks only at a reload.",
        (0, 86_400),
    )
    max_head: int = _setting(
        32_768, "Most bytes in the head of a request: its line and headers.", (1024, 1_048_576)
    )
    head_timeout: int = _setting(
        10, "Seconds for the head of a request to arrive, from its first byte.", (1, 3600)
    )
    body_timeout: int = _setting(30, "Seconds for the body of a request to arrive.", (1, 3600))
    write_timeout: int = _setting(
        30, "Seconds that a client may take to read what it has been sent.", (1, 3600)
    )
    idle_timeout: int = _setting(
        75, "Seconds that a connection without a request stays open.", (1, 86_400)
    )
    grace: int = _setting(
        30, "Seconds for the requests under way when the server stops.", (0, 3600)
    )

    @property
    def max_body_bytes(self) -> int:
        """Return the size of the largest body: 1 KiB a problem is some four times its full form."""
        return 1024 * (self.max_batch + 24)
