"""Training and judging models."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from confpred.errors import MissingExtra

#: What the JSON of ``confpred evaluate`` says of its own form; `confpred.report` reads it.
EVALUATION_FORMAT = "confpred-evaluation/3"
#: ... and with ``--holdout-only``, which has no cross-validation to show.
HOLDOUT_FORMAT = "confpred-holdout/1"
#: How a long function says how far it is: called with the name of a step, how many of its parts
#: are done, and how many it has. `confpred.cli.steps` shows bars or lines.
Said = Callable[[str, int, int], None]
_PACKAGES = ("pyarrow", "joblib", "sklearn", "rich", "matplotlib")


def require_packages() -> None:
    """Check that what training needs is installed, before its modules are imported.

    Raises:
        MissingExtra: a package is not installed.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), "train")


def unsaid(step: str, done: int, total: int) -> None:
    """Show nothing."""
