"""The HTTP service: its settings, each with its default and its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Packages that a server imports.
MODULES = ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client", "jinja2")


def _setting(default: Any, help: str, allowed: Any = None) -> Any:
    """Declare a setting; `allowed` is the range of an integer, or the words of a choice."""
    return field(default=default, metadata={"help": help, "allowed": allowed})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server. The command line makes an option of every field."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 takes a free one.", (0, 65_535))
    model: str | None = _setting(None, "Model folder, or a folder of them, in place of confpred's.")
    signed_by: str | None = _setting(None, "Allowed signers (ssh-keygen) of the --model folders.")
    plan: str | None = _setting(None, "Plan to follow: a file, or a folder with kernels.")
    workers: int = _setting(1, "Server processes that share the port.", (1, 64))
    max_batch: int = _setting(1000, "Most problems in one request.", (1, 100_000))
    max_queue: int = _setting(10_000, "Most problems that wait in one process.", (1, 10_000_000))
    deadline: int = _setting(30, "Most seconds to compute a reply.", (1, 86_400))
    cache_mib: int = _setting(64, "Memory for cached replies, MiB in each process.", (1, 65_536))
    access_log: bool = _setting(True, "Log a line for each request.")
    log_format: str = _setting("text", "Form of log lines.", ("text", "json"))
    tokens: str | None = _setting(None, "File of access tokens, which `confpred token` makes.")
    allow_anonymous: bool = _setting(False, "Allow --host beyond loopback without --tokens.")
    trusted_proxies: str = _setting("127.0.0.1,::1", "Whose X-Forwarded-For is trusted; * is all.")
    drift: str | None = _setting(None, "Folder of reports of `confpred drift --json` to show.")
    exchange: str | None = _setting(None, "Folder of measurements that are sent here.")
    max_upload_mib: int = _setting(16, "Largest upload of measurements, MiB.", (1, 1024))
    quota_mib: int = _setting(4096, "Most uploads of a token within a day, MiB.", (1, 1_048_576))
    retrain_rows: int = _setting(0, "New rows of a device that retrain it; 0: never.", (0, 10**9))
    job_cores: int = _setting(1, "Processor cores that checks and retraining may use.", (1, 256))
    keep_models: int = _setting(1, "Former generations that stay loaded, to roll back to.", (0, 16))
    watch_models: int = _setting(0, "Seconds between checks for changed models.", (0, 86_400))
    max_head: int = _setting(32_768, "Most bytes of a request's head.", (1024, 1_048_576))
    head_timeout: int = _setting(10, "Seconds for the head of a request to arrive.", (1, 3600))
    body_timeout: int = _setting(30, "Seconds for the body of a request to arrive.", (1, 3600))
    write_timeout: int = _setting(30, "Seconds that a client may take to read.", (1, 3600))
    idle_timeout: int = _setting(75, "Seconds that an unused connection stays open.", (1, 86_400))
    grace: int = _setting(30, "Seconds to finish requests when the server stops.", (0, 3600))

    @property
    def max_body_bytes(self) -> int:
        """Return the size of the largest body: 1 KiB a problem is some four times its full form."""
        return 1024 * (self.max_batch + 24)
