"""Client of the HTTP service (``confpred serve``), instead of a model in this process.

clients   `Client` for threads and `AsyncClient` for ``asyncio``
answers   replies of the service as records and errors, checked
transfer  models and measurements as files
served    a predictor that asks the service and delays no program, for ``CONFPRED_URL``
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("httpx") is None:
    raise MissingExtra("httpx", "client")

from confpred.client.clients import AsyncClient, Client, Trace

__all__ = ["AsyncClient", "Client", "Trace"]
