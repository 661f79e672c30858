"""Explanations and evaluations as plots and pages."""

#: The share of judged layers whose regret a bound is calibrated to hold for.
COVERAGE = 0.95
