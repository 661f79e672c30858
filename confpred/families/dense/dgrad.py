"""The gradient of a dense convolution's input, where its output has few channels:
``dense_tiles.cu``."""

from __future__ import annotations

from confpred.families.dense.tiles import DenseTiles

FAMILY = DenseTiles(
    name="dense_dgrad",
    direction="dgrad",
    operands=("in_grad", "out_grad", "filter"),
)
