"""Convolution as a product of matrices: see ``im2col.cu``.

A config says of how many samples the patches are copied at once: of one (the loop over samples), of
some, or of all. More are faster where a sample is little work, and need more memory:

    samples * P * Q * C * R * S elements

and none where the filter is one pixel at stride 1, whose rows are the image itself. Tensors have
their channels last, so that the rows of a chunk are one matrix, and each group is one product;
``batched`` multiplies sample by sample in one batch instead, which is what a layout with its
channels first would need.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from confpred.cuda.epilogue import MOST_CHANNELS, MOST_ROWS, epilogue_of
from confpred.families.common import MAX_INT
from confpred.families.protocol import Rows
from confpred.families.table import Described, config_columns, config_table
from confpred.problem.conv2d import CONVOLUTION, Problem, dtype_macro, kernel_sizes
from confpred.problem.device import Device
from confpred.problem.limits import ORDINARY_ERROR, TF32_ERROR, Limits
from confpred.problem.operation import SCRATCH, KernelSpec, Launch, Product, Step, View
from confpred.products import LAUNCH_S, TF32_OVER_HALF

#: As a number of samples: all of them.
ALL = 0
_FILE = "im2col.cu"
_FIELDS = ("samples", "batched", "tf32")
_SAMPLES = (ALL, 1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Most chunks of a batch: enqueuing more takes the CPU longer than they could save.
_MOST_CHUNKS = 256
_MOST_WORKSPACE_BYTES = 2**31
_THREADS, _MOST_ACROSS, _IN_FLIGHT = 256, 128, 4
_BYTES = 16  # of a load, where a group's channels can be cut into such
_BLOCKS = 4096  # fill any GPU several times
_SIZES = "c h w r s p q stride_h stride_w pad_h pad_w dilation_h dilation_w groups"


class _Rows(NamedTuple):
    """The matrix of patches: rows of one sample, elements of a row, and whether they need not be
    copied."""

    pixels: int
    length: int
    are_the_image: bool


def _rows_of(problem: Problem) -> _Rows:
    p = problem
    plain = (p.r, p.s, p.stride, p.padding) == (1, 1, (1, 1), (0, 0))
    return _Rows(p.p * p.q, p.c * p.r * p.s, plain)


class Im2col(Described):
    """See the module."""

    name = "im2col"
    operation = CONVOLUTION
    configs = config_table(_FIELDS, product(_SAMPLES, (0, 1), (0, 1)))
    feature_names = (
        *CONVOLUTION.feature_names, *_FIELDS,
        "log_chunk", "log_chunks", "log_workspace", "log_row", "copied", "log_estimate",
    )  # fmt: skip

    def legal(self, problem: Problem, device: Device) -> NDArray[np.bool_]:
        """Refuse half precision where sums would be rounded more than once: gradients of the input
        add the copies of an element, those of the filter the chunks."""
        p, t, rows = problem, config_columns(self.configs), _rows_of(problem)
        chunk = np.where(t["samples"] == ALL, p.n, t["samples"])
        one = (t["samples"] == ALL) | (p.n == 1)
        legal: NDArray[np.bool_] = (
            ((t["samples"] == ALL) | (t["samples"] < p.n))
            & ((t["tf32"] == 0) | (p.dtype == "float32"))
            & (self.workspace_bytes(p) <= _MOST_WORKSPACE_BYTES)
            & (-(-p.n // chunk) <= _MOST_CHUNKS)
            & (chunk * max(rows.pixels, p.h * p.w) <= MAX_INT // 2)
            & ((t["batched"] == 0) | ((chunk > 1) & (p.groups == 1) & (p.direction == "fprop")))
        )
        if rows.are_the_image:
            legal &= (t["samples"] == ALL) & (t["batched"] == 0)
        elif p.dtype != "float32":
            legal &= one if p.direction == "wgrad" else p.direction == "fprop"
        too_large = max(p.n * rows.pixels, p.k) > min(MOST_ROWS, MAX_INT) or p.k > MOST_CHANNELS
        return legal & (not (too_large or (p.bias and p.direction == "wgrad")))

    def workspace_bytes(self, problem: Problem) -> NDArray[np.int64]:
        """Return the bytes of workspace that each config needs."""
        p, rows = problem, _rows_of(problem)
        samples = config_columns(self.configs)["samples"]
        chunk = np.where(samples == ALL, p.n, np.minimum(samples, p.n))
        return chunk * (0 if rows.are_the_image else rows.pixels * rows.length * p.itemsize)

    def allowed(self, problem: Problem, rows: Rows, limits: Limits) -> NDArray[np.bool_]:
        """Return the `rows` within `limits`. `Limits.allow` would need their launches, which are
        slow to make where the chunks are many."""
        tf32 = self.configs["tf32"][rows] == 1
        ordinary = np.where(tf32, TF32_ERROR, ORDINARY_ERROR[problem.dtype])
        mask: NDArray[np.bool_] = ~tf32 | limits.tf32
        if limits.workspace_bytes is not None:
            mask &= self.workspace_bytes(problem)[rows] <= limits.workspace_bytes
        return mask if limits.max_error is None else mask & (ordinary <= limits.max_error)

    def _derived(self, problem: Problem, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return the estimate: the copies cross device memory twice, unless a chunk stays in L2;
        the products take what the roofline says; and each launch takes its time."""
        p, of_rows = problem, _rows_of(problem)
        t = config_columns(self.configs, rows)
        chunk = np.where(t["samples"] == ALL, p.n, np.minimum(t["samples"], p.n))
        chunks = -(-p.n // chunk)
        workspace = self.workspace_bytes(p)[rows]
        copied = 2.0 * workspace * chunks * np.where(workspace < device.l2_bytes / 2, 0.3, 1.0)
        half = p.dtype != "float32"
        tensor_rate = device.tensor_flops * (1.0 if half else TF32_OVER_HALF)
        rate = np.where(half | (t["tf32"] == 1), tensor_rate, device.simt_flops)
        product_s = np.maximum(p.flops / rate, p.minimum_bytes / device.dram_bytes_per_s)
        launches = chunks * (1 if of_rows.are_the_image else 2)
        copy_s = copied / device.dram_bytes_per_s
        return {
            **{name: self.configs[name][rows] for name in _FIELDS},
            "log_chunk": np.log2(chunk.astype(np.float64)),
            "log_chunks": np.log2(chunks.astype(np.float64)),
            "log_workspace": np.log2(1.0 + workspace.astype(np.float64)),
            "log_row": np.log2(np.full(len(rows), float(of_rows.length))),
            "copied": copy_s / product_s,
            "estimate": product_s + copy_s + launches * LAUNCH_S,
        }

    def launch(self, problem: Problem, row: int) -> Launch:
        samples, batched, tf32 = (int(x) for x in self.configs[row])
        p, rows = problem, _rows_of(problem)
        chunk = p.n if samples == ALL else min(samples, p.n)
        program: list[Step | Product] = []
        for first in range(0, p.n, chunk):
            count = min(chunk, p.n - first)
            product = _product(p, rows, first, count, bool(batched), bool(tf32))
            if rows.are_the_image:
                program.append(product)
            elif p.direction == "dgrad":
                program += [product, _copy(p, "col2im", first, count)]
            else:
                program += [_copy(p, "im2col", first, count), product]
        program += _epilogue(p)
        scratch = int(self.workspace_bytes(p)[row])
        # In half precision, what follows the product rounds its sums a second time.
        twice = p.dtype != "float32" and isinstance(program[-1], Step) and p.direction == "fprop"
        error = ORDINARY_ERROR[p.dtype] if twice else None
        return Launch.of_program(program, scratch_bytes=scratch, file=_FILE, error=error)


def _product(p: Problem, rows: _Rows, first: int, count: int, batched: bool, tf32: bool) -> Product:
    """Return the product of `count` samples from `first` on."""
    within, out_width, pixels = rows.length // p.groups, p.k // p.groups, count * rows.pixels
    name = {"dgrad": "in_grad"}.get(p.direction, "in") if rows.are_the_image else SCRATCH
    before = first * rows.pixels * rows.length if rows.are_the_image else 0
    windows = View(name, (p.groups, pixels, within), (within, rows.length, 1), before)
    start = first * rows.pixels * p.k
    if p.direction == "wgrad":
        grads = View("out_grad", (p.groups, out_width, pixels), (out_width, 1, p.k), start)
        shape = (p.groups, out_width, within)
        out = View("filter_grad", shape, (out_width * within, within, 1))
        return Product(out, grads, windows, accumulate=first > 0, tf32=tf32)
    if p.direction == "dgrad":
        grads = View("out_grad", (p.groups, pixels, out_width), (out_width, p.k, 1), start)
        filters = View("filter", (p.groups, out_width, within), (out_width * within, within, 1))
        return Product(windows, grads, filters, tf32=tf32)
    out = View("out", (p.groups, pixels, out_width), (out_width, p.k, 1), start)
    filters = View("filter", (p.groups, within, out_width), (out_width * within, 1, within))
    if batched:
        out = View("out", (count, rows.pixels, p.k), (rows.pixels * p.k, p.k, 1), start)
        shape = (count, rows.pixels, rows.length)
        windows = View(SCRATCH, shape, (rows.pixels * rows.length, rows.length, 1))
        filters = View("filter", (count, rows.length, p.k), (0, 1, rows.length))
    return Product(out, windows, filters, tf32=tf32)


def _copy(p: Problem, entry: str, first: int, count: int) -> Step:
    """Return the kernel between images and rows, in either direction."""
    width, most = p.group_width, _BYTES // p.itemsize
    vector = next(v for v in (8, 4, 2, 1) if v <= most and width % v == 0)
    there = entry == "im2col"
    columns = p.c * (p.r * p.s if there else 1) // vector
    down = count * (p.p * p.q if there else p.h * p.w)
    across = min(_MOST_ACROSS, 1 << (columns - 1).bit_length())
    blocks_across, threads_down = -(-columns // across), _THREADS // across
    blocks_down = -(-down // (threads_down * (_IN_FLIGHT if there else 1)))
    defines = (dtype_macro(p), ("VECTOR", vector), ("THREADS", _THREADS), ("IN_FLIGHT", _IN_FLIGHT))
    return Step(
        KernelSpec(_FILE, entry, defines),
        grid=(min(blocks_down, max(1, _BLOCKS // blocks_across)), blocks_across, 1),
        block=(across, threads_down, 1),
        smem_bytes=0,
        operands=(SCRATCH, "in") if there else ("in_grad", SCRATCH),
        scalars={"first": first, "images": count, **kernel_sizes(p, _SIZES)},
    )


def _epilogue(p: Problem) -> tuple[Step, ...]:
    """Return the pass over the output for bias, residual and activation, if there are any."""
    if not (p.bias or p.has_epilogue):
        return ()
    return epilogue_of(p, _BLOCKS // 16).steps


FAMILY = Im2col()
