"""Depthwise convolution on tensor cores, the gradient of the input."""

from __future__ import annotations

from confpred.families._depthwise_banded import DepthwiseBanded

FAMILY = DepthwiseBanded("dgrad")
