"""Operands of instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ptx.machine import Machine
from ptx.memory import Lanes
from ptx.text import PtxError

#: Effect of an instruction on the lanes that take it, and how it is made of modifiers and operands.
Step = Callable[[Machine, Lanes], None]
Maker = Callable[[list[str], list[str]], Step]


def elements(operand: str) -> list[str]:
    """Return the registers of a vector in braces, or the one register."""
    return [part.strip() for part in operand.strip("{}").split(",")]


def refuse(modifiers: list[str]) -> Step:
    def step(machine: Machine, lanes: Lanes) -> None:
        raise PtxError(f"modifiers that are not interpreted ({'.'.join(modifiers)})")

    return step


def shared_address(machine: Machine, operand: str, lanes: Lanes) -> Any:
    """Return an address in shared memory, which registers of either width can hold."""
    base = operand[1:-1].partition("+")[0].strip()
    wide = machine.kernel.registers.get(base) in ("b64", "u64", "s64")
    return machine.address(operand, "u64" if wide else "u32", lanes)
