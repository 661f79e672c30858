"""Depthwise convolution on tensor cores, the gradient of the input."""

from __future__ import annotations

from confpred.families.depthwise.banded import DepthwiseBanded

FAMILY = DepthwiseBanded("dgrad")
