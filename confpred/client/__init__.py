"""Asking the HTTP service (``confpred serve``) instead of a model in this process.

steps         what a call does on the network, apart from who does it
circuit       a server that does not answer is left alone for a while
exchange      one request: tried again where that is safe, within the time of the call
answers       the service's JSON as records, checked
questions     what both clients are told, and what their calls do, as steps
blocking      `Client`, which takes the steps in the calling thread
asynchronous  `AsyncClient`, which awaits them
served        a predictor that asks the service and holds nobody up, for ``CONFPRED_URL``
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("httpx") is None:
    raise MissingExtra("httpx", "client")

from confpred.client.asynchronous import AsyncClient
from confpred.client.blocking import Client
from confpred.client.questions import Trace

__all__ = ["AsyncClient", "Client", "Trace"]
