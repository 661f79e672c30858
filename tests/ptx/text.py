"""PTX as text -> one kernel's instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Bytes of PTX's fundamental types.
SIZES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)}, "f16": 2,
    "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8, "pred": 1,
}  # fmt: skip


class PtxError(Exception):
    """A kernel did what it must not, or something that is not interpreted."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One statement.

    Attributes:
        opcode: its name with all modifiers, split at the dots.
        operands: as written, a vector or an address with its brackets.
        guard: the predicate register that it is executed under, or None.
        negated: whether where the predicate is false.
    """

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None = None
    negated: bool = False

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{'.'.join(self.opcode)} {', '.join(self.operands)}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry of a PTX module.

    Attributes:
        parameters: type of each, by name, in order.
        registers: type of each register, by name.
        shared: address of each variable in shared memory; those of unknown size come last.
        shared_bytes: of the variables of known size.
        local: offset of each variable in a thread's local memory.
        local_bytes: of all of them.
        code: the instructions; their positions are what branches go to.
        labels: position of each label.
        of_clusters: whether its blocks are clusters.
    """

    parameters: dict[str, str]
    registers: dict[str, str]
    shared: dict[str, int]
    shared_bytes: int
    local: dict[str, int]
    local_bytes: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    of_clusters: bool


_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%?[\w$]+)(?:<(\d+)>)?")
_VARIABLE = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.\w+\s+([\w$]+)\[(\d*)\]")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+")
_LABEL = re.compile(r"([$\w]+):(?!:)\s*")


def parse(ptx: str, entry: str) -> Kernel:
    """Return the kernel `entry` of a PTX module.

    Raises:
        PtxError: the module has none of that name, or a construct that is not interpreted.
    """
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    shape = rf"\.entry {re.escape(entry)}\s*\((.*?)\)(.*?)\n\{{(.*?)\n\}}"
    found = re.search(shape, ptx, re.DOTALL)
    if found is None:
        raise PtxError(f"the module has no entry {entry}")
    module, body = ptx[: ptx.index(".entry")], found[3]
    registers: dict[str, str] = {}
    for kind, name, count in _REGISTERS.findall(body):
        names = [f"{name}{i}" for i in range(int(count))] if count else [name]
        registers.update(dict.fromkeys(names, kind))
    spaces = {"shared": ({}, 0), "local": ({}, 0)}
    variables = _VARIABLE.findall(module + body)
    for space, align, name, size in sorted(variables, key=lambda v: not v[3]):
        offsets, end = spaces[space]
        offsets[name] = -(-end // int(align)) * int(align)
        spaces[space] = (offsets, offsets[name] + int(size or 0))
    code, labels = _instructions(body)
    return Kernel(
        parameters={name: kind for kind, name in _PARAMETER.findall(found[1])},
        registers=registers,
        shared=spaces["shared"][0],
        shared_bytes=spaces["shared"][1],
        local=spaces["local"][0],
        local_bytes=spaces["local"][1],
        code=code,
        labels=labels,
        of_clusters=".reqnctapercluster" in found[2],
    )


def _instructions(body: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        text = statement.strip()
        while label := _LABEL.match(text):
            labels[label[1]] = len(code)
            text = text[label.end() :].strip()
        if not text or text.startswith("."):
            continue
        parts = _STATEMENT.fullmatch(text)
        if parts is None:
            raise PtxError(f"not interpreted: {text}")
        negated, guard, opcode, operands = parts.groups()
        code.append(
            Instruction(
                tuple(opcode.split(".")),
                tuple(_OPERAND.findall(operands)),
                guard or None,
                bool(negated),
            )
        )
    return tuple(code), labels
