"""Grouped convolution, forward, with a fused bias, residual and activation: ``grouped_rows.cu``."""

from __future__ import annotations

from confpred.families.grouped.rows import GroupedRows

FAMILY = GroupedRows(
    name="grouped_fprop",
    direction="fprop",
    operands=("out", "in", "filter", "bias", "residual"),
)
