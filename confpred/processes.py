"""Helper processes that end with the process that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

_LOOK_SECONDS = 0.5


def end_with(parent: int) -> None:
    """Make this process end soon after `parent`, the process that started it, however that ends:
    a process that is killed cannot ask its helpers to end. Ctrl-C, which the terminal sends to
    helpers too, is left to `parent`.

    It looks twice a second whether it has been given another parent. (Linux could send a signal
    instead, but does so when the *thread* that started this process ends.)
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


@contextlib.contextmanager
def stops_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM come after the block, so that nothing which starts processes in it is cut
    off halfway, unless they end this process at once or are ignored. Processes that are started
    inherit the blocked Ctrl-C and never see it: the terminal sends it to them too, but the process
    that started them decides what becomes of their work."""
    resource_tracker.ensure_running()  # where it starts by itself, it unblocks the signal
    came: list[int] = []
    # Blocking alone does not do: a thread that has the signal unblocked may take it, and Python
    # then runs the handler in the main thread all the same.
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        held = {}  # handlers do not run here
    held = {number: handler for number, handler in held.items() if callable(handler)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for number in held:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)  # at once, even if the main thread hangs in a driver or a long computation
