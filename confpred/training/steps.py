"""How training and judging say how far they are.

A long function takes `say`, a `Said`, and calls it when a step begins and whenever a part of the
step is done. `unsaid` is for callers who show nothing; `confpred.cli.learn` shows bars or lines.
"""

from __future__ import annotations

from collections.abc import Callable

#: Called with the name of the step, how many of its parts are done, and how many it has.
Said = Callable[[str, int, int], None]


def unsaid(step: str, done: int, total: int) -> None:
    """Show nothing."""
