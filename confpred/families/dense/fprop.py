"""Dense convolution of few channels, forward, with a fused bias, residual and activation:
``dense_tiles.cu``."""

from __future__ import annotations

from confpred.families.dense.tiles import DenseTiles

FAMILY = DenseTiles(
    name="dense_fprop",
    direction="fprop",
    operands=("out", "in", "filter", "bias", "residual"),
)
