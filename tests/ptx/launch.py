"""A family's config, or an operation's launch, on operands on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from confpred.cuda import compiler
from confpred.errors import CompileError
from confpred.families.protocol import Family
from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec, Launch, Step
from confpred.problem.record import Record
from ptx.machine import Machine
from ptx.memory import DeviceMemory, Operand
from ptx.opcodes import decode
from ptx.text import Kernel, PtxError, parse

#: Threads that run side by side: with more, each instruction has less overhead but larger arrays.
THREADS = 8192

Bytes = NDArray[np.uint8]


def interpret(
    family: Family, problem: Record, row: int, inputs: Mapping[str, torch.Tensor], arch: str
) -> dict[str, torch.Tensor]:
    """Return the outputs of config `row` of `family`, as compiled for `arch`, by name.

    Args:
        inputs: on the CPU, by operand name, in the shapes and dtype of the operation's operands.

    Raises:
        PtxError: see `run`.
    """
    operands = {o.name: o for o in family.operation.operands(problem)}
    found = run(
        family.launch(problem, row),
        {name: x.contiguous().view(torch.uint8).numpy().ravel() for name, x in inputs.items()},
        {o.name: o.bytes for o in operands.values() if o.terms},
        arch,
    )
    return {
        name: torch.from_numpy(content.copy())
        .view(getattr(torch, operands[name].dtype))
        .view(operands[name].shape)
        for name, content in found.items()
    }


def run(
    launch: Launch, inputs: Mapping[str, Bytes], outputs: Mapping[str, int], arch: str
) -> dict[str, Bytes]:
    """Launch on a copy of `inputs`.

    Args:
        launch: what a family makes of a config and a problem.
        inputs: the bytes of each input.
        outputs: how many bytes each output has; they are poisoned.
        arch: target of the PTX.

    Returns:
        The bytes of each output.

    Raises:
        PtxError: a check failed (see the package), or the zeroed workspace is left dirty.
    """
    operands = [Operand(name, data, written=True, once=False) for name, data in inputs.items()]
    for name, size in outputs.items():
        operands.append(Operand(name, np.empty(size, np.uint8), written=False, once=True))
    if launch.zeroed_bytes:
        zeros = np.zeros(launch.zeroed_bytes, np.uint8)
        operands.append(Operand(ZEROED, zeros, written=True, once=False))
    if launch.scratch_bytes:
        scratch = np.empty(launch.scratch_bytes, np.uint8)
        operands.append(Operand(SCRATCH, scratch, written=False, once=False))
    memory = DeviceMemory(operands)
    for step in launch.steps:
        memory.forget_writers()
        run_step(step, memory, arch)
    found = {operand.name: operand.content for operand in operands}
    if found.get(ZEROED, np.zeros(1)).any():
        raise PtxError("the zeroed workspace is left dirty")
    return {name: found[name] for name in outputs}


def run_step(step: Step, memory: DeviceMemory, arch: str) -> None:
    """Run one kernel launch, some blocks at a time, in their order."""
    arguments = [*map(memory.address, step.operands), *step.scalars.values()]
    run_kernel(step, arguments, memory, arch)


def run_kernel(
    step: Step, arguments: Sequence[int | bytes], memory: DeviceMemory, arch: str
) -> None:
    """Run one kernel launch on these arguments; a struct is given as its bytes."""
    kernel = _kernel(step.kernel, arch)
    blocks = step.grid[0] * step.grid[1] * step.grid[2]
    threads = step.block[0] * step.block[1] * step.block[2]
    # Blocks that wait for one another have to run side by side.
    together = step.cooperative or kernel.of_clusters
    at_once = blocks if together else max(1, THREADS // threads)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, at_once):
            some = range(first, min(first + at_once, blocks))
            Machine(
                kernel, decode, memory, arguments, step.grid, step.block, some, step.smem_bytes
            ).run()


@cache
def _kernel(spec: KernelSpec, arch: str) -> Kernel:
    return parse(ptx_of(spec, arch), spec.entry)


def ptx_of(spec: KernelSpec, arch: str) -> str:
    """Return the PTX that NVRTC makes of `spec`; needs no GPU.

    Raises:
        PtxError: NVRTC refuses it.
    """
    try:
        return compiler.ptx_of(spec, arch)
    except CompileError as error:
        raise PtxError(f"{spec.file}: {error}") from error
