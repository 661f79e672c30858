"""Compiling, caching and launching kernels. The only part of the library that touches a GPU."""
