"""Grouped convolution, gradient of the input: ``grouped_rows.cu`` in the other direction."""

from __future__ import annotations

from confpred.families.grouped.rows import GroupedRows

FAMILY = GroupedRows(
    name="grouped_dgrad",
    direction="dgrad",
    operands=("in_grad", "out_grad", "filter"),
)
