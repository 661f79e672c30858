"""The effect of each instruction on the registers and the memory of the threads that take it.

The semantics are those of the PTX ISA manual.
"""

from __future__ import annotations

from ptx.accesses import ACCESSES
from ptx.arithmetic import ARITHMETIC
from ptx.machine import Machine
from ptx.memory import Lanes
from ptx.operands import Maker, Step
from ptx.text import Instruction, PtxError
from ptx.warps import WARPS

_MAKERS: dict[str, Maker] = ARITHMETIC | ACCESSES | WARPS
#: Modifiers that change nothing here: roundings to nearest, approximations (computed exactly),
#: caching, ordering.
_IGNORED = {
    "rn", "approx", "ftz", "full", "uni", "volatile", "relaxed", "weak", "nc", "ca", "cg", "cs",
    "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "gpu", "cta", "sys", "aligned", "sync",
}  # fmt: skip


def decode(instruction: Instruction) -> Step:
    """Return the effect of `instruction`; an unknown one is an error when it is reached."""
    name, *modifiers = instruction.opcode
    modifiers = [m for m in modifiers if m not in _IGNORED]
    maker = _MAKERS.get(name)
    if maker is None:

        def unknown(machine: Machine, lanes: Lanes) -> None:
            raise PtxError("an instruction that is not interpreted")

        return unknown
    return maker(modifiers, list(instruction.operands))
