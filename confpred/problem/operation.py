"""An *operation*, which is a kind of computation whichever kernel does it; its operands and
launches.

Convolution is one (`confpred.problem.conv2d`); ``docs/adding-a-kernel.md`` adds another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from confpred.problem.device import Device
from confpred.problem.record import ITEMSIZES, Record

if TYPE_CHECKING:
    import torch

#: Operands that a launch may have beside its operation's: see `Launch`.
ZEROED, SCRATCH = "zeroed", "scratch"
#: The float64 output of a reference kernel.
REFERENCE = "reference"
#: A step without a confpred kernel: products by the cuBLAS of the installed PyTorch.
PRODUCTS = "cublas"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything that determines a compiled kernel, except the compiler and the target.

    Attributes:
        file: name of the CUDA source in ``kernels/``, or of one on Python's module path.
        entry: name of the ``extern "C"`` kernel in it.
        defines: macro definitions, ``(name, value)`` in a fixed order.
    """

    file: str
    entry: str
    defines: tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch.

    Attributes:
        kernel, grid, block: the kernel, and its CUDA grid and block dimensions.
        smem_bytes: dynamic shared memory of one block.
        operands: the kernel's pointer parameters, by name, in order; the pointer is null where the
            problem does not have the operand.
        scalars: the ``int`` parameters that follow them, by name, in order: the problem's sizes.
        cooperative: whether its blocks wait for one another, so that the driver has to start all of
            them together, and refuses more than the device holds at once.
    """

    kernel: KernelSpec
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    operands: tuple[str, ...]
    scalars: Mapping[str, int]
    cooperative: bool = False


@dataclass(frozen=True, slots=True)
class LibraryPlan:
    """A library's plan, which runs in place of confpred kernels.

    Attributes:
        library, version: ``cudnn``, and its release, such as ``9.19``, which numbers `config`.
        config: the library's algorithm, by field name.
        tf32: whether it rounds float32 inputs to TF32, as PyTorch lets cuDNN do by default.
        error: largest relative error of an output in the 2-norm that was measured of the library's
            plans, of which PyTorch's operator is one; None for the error of all kernels
            (`confpred.problem.limits`).
    """

    library: str
    version: str
    config: Mapping[str, int]
    tf32: bool = False
    error: float | None = None

    @property
    def source(self) -> str:
        """Identity of the code that runs: the library and its release, where a confpred kernel has
        the digest of its source."""
        return f"{self.library} {self.version}"


@dataclass(frozen=True, slots=True)
class View:
    """Matrices in an operand: element (i, j) of matrix b is the operand's element
    ``offset + b * strides[0] + i * strides[1] + j * strides[2]``.

    Attributes:
        operand: the operand's name.
        shape: how many matrices there are, their rows and their columns.
        strides: elements from one matrix, row and column to the next; the first is 0 for a matrix
            that all products of a batch share.
        offset: elements before the first one.
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


@dataclass(frozen=True, slots=True)
class Launch:
    """How a config computes a problem.

    Attributes:
        steps: the kernels, in stream order; none where there is a `plan`.
        zeroed_bytes: size of the operand ``zeroed``: device memory that is zero before the first
            step and that the steps leave zero again, so that nobody has to clear it between calls.
        scratch_bytes: size of the operand ``scratch``: device memory of any content. The size
            that a plan needs is known when it is built.
        plan: what a library runs in place of `steps`.
        program: where a library multiplies matrices, `steps` with these products between them, in
            stream order; empty where there are none.
        file: CUDA source that identifies the launch, if it is not that of the first step: for
            families some of whose launches need no kernel. For a Triton kernel, its identity.
        error: largest relative error of an output in the 2-norm, if the algorithm is less exact
            than sums in float32 that are rounded once; else None.
    """

    steps: tuple[Step, ...]
    zeroed_bytes: int = 0
    scratch_bytes: int = 0
    plan: LibraryPlan | None = None
    program: tuple[Step | Product, ...] = ()
    file: str = ""
    error: float | None = None

    @classmethod
    def of_program(cls, program: Sequence[Step | Product], **others: Any) -> Launch:
        """Return a launch of kernels and products; `others` are further attributes."""
        steps = tuple(part for part in program if isinstance(part, Step))
        return cls(steps, program=tuple(program), **others)

    @property
    def source(self) -> str:
        """Name of the code that runs, whose identity is
        `confpred.families.kernel_text.identity_of`."""
        if self.plan is not None:
            return self.plan.source
        return self.file or (self.steps[0].kernel.file if self.steps else PRODUCTS)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """Kernels that have to be compiled for it."""
        return tuple(dict.fromkeys(step.kernel for step in self.steps))

    @property
    def workspace_bytes(self) -> int:
        """Device memory beside the operands, as far as it is known before a plan is built."""
        return self.zeroed_bytes + self.scratch_bytes

    @property
    def tf32(self) -> bool:
        """Whether it rounds float32 inputs to TF32."""
        products = (part for part in self.program if isinstance(part, Product))
        return any(p.tf32 for p in products) or (self.plan is not None and self.plan.tf32)


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor of a problem, contiguous in device memory, aligned to 16 bytes.

    Attributes:
        name: as `Step.operands` calls it.
        shape: outermost dimension first.
        dtype: ``float16``, ``bfloat16`` or ``float32``.
        terms: how many products each element of an output sums, as its rounding error grows with
            them; 0 for an input.
        scale, center: where inputs are made up, they are at most `scale` away from `center`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    terms: int = 0
    scale: float = 1.0
    center: float = 0.0

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEMSIZES[self.dtype]


@runtime_checkable
class Operation(Protocol):
    """A kind of problem. Every method is pure, save `pytorch`, which launches.

    Attributes:
        name: the operation's name in files.
        problem: the class of its problems.
        feature_names: the columns of `features`.
    """

    @property
    def name(self) -> str: ...
    @property
    def problem(self) -> type[Record]: ...
    @property
    def feature_names(self) -> tuple[str, ...]: ...

    def operands(self, problem: Any) -> tuple[Operand, ...]:
        """Return the tensors that `problem` has, outputs first."""

    def features(self, problem: Any, device: Device) -> NDArray[np.float32]:
        """Return the ``(1, len(feature_names))`` matrix of features that no kernel changes; the
        time of PyTorch's operator is predicted from them."""

    def reference(self, problem: Any, output: str) -> Step:
        """Return the kernel that computes `output` in float64 and adds it to the zeros that it
        finds in the operand ``reference``."""

    def pytorch(self, problem: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return a new tensor, or several, by PyTorch's call for `problem`; `tensors` are the
        inputs by name, of the shapes that `operands` gives."""


@runtime_checkable
class Prepared(Protocol):
    """An operation whose call in PyTorch needs the results of another call, as backward needs those
    of forward."""

    def prepared(
        self, problem: Any, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return `tensors`, the inputs by name, and the further arguments of `Operation.pytorch`,
        whose time does not count."""
