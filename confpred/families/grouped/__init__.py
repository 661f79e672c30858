"""Grouped convolution on tensor cores, group widths 1 to 64."""
