"""The FastAPI application."""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

_PACKAGES = ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client")


def require_packages() -> None:
    """Check that what a server needs is installed, before its workers are started.

    Raises:
        MissingExtra: a package is not installed.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), "serve")
