"""Triton has wheels for Linux alone: where it is not installed, its kernels are not tested."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
