"""Chains of linear layers by Strassen's algorithm, one level deep: see ``strassen.cu``.

A product of two matrices becomes seven of half the size, an eighth fewer multiplications, for sums
of quarters before and after it. The right factor is a weight, whose sums are made at each launch:
no write to a weight can be missed. The left one is what the layer before computes, so that one
kernel does a layer's suffix, its bias and activation, and the prefix of the next:

    in --> prefix --> 7 products --> suffix, bias, activation, prefix --> 7 products --> ... --> out
                          ^                                                   ^
                  sums of weight 0                                    sums of weight 1

Odd sizes are filled up with zeros: half a width is rounded up to 16 bytes, which cuBLAS wants for
its fast kernels in any case, and half a batch to a whole row. Nothing is copied for that, since the
zeros exist in the workspace alone; peeling the last row and column off would take more products.

Sums and differences of quarters are rounded to the dtype, so that the result is less exact than an
ordinary product's (`error_of`), and an infinity makes more than its own row and column infinite.
Only a caller who sets a bound on the error gets it; others get ordinary products.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from confpred import products as chains
from confpred.families.protocol import Rows
from confpred.families.table import config_table
from confpred.problem.activation import activation_macro
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.linear_chain import LINEAR_CHAIN, LinearChain
from confpred.problem.operation import SCRATCH, KernelSpec, Launch, Product, Step, View

#: Which layers use Strassen's algorithm: all of them, or those between the first and the last,
#: whose outer width may be small.
ALL, INNER = range(2)
_THREADS = 256
_BYTES = 16  # of an access
_LEAST_BATCH, _LEAST_WIDTH = 2, 16
#: Size of each of three parts of the workspace: kernels count it in 31 bits of 16 bytes.
_MOST_BYTES = 2**33
_PRODUCTS = 7
#: Relative error of one layer in the 2-norm, against float64; see `error_of`.
_ERROR = {
    "float16": 1.5e-3,
    "bfloat16": 1.2e-2,
    "float32": 4e-6,
    "tf32": 1.2e-3,
}


def error_of(problem: LinearChain) -> float:
    """Return a bound on the relative error of the answer, in the 2-norm against float64.

    Each layer adds an independent error of its own, and passes on those before it. The constants
    are twice what was measured or more: ``benchmarks/kernels/linear_chains.py`` measures it again
    on a GPU, and ``tests/cpu/products/test_strassen.py`` on a CPU.
    """
    one = _ERROR["tf32" if problem.tf32 else problem.dtype]
    return float(one * problem.layers**0.5)


class Strassen(chains.ChainFamily):
    """See the module."""

    name = "linear_strassen"
    configs = config_table(("inner",), [(ALL,), (INNER,)])
    feature_names = (
        *LINEAR_CHAIN.feature_names, "inner", "log_half_batch", "filled", "saved", "log_workspace",
        "log_estimate",
    )  # fmt: skip

    def legal(self, problem: LinearChain, device: Device) -> NDArray[np.bool_]:
        p = problem
        if p.batch < _LEAST_BATCH:
            return np.zeros(2, np.bool_)
        # The layers at the ends are ordinary products, with an epilogue by cuBLASLt.
        inner = p.layers > 2 and p.hidden >= _LEAST_WIDTH
        inner &= p.bias and p.activation in ("none", "relu")
        fits = _PRODUCTS * _half(p, max(p.widths)) ** 2 * p.itemsize <= _MOST_BYTES
        fits &= _PRODUCTS * -(-p.batch // 2) * _half(p, max(p.widths)) * p.itemsize <= _MOST_BYTES
        return np.array([min(p.widths) >= _LEAST_WIDTH and fits, inner and fits])

    def _derived(
        self, problem: LinearChain, device: Device, rows: Rows
    ) -> dict[str, NDArray[np.float64]]:
        """Return the estimate: products by the roofline, and passes by what they move, most of
        which stays in the L2 cache where it fits."""
        p, estimates = problem, []
        for row in rows:
            launch = self.launch(p, int(row))
            flops = moved = 0.0
            for part in launch.program:
                if isinstance(part, Product):
                    batch, m, k = part.a.shape
                    n = part.b.shape[2]
                    flops += 2.0 * batch * m * k * n
                    moved += p.itemsize * batch * (m * k + k * n + m * n)
            passes = 2.0 * launch.scratch_bytes
            passes *= 0.3 if launch.scratch_bytes < device.l2_bytes / 2 else 1.0
            seconds = chains.product_s(p, device, flops, moved) + passes / device.dram_bytes_per_s
            seconds += len(launch.program) * chains.LAUNCH_S
            shares = 8.0 / 7.0 * flops / p.flops, 1.0 - flops / p.flops
            estimates.append((seconds, *shares, launch.workspace_bytes))
        estimate, filled, saved, workspace = np.array(estimates, np.float64).reshape(-1, 4).T
        return {
            "inner": self.configs["inner"][rows].astype(np.float64),
            "log_half_batch": np.log2(np.full(len(rows), float(-(-p.batch // 2)))),
            "filled": filled,
            "saved": saved,
            "log_workspace": np.log2(workspace),
            "estimate": estimate,
        }

    def launch(self, problem: LinearChain, row: int) -> Launch:
        p = problem
        ends = (0, p.layers - 1) if int(self.configs["inner"][row]) == INNER else ()
        return _ChainLaunch(p, [index not in ends for index in range(p.layers)]).launch()


FAMILY = Strassen()
#: An operand, and where in it a matrix begins, in bytes.
_Place = tuple[str, int]


def _half(p: LinearChain, width: int) -> int:
    """Return the columns of a quarter of a matrix with `width` columns."""
    vector = _BYTES // p.itemsize
    return -(-width // (2 * vector)) * vector


class _ChainLaunch:
    """The launch of a chain whose `halved` layers use Strassen's algorithm."""

    def __init__(self, p: LinearChain, halved: list[bool]) -> None:
        self._p, self._halved = p, halved
        self._half_batch = -(-p.batch // 2)
        layers = list(enumerate(pairwise(p.widths)))
        quarter = self._half_batch
        sums = [quarter * _half(p, before) for i, (before, _) in layers if halved[i]]
        weights = [_half(p, a) * _half(p, b) for i, (a, b) in layers if halved[i]]
        results = [quarter * _half(p, after) for i, (_, after) in layers if halved[i]]
        whole = [p.batch * after for i, (_, after) in layers[:-1] if not self._feeds_halves(i)]
        self._scratch = chains.Layout(p.itemsize)
        self._sums = self._scratch.add(_PRODUCTS * max(sums))
        self._results = self._scratch.add(_PRODUCTS * max(results))
        # Outputs of layers that are matrices: none follows another but across a halved layer.
        self._whole = self._scratch.add(max(whole, default=0))
        self._weights = self._scratch.add(_PRODUCTS * max(weights))

    def _feeds_halves(self, index: int) -> bool:
        """Return whether one kernel ends layer `index` and begins the next."""
        halved = self._halved
        return halved[index] and index + 1 < len(halved) and halved[index + 1]

    def launch(self) -> Launch:
        p = self._p
        program: list[Step | Product] = []
        at = ("in", 0)  # where the matrix before a layer is
        for index, (before, after) in enumerate(pairwise(p.widths)):
            to = ("out", 0) if index == p.layers - 1 else (SCRATCH, self._whole)
            if not self._halved[index]:
                out, source = self._matrix(to, after), self._matrix(at, before)
                program.append(chains.layer_of(p, index, out, source))
            else:
                if index == 0 or not self._halved[index - 1]:
                    program.append(self._left(before, at))
                program.append(self._right(index, before, after))
                program.append(self._products(before, after))
                program.append(self._between(index, after, to))
            at = to
        return Launch.of_program(program, scratch_bytes=self._scratch.bytes, error=error_of(p))

    def _matrix(self, at: _Place, columns: int) -> View:
        return chains.matrix(at[0], self._p.batch, columns, self._scratch.elements(at[1]))

    def _products(self, before: int, after: int) -> Product:
        m, k, n = self._half_batch, _half(self._p, before), _half(self._p, after)
        sums, results = self._scratch.elements(self._sums), self._scratch.elements(self._results)
        weights = self._scratch.elements(self._weights)
        return Product(
            View(SCRATCH, (_PRODUCTS, m, n), (m * n, n, 1), results),
            View(SCRATCH, (_PRODUCTS, m, k), (m * k, k, 1), sums),
            View(SCRATCH, (_PRODUCTS, k, n), (n * k, 1, k), weights),
            tf32=self._p.tf32,
        )

    def _right(self, index: int, before: int, after: int) -> Step:
        """Return the sums of a weight, features after x features before."""
        sizes = (after, before, _half(self._p, after), _half(self._p, before))
        return self._step("MATRIX", "RIGHT", (SCRATCH, self._weights), (f"weight{index}", 0), sizes)

    def _left(self, before: int, at: _Place) -> Step:
        sizes = (self._p.batch, before, self._half_batch, _half(self._p, before))
        return self._step("MATRIX", "LEFT", (SCRATCH, self._sums), at, sizes)

    def _between(self, index: int, after: int, to: _Place) -> Step:
        sizes = (self._p.batch, after, self._half_batch, _half(self._p, after))
        source = (SCRATCH, self._results)
        if self._feeds_halves(index):
            return self._step("PRODUCTS", "LEFT", (SCRATCH, self._sums), source, sizes, index)
        return self._step("PRODUCTS", "MATRIX", to, source, sizes, index)

    def _step(
        self,
        source_form: str,
        target_form: str,
        to: _Place,
        source: _Place,
        sizes: tuple[int, int, int, int],
        index: int | None = None,
    ) -> Step:
        """Return one kernel; `index` is that of the layer that it ends, or None."""
        p, vector = self._p, _BYTES // self._p.itemsize
        _, columns, half_rows, half_columns = sizes
        bias = index is not None and p.bias
        activation = "none" if index is None else p.activated(index)
        defines = (
            dtype_macro(p),
            ("FROM", source_form),
            ("TO", target_form),
            activation_macro(activation),
            ("HAS_BIAS", int(bias)),
            ("ALIGNED", int(columns % vector == 0)),
            ("VECTOR", vector),
            ("THREADS", _THREADS),
        )
        return Step(
            KernelSpec("strassen.cu", "strassen", defines),
            grid=(-(-half_rows * (half_columns // vector) // _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            smem_bytes=0,
            operands=(to[0], source[0], "bias" if index is None else f"bias{index}"),
            scalars={
                "to_start": self._scratch.units(to[1]),
                "from_start": self._scratch.units(source[1]),
                **dict(zip(("rows", "columns", "half_rows", "half_columns"), sizes, strict=True)),
            },
        )
