"""Depthwise convolution, gradient of the input, as many filters as channels."""

from __future__ import annotations

from confpred.families.depthwise.image import DepthwiseImage

FAMILY = DepthwiseImage("dgrad")
