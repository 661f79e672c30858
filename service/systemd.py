"""What systemd is told of the server where it has asked to be: the protocol of sd_notify(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

_US = 1_000_000
_PATIENCE_S = 1.0  # for systemd to read what was told before


def tell(**states: str) -> None:
    """Send states, such as ``READY="1"``; nothing happens where nobody has asked for them."""
    name = os.environ.get("NOTIFY_SOCKET")
    if name:
        address = "\0" + name[1:] if name.startswith("@") else name
        text = "\n".join(f"{key}={value}" for key, value in states.items())
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        ):
            datagrams.settimeout(_PATIENCE_S)
            datagrams.sendto(text.encode(), address)


def tell_reloading() -> None:
    """Say that a reload has begun; ``READY=1`` ends it."""
    tell(RELOADING="1", MONOTONIC_USEC=str(int(time.monotonic() * _US)))


async def show_life() -> None:
    """Tell systemd's watchdog that the event loop runs, twice in the time that it waits, for ever;
    return at once where there is no watchdog."""
    waits_s = int(os.environ.get("WATCHDOG_USEC", "0")) / _US
    while waits_s:
        tell(WATCHDOG="1")
        await asyncio.sleep(waits_s / 2)
