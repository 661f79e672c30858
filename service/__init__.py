"""The FastAPI application."""

from __future__ import annotations

#: What a server imports.
MODULES = ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client")
