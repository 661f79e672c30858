"""Launches with matrix products in them, on the CPU: their kernels are interpreted (`ptx`), their
products are PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from ptx.launch import run_step
from ptx.memory import DeviceMemory, Operand
from ptx.text import PtxError

from confpred.families.protocol import Family
from confpred.launch.program import Bound, Operands, Program, multiply
from confpred.problem.operation import SCRATCH, Launch, Product, Step, View
from confpred.problem.record import Record

_ITEM = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class CpuProgram:
    """A launch on operands of which every byte is watched; see `run_program`."""

    def __init__(
        self,
        launch: Launch,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Size],
        arch: str,
    ) -> None:
        self._arch, self._launch = arch, launch
        self._dtype = next(iter(inputs.values())).dtype
        item = _ITEM[self._dtype]
        watched = [Operand(name, _bytes(x), written=True, once=False) for name, x in inputs.items()]
        for name, shape in outputs.items():
            watched.append(
                Operand(name, np.empty(item * shape.numel(), np.uint8), written=False, once=False)
            )
        if launch.scratch_bytes:
            scratch = np.empty(launch.scratch_bytes, np.uint8)
            watched.append(Operand(SCRATCH, scratch, written=False, once=False))
        self._watched = {operand.name: operand for operand in watched}
        self._memory = DeviceMemory(watched)
        self._shapes = outputs
        self.tensors: dict[str, torch.Tensor] = {
            name: torch.from_numpy(operand.content) for name, operand in self._watched.items()
        }
        for name in (*inputs, *outputs):
            self.tensors[name] = self.tensors[name].view(self._dtype)

    def run(self) -> dict[str, torch.Tensor]:
        """Return the outputs by name, after one launch.

        Raises:
            PtxError: a kernel or a product reads what nobody has written, or a kernel breaks
                another rule.
        """
        program = Program(self._launch, self._bind)
        program._parts = [  # type: ignore[misc]
            self._product(part) if isinstance(part, Product) else part for part in program._parts
        ]
        program(self.tensors)
        return {
            name: self.tensors[name].view(shape).clone() for name, shape in self._shapes.items()
        }

    def _bind(self, step: Step) -> Bound:
        def run(operands: Operands) -> None:
            self._memory.forget_writers()
            run_step(step, self._memory, self._arch)

        return run

    def _product(self, product: Product) -> Bound:
        def run(operands: Operands) -> None:
            read = [product.a, product.b] + ([product.out] if product.accumulate else [])
            for view in read:
                marks = self._marks(view)
                if marks is not None and not (marks == 255).all():
                    raise PtxError(f"{view.operand} is multiplied where nothing was written")
            multiply(product, operands, {})
            marks = self._marks(product.out)
            if marks is not None:
                marks[...] = 255

        return run

    def _marks(self, view: View) -> torch.Tensor | None:
        """Which bytes of `view` are written; None for an input."""
        written = self._watched[view.operand].written
        if written is None:
            return None
        item = _ITEM[self._dtype]
        shape, strides = (*view.shape, item), (*(item * s for s in view.strides), 1)
        return torch.from_numpy(written).as_strided(shape, strides, item * view.offset)


def run_program(
    family: Family, problem: Record, row: int, inputs: Mapping[str, torch.Tensor], arch: str
) -> dict[str, torch.Tensor]:
    """Return the outputs of config `row` of `family`, whose kernels are those compiled for `arch`;
    outputs and workspaces are poisoned first.

    Raises:
        PtxError: see `CpuProgram.run`.
    """
    outputs = {o.name: torch.Size(o.shape) for o in family.operation.operands(problem) if o.terms}
    return CpuProgram(family.launch(problem, row), inputs, outputs, arch).run()


def _bytes(x: torch.Tensor) -> np.ndarray:
    found: np.ndarray = x.contiguous().view(torch.uint8).numpy().ravel()
    return found
