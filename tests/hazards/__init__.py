"""Functions for the things that a program may do around calls to confpred.

base         the network, its inputs, and how an optimized model is compared with an eager twin
forwards     what a forward does
writes       weights that change
gradients    what a program does with autograd
lifetimes    backward passes in any order, memory that runs out
structures   how a forward is built
calls        inputs, outputs, switches and modes
programs     streams, threads, processes, other compilers, copies
ranks        lines and volumes

Each function is a program that takes a `base.Run`: it is run with the model optimized, and with the
model as it was. Everything that it returns has to be the same.
"""

from __future__ import annotations

from hazards import calls, forwards, gradients, lifetimes, programs, ranks, structures, writes
from hazards.base import HAZARDS, compare

__all__ = [
    "HAZARDS", "calls", "compare", "forwards", "gradients", "lifetimes", "programs", "ranks",
    "structures", "writes",
]  # fmt: skip
