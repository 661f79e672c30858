"""Products of matrices, as steps of a launch that a library computes between kernels of ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """Matrices in an operand: element (i, j) of matrix b is the operand's element
    ``offset + b * strides[0] + i * strides[1] + j * strides[2]``.

    Attributes:
        operand: its name.
        shape: how many matrices there are, their rows and their columns.
        strides: elements from each to the next; 0 for a matrix that all products of a batch share.
        offset: elements before the first.
    """

    operand: str
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """``out = activation(a @ b + bias)``, or ``out += a @ b``, for each matrix of a batch, by
    cuBLAS. Sums are in float32, rounded once to the dtype of the launch.

    Attributes:
        out, a, b: all of the problem's dtype; one matrix is a batch of 1.
        accumulate: whether `out` is added to.
        bias: name of the operand that is added to each row; of batches of 1 only.
        relu: whether ReLU follows; of products with a bias only.
        tf32: whether float32 inputs may be rounded to TF32.
    """

    out: View
    a: View
    b: View
    accumulate: bool = False
    bias: str | None = None
    relu: bool = False
    tf32: bool = False
