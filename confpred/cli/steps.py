"""How far a command is: a bar for each step in a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from confpred.training import Said

_LINE_SECONDS = 2.0


@contextlib.contextmanager
def show_steps() -> Iterator[Said]:
    """Yield a function to call when a step begins and when a part of it is done; what it shows
    goes to standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _log_lines(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, MofNCompleteColumn(), Elapsed(), console=console) as bars:
        tasks = {}

        def say(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield say


def _log_lines(console: Console) -> Said:
    began = shown = time.monotonic()
    current = ""

    def say(step: str, done: int, total: int) -> None:
        nonlocal current, shown
        now = time.monotonic()
        if step == current and now < shown + _LINE_SECONDS:
            return
        current, shown = step, now
        count = f": {done} of {total}" if done else ""
        console.print(f"[{now - began:.0f}s] {step}{count}", markup=False, highlight=False)

    return say
