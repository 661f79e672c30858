"""Depthwise convolution, forward: any channel multiplier, fused bias, residual and activation."""

from __future__ import annotations

from confpred.families.depthwise.image import DepthwiseImage

FAMILY = DepthwiseImage("fprop")
