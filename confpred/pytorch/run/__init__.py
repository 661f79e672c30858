"""Operators that rewritten graphs and eager programs call, and CUDA graphs.

calls       operators -> convolve, norms, pointwise, fold, library
launches    choosing, verify -> loading
replays     graphs
"""
