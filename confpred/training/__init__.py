"""Training and judging models."""

from __future__ import annotations

from collections.abc import Callable

#: Format of the JSON of ``confpred evaluate``, which `confpred.report` reads.
EVALUATION_FORMAT = "confpred-evaluation/3"
#: Format of the same with ``--holdout-only``, which has no cross-validation to show.
HOLDOUT_FORMAT = "confpred-holdout/1"
#: Packages that training imports.
MODULES = ("pyarrow", "joblib", "sklearn", "rich", "matplotlib")
#: Progress of a long function: called with the name of a step, how many of its parts are done, and
#: how many it has. `confpred.cli.learn` shows bars or lines.
Said = Callable[[str, int, int], None]


def unsaid(step: str, done: int, total: int) -> None:
    """Report nothing."""
