"""Depthwise convolution: on ordinary arithmetic, and, banded, on tensor cores."""
