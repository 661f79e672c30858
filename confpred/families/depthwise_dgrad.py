"""Depthwise convolution, gradient of the input, as many filters as channels."""

from __future__ import annotations

from confpred.families._depthwise_image import DepthwiseImage

FAMILY = DepthwiseImage("dgrad")
