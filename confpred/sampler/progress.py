"""Progress of a run: two bars in a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from confpred.data.remote import Folder
from confpred.sampler.run import Tally

_LINE_SECONDS = 10.0


@contextlib.contextmanager
def show_progress(console: Console, budget_s: float | None) -> Iterator[Callable[[Tally], None]]:
    """Yield a function that shows a run's tally; it may be called at any rate."""
    if not console.is_terminal:
        yield _log_lines(console, budget_s)
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    bars = Progress(*columns, TextColumn("{task.fields[note]}"))
    kernels = bars.add_task("kernels", total=None, note="")
    rows = bars.add_task("rows", total=None, note="")
    with Live(bars, console=console) as live:

        def update(tally: Tally) -> None:
            bars.update(kernels, completed=tally.kernels, total=tally.total_kernels)
            note = state(tally, budget_s)
            bars.update(rows, completed=tally.rows, total=tally.total_rows, note=note)
            live.update(Group(bars, Text(str(tally.current or ""), style="dim")))

        yield update


def state(tally: Tally, budget_s: float | None) -> str:
    """Return rate, time left and failures, in words."""
    parts = []
    if tally.rows and tally.elapsed_s:
        rate = tally.rows / tally.elapsed_s
        left = (tally.total_rows - tally.rows) / rate
        if budget_s is not None:
            left = min(left, max(0.0, budget_s - tally.elapsed_s))
        parts += [f"{rate:.0f} rows/s", f"{duration(left)} left"]
    parts += _failures(tally)
    if tally.lost:
        parts.append(f"{tally.lost} workers lost")
    if tally.set_aside:
        parts.append(f"{len(tally.set_aside)} GPUs set aside")
    if tally.given_up:
        parts.append(f"{len(tally.given_up)} given up")
    return ", ".join(parts)


def _failures(tally: Tally) -> list[str]:
    return [f"{n} {name}" for name, n in sorted(tally.statuses.items()) if name != "ok"]


def duration(seconds: float) -> str:
    """Return a text such as ``1h02m03s`` or ``40s``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m{seconds:02}s"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def _log_lines(console: Console, budget_s: float | None) -> Callable[[Tally], None]:
    next_line = time.monotonic()

    def update(tally: Tally) -> None:
        nonlocal next_line
        if time.monotonic() < next_line:
            return
        next_line += _LINE_SECONDS
        kernels = f"kernels {tally.kernels}/{tally.total_kernels}"
        counts = f"{kernels}, rows {tally.rows}/{tally.total_rows}"
        parts = [counts, state(tally, budget_s), str(tally.current or "")]
        line = f"[{duration(tally.elapsed_s)}] {'; '.join(part for part in parts if part)}"
        console.print(Text(line), soft_wrap=True)

    return update


def summary(tally: Tally, folder: Folder, gpus: int) -> str:
    """Return the text at the end of a run."""
    done = f"{tally.rows} of {tally.total_rows} rows, {tally.tasks} of {tally.total_tasks} problems"
    lines = [f"{done} in {duration(tally.elapsed_s)}, {tally.kernels} kernels compiled"]
    if tally.measuring_s:
        rate = tally.measured_rows * gpus / tally.measuring_s
        lines.append(f"{rate:.0f} rows/s once compiled, on {gpus} GPU{'s' if gpus > 1 else ''}")
    lines.append(f"failures: {', '.join(_failures(tally)) or 'none'}")
    lines += [f"not used: {text}" for text in tally.set_aside]
    lines += [f"given up, and tried again by the next run: {text}" for text in tally.given_up]
    return "\n".join([*lines, f"measurements are in {folder}"])


@dataclass(slots=True)
class Interrupts:
    """Count of the user's requests to stop, and the last signal."""

    count: int = 0
    signal: int = 0


@contextlib.contextmanager
def count_interrupts() -> Iterator[Interrupts]:
    """Count SIGINT and SIGTERM instead of ending; for the main thread only."""
    interrupts = Interrupts()

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.count += 1
        interrupts.signal = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
