"""Training and judging models."""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

#: What the JSON of ``confpred evaluate`` says of its own form; `confpred.report` reads it.
EVALUATION_FORMAT = "confpred-evaluation/3"
#: ... and with ``--holdout-only``, which has no cross-validation to show.
HOLDOUT_FORMAT = "confpred-holdout/1"
_PACKAGES = ("pyarrow", "joblib", "sklearn", "rich", "matplotlib")


def require_packages() -> None:
    """Check that what training needs is installed, before its modules are imported.

    Raises:
        MissingExtra: a package is not installed.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), "train")
