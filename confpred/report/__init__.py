"""Explanations and evaluations as plots and pages."""

#: Share of judged layers that a bound is calibrated to hold for.
COVERAGE = 0.95
