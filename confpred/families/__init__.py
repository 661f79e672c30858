"""Kernel families: each a config table, pure functions and a CUDA source."""
