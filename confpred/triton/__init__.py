"""Triton kernels as kernel families; nothing here imports Triton.

    source.py   a kernel's Python source: its digest, and the names that its loops are over
    problem.py  the record of a kernel's calls: the integers of its key, and its tensors' dtypes
    family.py   the kernel's configs as a family, with features made from names and sizes

`confpred.measure.calls` measures such families, and `confpred.tuned` launches them.
"""
