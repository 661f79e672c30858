"""What checking and timing need on a GPU: operands, the reference, and room for both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from confpred.cuda import driver
from confpred.cuda.compiler import compile_kernel
from confpred.errors import LaunchError
from confpred.families.base import KernelSource, Launch
from confpred.problem import ACTIVATIONS, Problem

_ALIGN = 256
_L2_MULTIPLE = 3  # operands cycle through this many times the L2 cache
#: Largest relative error of one rounding to the dtype (half a unit in the last place), doubled for
#: a sum that rounds to the neighbour.
_ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_POISON = 0xFF  # every byte: NaN in float16 and bfloat16
_GRID = 132 * 8  # blocks of the helper kernels that stride over their elements


@dataclass(frozen=True, slots=True)
class Operands:
    """A problem's operands in device memory, many times over.

    Attributes:
        bases: addresses of the first output, input, filter and bias (0 if absent).
        strides: bytes from each to the next of its kind.
        slots: how many there are of each.
    """

    bases: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    slots: int

    def slot(self, index: int) -> tuple[int, ...]:
        """Addresses of the operands of launch `index`; after the last slot comes the first."""
        index %= self.slots
        return tuple(b + index * s for b, s in zip(self.bases, self.strides, strict=True))


class Bench:
    """Device memory, stream and helper kernels of one GPU, kept between problems.

    Attributes:
        ordinal: CUDA device.
        cuda: the same as `cuda.core` knows it, current in this thread.
        device: its description.
        stream, handle: where everything happens, and its CUDA handle.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.cuda = driver.make_current(ordinal)
        self.device = driver.device_of(ordinal)
        self.stream = self.cuda.create_stream()
        self.handle = int(self.stream.handle)
        self._arenas: dict[str, Any] = {}
        self._filled: dict[str, str] = {}
        self._kernels: dict[KernelSource, driver.LoadedKernel] = {}

    def operands(self, problem: Problem) -> Operands:
        """Random inputs, sliced so that successive slices do not fit in L2 together."""
        sizes = [
            -(-2 * elements // _ALIGN) * _ALIGN
            for elements in (
                problem.output_elements,
                problem.input_elements,
                problem.filter_elements,
                problem.k if problem.bias else 0,
            )
        ]
        slots = -(-_L2_MULTIPLE * self.device.l2_bytes // sum(sizes))
        names = ("out", "in", "filter", "bias")
        bases = [
            self._arena(name, slots * size, None if name == "out" else problem.dtype)
            for name, size in zip(names, sizes, strict=True)
        ]
        if not problem.bias:
            bases[3] = 0
        return Operands(
            tuple(bases),  # type: ignore[arg-type]
            tuple(sizes),  # type: ignore[arg-type]
            slots,
        )

    def reference(self, problem: Problem, operands: Operands) -> int:
        """Address of the float64 output of slice 0."""
        out = self._arena("reference", 8 * problem.output_elements, None)
        blocks = -(-problem.output_elements // 256)
        scalars = (
            *(ACTIVATIONS.index(problem.activation), problem.n, problem.c, problem.h, problem.w),
            *(problem.k, problem.r, problem.s, problem.p, problem.q),
            *(*problem.stride, *problem.padding, *problem.dilation, problem.groups),
        )
        kernel = self._helper("reference_fprop", problem.dtype)
        launch = Launch((blocks, 1, 1), (256, 1, 1), 0, scalars)
        driver.BoundLaunch(kernel, launch).enqueue(self.handle, out, *operands.slot(0)[1:])
        return out

    def poison_output(self) -> None:
        """Fill all outputs with NaN, so that an element that is not written is seen."""
        self._arenas["out"].fill(_POISON, stream=self.stream)

    def compare(self, problem: Problem, out: int, reference: int) -> tuple[float, int]:
        """Relative error of `out` in the 2-norm, and how many elements are outside the bound."""
        totals = self._arena("totals", 24, None)
        self._arenas["totals"].fill(0, stream=self.stream)
        # Products of values in [-1, 1) summed in float32: the error grows with their number.
        terms = problem.group_width * problem.r * problem.s
        arguments = (
            *(totals, out, reference, np.int64(problem.output_elements)),
            *(np.float64(_ROUNDING[problem.dtype]), np.float64(1e-5 + 2e-6 * terms)),
        )
        self._enqueue("compare", problem.dtype, arguments)
        host = np.empty(3)
        self._read(host)
        error, norm, outside = host
        return float(np.sqrt(error / norm)) if norm else float(np.sqrt(error)), int(outside)

    def load(self, source: KernelSource) -> driver.LoadedKernel:
        """The kernel of `source`, loaded once, as problems share kernels; with all the shared
        memory that a block can have, as each launch needs another amount.

        Raises:
            CompileError, LaunchError: it cannot be compiled or loaded.
        """
        loaded = self._kernels.get(source)
        if loaded is None:
            compiled = compile_kernel(source, self.device.arch)
            loaded = driver.load(compiled, self.device.smem_per_block)
            self._kernels[source] = loaded
        return loaded

    def _read(self, host: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        from cuda.bindings import runtime

        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        address = int(self._arenas["totals"].handle)
        self.stream.sync()
        (code,) = runtime.cudaMemcpy(host.ctypes.data, address, host.nbytes, kind)
        if code != runtime.cudaError_t.cudaSuccess:
            raise LaunchError(f"reading results back failed: {code.name}")

    def _arena(self, name: str, size: int, random_dtype: str | None) -> int:
        """Address of at least `size` bytes, grown as needed; random numbers in it if asked."""
        arena = self._arenas.get(name)
        if arena is None or arena.size < size:
            if arena is not None:
                self.stream.sync()
                arena.close()
            arena = self._arenas[name] = self.cuda.allocate(max(size, _ALIGN), stream=self.stream)
            self._filled.pop(name, None)
        if random_dtype is not None and self._filled.get(name) != random_dtype:
            seed = np.uint32(sum(name.encode()))
            arguments = (int(arena.handle), np.int64(arena.size // 2), seed)
            self._enqueue("fill_random", random_dtype, arguments)
            self._filled[name] = random_dtype
        return int(arena.handle)

    def _helper(self, entry: str, dtype: str) -> Any:
        defines = (("DTYPE", f"DTYPE_{dtype.upper()}"),)
        return self.load(KernelSource("reference.cu", entry, defines)).kernel

    def _enqueue(self, entry: str, dtype: str, arguments: tuple[Any, ...]) -> None:
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(grid=_GRID, block=256)
        launch(self.stream, config, self._helper(entry, dtype), *arguments)


@lru_cache(maxsize=1)
def bench_of(ordinal: int) -> Bench:
    """The bench of CUDA device `ordinal`; a process measures on one device."""
    return Bench(ordinal)
