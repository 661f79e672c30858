"""Triton kernels as kernel families; nothing here imports Triton.

    source.py         a kernel's Python source: its digest, and names that its loops have
    problem.py        the record of a kernel's calls: integers of its key, and its dtypes
    ranges.py         calls with sizes from ranges
    triton_family.py  the kernel's configs as a family, with features made from names and sizes

`confpred.measure.calls` measures such families, and `confpred.tuned` launches them.
"""
