"""One request and its reply: tried again where that is safe, within the time of the call."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from confpred.client.circuit import Circuit
from confpred.client.steps import NoReply, Pause, Reply, Send, Steps, clock
from confpred.errors import ServiceUnavailable

#: The server, or a proxy before it, has not worked on the request. Questions change nothing, so
#: that one whose connection broke may be asked again too.
REPEATED = frozenset({429, 502, 503, 504})
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


def exchange(send: Send, retries: int, circuit: Circuit, request_id: str) -> Steps[Reply]:
    """The reply to `send`, after at most `retries` further attempts.

    Raises:
        ServiceUnavailable: there is none by the deadline of `send`, or there cannot be, as the
            server is left alone until later or asks for it.
    """
    call = object()
    if not circuit.admit(call):
        raise ServiceUnavailable(
            "the service has not answered lately and is left alone for some seconds",
            None,
            request_id,
        )
    try:
        for attempt in range(retries + 1):
            reply: Reply | NoReply = yield send
            if isinstance(reply, Reply) and reply.status not in REPEATED:
                circuit.succeeded()
                return reply
            told = 0.0 if isinstance(reply, NoReply) else retry_after_s(reply.headers)
            circuit.failed(told)
            # Jitter, so that clients that failed together do not come back together.
            pause = random.uniform(0, min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
            if attempt == retries or clock() + told + pause >= send.deadline:
                raise _unavailable(reply, told, request_id)
            yield Pause(told + pause)
    finally:
        circuit.ended(call)
    raise AssertionError("a range of at least one attempt")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds that the header ``Retry-After`` asks to wait, as a number or a date; else 0."""
    told = headers.get("retry-after", "").strip()
    if told.isascii() and told.isdigit():
        return float(told[:9])
    try:
        then = parsedate_to_datetime(told)
    except ValueError:
        return 0.0
    if then.tzinfo is None:
        then = then.replace(tzinfo=timezone.utc)
    return max(0.0, (then - datetime.now(timezone.utc)).total_seconds())


def _unavailable(reply: Reply | NoReply, told: float, request_id: str) -> ServiceUnavailable:
    if isinstance(reply, NoReply):
        return ServiceUnavailable(f"no reply: {reply.reason}", None, request_id)
    later = f", and asks to wait {told:g} s" if told else ""
    what = f"the service replies {reply.status}{later}"
    return ServiceUnavailable(what, reply.status, request_id)
