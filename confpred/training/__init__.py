"""Training and judging models."""

from __future__ import annotations

#: What the JSON of ``confpred evaluate`` says of its own form; `confpred.report` reads it.
EVALUATION_FORMAT = "confpred-evaluation/3"
#: ... and with ``--holdout-only``, which has no cross-validation to show.
HOLDOUT_FORMAT = "confpred-holdout/1"
#: What training imports.
MODULES = ("pyarrow", "joblib", "sklearn", "rich", "matplotlib")
