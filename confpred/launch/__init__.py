"""From a problem and a candidate to a launch on a stream; PyTorch and the sampler use it.

    assignment.py  a problem and the candidate that is to compute it, and both as one text
    runner.py      a launch of kernels, a program or a library's plan, which lacks only addresses
    kernels.py     kernels compiled in threads, loaded once, and bound to their operands
    program.py     kernels with matrix products between them, on PyTorch's tensors

PyTorch is imported by the last alone, which is imported where a launch has a program.
"""
