"""Families that leave the arithmetic to a library's matrix products.

    im2col.py    convolution: a confpred kernel copies patches into rows, and cuBLAS multiplies
    epilogue.py  chains of linear layers: bias and ReLU in cuBLASLt's epilogue
    strassen.py  chains of linear layers by seven products of half the size

They need neither PyTorch nor a GPU. cuBLAS is PyTorch's, and called by `confpred.launch.program`.
This file has the parts that these families share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from confpred.families.protocol import Rows
from confpred.families.table import Described
from confpred.problem.device import Device
from confpred.problem.limits import ORDINARY_ERROR, TF32_ERROR, Limits
from confpred.problem.linear_chain import LINEAR_CHAIN, LinearChain
from confpred.problem.operation import Product, View

_UNIT = 16  # bytes: what parts of a workspace are aligned to
#: Rate of tensor cores for TF32 over that for half precision.
TF32_OVER_HALF = 0.5
#: Launch of a kernel or a product, and the gap to the next.
LAUNCH_S = 2.5e-6


@dataclass(slots=True)
class Layout:
    """Parts of a workspace, one after the other.

    Attributes:
        itemsize: bytes of an element.
        bytes: size so far.
    """

    itemsize: int
    bytes: int = 0

    def add(self, elements: int) -> int:
        """Add a part of so many `elements`, and return where it starts, in bytes."""
        start = self.bytes
        self.bytes += -(-elements * self.itemsize // _UNIT) * _UNIT
        return start

    def units(self, start: int) -> int:
        """Return `start`, in bytes, in the 16-byte units of kernels."""
        return start // _UNIT

    def elements(self, start: int) -> int:
        """Return `start`, in bytes, in elements."""
        return start // self.itemsize


def ordinary_error(problem: LinearChain) -> float:
    """Return the largest relative error, in the 2-norm against float64, of an answer as exact as
    PyTorch's: each layer adds an independent error."""
    one = TF32_ERROR if problem.tf32 else ORDINARY_ERROR[problem.dtype]
    return float(one * problem.layers**0.5)


def product_s(problem: LinearChain, device: Device, flops: float, moved: float) -> float:
    """Return the seconds of products that compute `flops` operations and move `moved` bytes."""
    if problem.dtype != "float32":
        rate = device.tensor_flops
    elif problem.tf32:
        rate = device.tensor_flops * TF32_OVER_HALF
    else:
        rate = device.simt_flops
    return max(flops / rate, moved / device.dram_bytes_per_s)


def matrix(operand: str, rows: int, columns: int, offset: int = 0) -> View:
    """Return a dense matrix in an operand, `offset` elements behind its start."""
    return View(operand, (1, rows, columns), (0, columns, 1), offset)


def layer_of(problem: LinearChain, index: int, out: View, source: View) -> Product:
    """Return layer `index` of a chain, from matrix to matrix, with bias and ReLU."""
    before, after = source.shape[2], out.shape[2]
    weight = View(f"weight{index}", (1, before, after), (0, 1, before))
    relu = problem.activated(index) == "relu"
    return Product(out, source, weight, bias=f"bias{index}", relu=relu, tf32=problem.tf32)


class ChainFamily(Described):
    """Base of the families of linear chains; their launches state an error."""

    operation = LINEAR_CHAIN

    def allowed(self, problem: LinearChain, rows: Rows, limits: Limits) -> NDArray[np.bool_]:
        """Return the `rows` within `limits`; whether TF32 may be used is part of the problem."""
        bound = ordinary_error(problem) if limits.max_error is None else limits.max_error
        most = inf if limits.workspace_bytes is None else limits.workspace_bytes
        launches = (self.launch(problem, int(row)) for row in rows)
        kept = [
            launch.error is not None and launch.error <= bound and launch.workspace_bytes <= most
            for launch in launches
        ]
        return np.array(kept, np.bool_) & (limits.tf32 or not problem.tf32)
