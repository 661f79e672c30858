"""What checking and timing need on a GPU: operands, references, workspaces, and room for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from confpred.cuda import driver
from confpred.cuda.compiler import compile_kernel
from confpred.cuda.launch import BoundLaunch
from confpred.errors import LaunchError
from confpred.problem.operation import (
    REFERENCE,
    SCRATCH,
    ZEROED,
    KernelSpec,
    Launch,
    Operand,
    Operation,
)
from confpred.problem.record import Record

_ALIGN = 256
_L2_MULTIPLE = 3  # operands cycle through this many times the L2 cache
#: Largest relative error of one rounding to the dtype (half a unit in the last place), doubled for
#: a sum that rounds to the neighbour.
_ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}
#: Errors of sums of products of values in [-1, 1), in float32; they grow with the number of
#: products.
_ABSOLUTE, _ABSOLUTE_A_TERM = 1e-5, 4e-7
#: Of a product of numbers in [-1, 1) that are rounded to TF32 first, to 11 bits each, the error has
#: a standard deviation below this. Errors of a sum grow with the root of their number, and the
#: largest of some million is some six deviations away.
_TF32 = 2.0**-12
_TF32_DEVIATIONS = 8
_POISON = 0xFF  # every byte: NaN in all the dtypes
_GRID = 132 * 8  # blocks of the helper kernels that stride over their elements


@dataclass(frozen=True, slots=True)
class Operands:
    """Some copies of a problem's operands in device memory.

    Attributes:
        names: of the operation's operands, then ``zeroed`` and ``scratch``.
        bases: address of the first of each; 0 for a workspace that nothing needs.
        strides: bytes from each to the next of its kind; 0 for ``zeroed`` and ``scratch``, which
            launches of one stream share as they do in a program.
        slots: how many copies there are.
    """

    names: tuple[str, ...]
    bases: tuple[int, ...]
    strides: tuple[int, ...]
    slots: int

    def slot(self, index: int) -> list[int]:
        """Addresses of the operands of launch `index`; after the last slot comes the first."""
        index %= self.slots
        return [b + index * s for b, s in zip(self.bases, self.strides, strict=True)]

    def base(self, name: str) -> int:
        """Address of the first operand `name`."""
        return self.bases[self.names.index(name)]


class Arena:
    """Device memory, stream and helper kernels of one GPU, kept between problems.

    Attributes:
        ordinal: CUDA device.
        cuda: the same as `cuda.core` knows it, current in this thread.
        device: its description.
        stream, handle: the stream that everything runs on, and its CUDA handle.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.cuda = driver.make_current(ordinal)
        self.device = driver.device_of(ordinal)
        self.stream = self.cuda.create_stream()
        self.handle = int(self.stream.handle)
        self._buffers: dict[str, Any] = {}
        self._filled: dict[str, tuple[str, float]] = {}
        self._computed: dict[str, Record] = {}  # what the references hold
        self._kernels: dict[KernelSpec, driver.LoadedKernel] = {}

    def operands(
        self, operation: Operation, problem: Record, launches: Sequence[Launch]
    ) -> Operands:
        """Random inputs, sliced so that successive slices do not fit in L2 together, and the
        workspaces that any of `launches` needs."""
        tensors = operation.operands(problem)
        sizes = [_aligned(t.bytes) for t in tensors]
        slots = -(-_L2_MULTIPLE * self.device.l2_bytes // sum(sizes))
        bases = [
            self._buffer(t.name, slots * size, None if t.terms else (t.dtype, t.scale))
            for t, size in zip(tensors, sizes, strict=True)
        ]
        for name, size in (
            (ZEROED, max((launch.zeroed_bytes for launch in launches), default=0)),
            (SCRATCH, max((launch.scratch_bytes for launch in launches), default=0)),
        ):
            bases.append(self._buffer(name, size, None) if size else 0)
        return Operands(
            names=(*(t.name for t in tensors), ZEROED, SCRATCH),
            bases=tuple(bases),
            strides=(*sizes, 0, 0),
            slots=slots,
        )

    def reference(
        self, operation: Operation, problem: Record, output: Operand, operands: Operands
    ) -> int:
        """Address of `output` in float64, for the inputs of slice 0: their values depend on the
        problem alone, so the families of a problem share it."""
        name = f"{REFERENCE} {output.name}"
        address = self._buffer(name, 8 * output.elements, None)
        if self._computed.get(name) == problem:
            return address
        self._buffers[name].fill(0, stream=self.stream)
        step = operation.reference(problem, output.name)
        launch = Launch((step,))
        bound = BoundLaunch([self.load(step.kernel).kernel], launch, (*operands.names, REFERENCE))
        bound.enqueue(self.handle, [*operands.slot(0), address])
        self._computed[name] = problem
        return address

    def poison(self, outputs: Sequence[Operand]) -> None:
        """Fill all outputs and the scratch with NaN, which shows elements that are never written or
        are read too early; and fill the zeroed workspace with zeros."""
        for name in (*(o.name for o in outputs), SCRATCH):
            if name in self._buffers:
                self._buffers[name].fill(_POISON, stream=self.stream)
        if ZEROED in self._buffers:
            self._buffers[ZEROED].fill(0, stream=self.stream)

    def compare(
        self, output: Operand, operands: Operands, reference: int, *, tf32: bool = False
    ) -> tuple[float, int]:
        """Relative error of `output` in the 2-norm, and how many elements are outside the bound,
        which is wider where the inputs may be rounded to TF32."""
        absolute = _ABSOLUTE + _ABSOLUTE_A_TERM * output.terms
        if tf32:
            absolute += _TF32_DEVIATIONS * _TF32 * output.terms**0.5
        error, norm, outside = self._totals(
            "compare",
            output.dtype,
            operands.base(output.name),
            reference,
            np.int64(output.elements),
            np.float64(_ROUNDING[output.dtype]),
            np.float64(absolute),
        )
        return float(np.sqrt(error / norm)) if norm else float(np.sqrt(error)), int(outside)

    def left_zero(self, operands: Operands, size: int) -> bool:
        """Whether the first `size` bytes of the zeroed workspace are zero again."""
        if not size:
            return True
        words = np.int64(-(-size // 4))
        return not any(self._totals("count_nonzero", "float32", operands.base(ZEROED), words))

    def load(self, spec: KernelSpec) -> driver.LoadedKernel:
        """The kernel of `spec`. It is loaded once, because problems share kernels, and may use all
        the shared memory that a block can have, because each launch needs a different amount.

        Raises:
            CompileError, LaunchError: it cannot be compiled or loaded.
        """
        loaded = self._kernels.get(spec)
        if loaded is None:
            compiled = compile_kernel(spec, self.device.arch)
            loaded = driver.load(compiled, self.device.smem_per_block)
            self._kernels[spec] = loaded
        return loaded

    def _totals(self, entry: str, dtype: str, *arguments: Any) -> Any:
        """The three float64 totals that a helper kernel computes."""
        from cuda.bindings import runtime

        address = self._buffer("totals", 24, None)
        self._buffers["totals"].fill(0, stream=self.stream)
        self._enqueue(entry, dtype, (address, *arguments))
        host = np.empty(3)
        self.stream.sync()
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        (code,) = runtime.cudaMemcpy(host.ctypes.data, address, host.nbytes, kind)
        if code != runtime.cudaError_t.cudaSuccess:
            raise LaunchError(f"reading results back failed: {code.name}")
        return host

    def _buffer(self, name: str, size: int, random: tuple[str, float] | None) -> int:
        """Address of at least `size` bytes, grown as needed; random numbers in it if asked, of a
        dtype and between minus a scale and the scale."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            if buffer is not None:
                self.stream.sync()
                buffer.close()
            size = _aligned(max(size, _ALIGN))
            buffer = self._buffers[name] = self.cuda.allocate(size, stream=self.stream)
            self._filled.pop(name, None)
            self._computed.pop(name, None)
        if random is not None and self._filled.get(name) != random:
            dtype, scale = random
            seed = np.uint32(sum(name.encode()))
            words = np.int64(buffer.size // (4 if dtype == "float32" else 2))
            arguments = (int(buffer.handle), words, seed, np.float32(scale))
            self._enqueue("fill_random", dtype, arguments)
            self._filled[name] = random
        return int(buffer.handle)

    def _enqueue(self, entry: str, dtype: str, arguments: tuple[Any, ...]) -> None:
        from cuda.core import LaunchConfig, launch

        spec = KernelSpec("reference.cu", entry, (("DTYPE", f"DTYPE_{dtype.upper()}"),))
        config = LaunchConfig(grid=_GRID, block=256)
        launch(self.stream, config, self.load(spec).kernel, *arguments)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@lru_cache(maxsize=1)
def arena_of(ordinal: int) -> Arena:
    """The arena of CUDA device `ordinal`; a process measures on one device."""
    return Arena(ordinal)
