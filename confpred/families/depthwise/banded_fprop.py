"""Depthwise convolution on tensor cores, forward: fused bias, residual and activation."""

from __future__ import annotations

from confpred.families.depthwise.banded import DepthwiseBanded

FAMILY = DepthwiseBanded("fprop")
