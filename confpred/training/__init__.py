"""Training and judging models."""

from __future__ import annotations

from collections.abc import Callable

#: What the JSON of ``confpred evaluate`` says of its own form; `confpred.report` reads it.
EVALUATION_FORMAT = "confpred-evaluation/3"
#: ... and with ``--holdout-only``, which has no cross-validation to show.
HOLDOUT_FORMAT = "confpred-holdout/1"
#: What training imports.
MODULES = ("pyarrow", "joblib", "sklearn", "rich", "matplotlib")
#: How a long function says how far it is: called with the name of a step, how many of its parts
#: are done, and how many it has. `confpred.cli.learn` shows bars or lines.
Said = Callable[[str, int, int], None]


def unsaid(step: str, done: int, total: int) -> None:
    """Show nothing."""
