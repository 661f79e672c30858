"""Instructions that read and write memory."""

from __future__ import annotations

import numpy as np

from ptx.machine import Copy, Machine, numpy_type
from ptx.memory import Lanes, Words, unsigned
from ptx.operands import Maker, Step, elements, refuse, shared_address
from ptx.text import SIZES, PtxError

_SPACES = ("global", "shared", "shared::cluster", "local", "param")
#: An address in a cluster's shared memory: the rank of the block, in the bits from this one on.
_RANK = 20


def _load(modifiers: list[str], operands: list[str]) -> Step:
    kind = modifiers[-1]
    space = modifiers[0] if modifiers[0] in _SPACES else "global"  # what generic addresses are here
    if space == "shared::cluster":
        return _load_of_cluster(kind, operands)
    registers = elements(operands[0])

    def step(machine: Machine, lanes: Lanes) -> None:
        name = operands[1][1:-1]
        if space == "param" and isinstance(machine.arguments.get(name), int):
            value = np.array(machine.arguments[name] & (1 << 8 * SIZES[kind]) - 1)
            bits = value.astype(numpy_type(f"u{8 * SIZES[kind]}"))
            _write_widened(machine, registers[0], bits.view(numpy_type(kind)), lanes)
            return
        size, count = SIZES[kind], len(registers)
        if space == "param":
            words = _member(machine, operands[1], size, count, lanes)
        elif space == "global":
            address = machine.address(operands[1], "u64", lanes)
            words = machine.memory.load(address, size, count)
        elif space == "shared":
            address = shared_address(machine, operands[1], lanes)
            words = machine.shared.load(address, size, count, lanes)
        elif space == "local":
            address = machine.address(operands[1], "u64", lanes).astype(np.int64)
            pieces = address[:, None] + np.arange(size * count)
            words = machine.local[lanes[:, None], pieces].view(unsigned(size))
        else:
            raise PtxError(f"memory of space {space} is not interpreted")
        for i, register in enumerate(registers):
            value = np.ascontiguousarray(words[:, i]).view(numpy_type(kind))
            _write_widened(machine, register, value, lanes)

    return step


def _map(modifiers: list[str], operands: list[str]) -> Step:
    """Make an address of this block that of another one of the cluster."""

    def step(machine: Machine, lanes: Lanes) -> None:
        address = np.broadcast_to(machine.read(operands[1], "u32", lanes), len(lanes))
        rank = np.broadcast_to(machine.read(operands[2], "u32", lanes), len(lanes))
        machine.write(operands[0], (address | rank << _RANK).astype(np.uint32), lanes)

    return step


def _load_of_cluster(kind: str, operands: list[str]) -> Step:
    registers, size = elements(operands[0]), SIZES[kind]

    def step(machine: Machine, lanes: Lanes) -> None:
        address = machine.address(operands[1], "u32", lanes)
        there = machine.of_cluster(lanes, address >> _RANK)
        words = machine.shared.load(address & (1 << _RANK) - 1, size, len(registers), there)
        for i, register in enumerate(registers):
            value = np.ascontiguousarray(words[:, i]).view(numpy_type(kind))
            _write_widened(machine, register, value, lanes)

    return step


def _member(machine: Machine, operand: str, size: int, count: int, lanes: Lanes) -> Words:
    """Words of the parameter that is a struct."""
    address = machine.address(operand, "u64", lanes).astype(np.int64)
    if (address % (size * count)).any():
        raise PtxError("an access to a parameter is not aligned")
    if (address + size * count > len(machine.struct)).any():
        raise PtxError(f"byte {address.max() + size * count - 1} of a parameter")
    pieces = address[:, None] + np.arange(size * count)
    return np.frombuffer(machine.struct, np.uint8)[pieces].view(unsigned(size))


def _write_widened(machine: Machine, register: str, value: Words, lanes: Lanes) -> None:
    """Set a register that may be wider than what was loaded; the loaded type extends the sign."""
    width = SIZES[machine.kernel.registers[register]]
    if value.dtype.itemsize < width:
        value = value.astype(np.dtype(f"{value.dtype.kind}{width}"))
    machine.write(register, value, lanes)


def _store(modifiers: list[str], operands: list[str]) -> Step:
    kind = modifiers[-1]
    space = modifiers[0] if modifiers[0] in _SPACES else "global"
    size = SIZES[kind]

    def step(machine: Machine, lanes: Lanes) -> None:
        registers = elements(operands[1])
        words = np.empty((len(lanes), len(registers)), unsigned(size))
        for i, register in enumerate(registers):
            width = SIZES[machine.kernel.registers.get(register, kind)]
            value = np.asarray(machine.read(register, f"b{8 * width}", lanes))
            words[:, i] = value.astype(unsigned(size))
        if space == "global":
            address = machine.address(operands[0], "u64", lanes)
            machine.memory.store(address, words, machine.thread[lanes])
        elif space == "shared":
            machine.shared.store(shared_address(machine, operands[0], lanes), words, lanes)
        elif space == "local":
            address = machine.address(operands[0], "u64", lanes).astype(np.int64)
            pieces = address[:, None] + np.arange(size * len(registers))
            machine.local[lanes[:, None], pieces] = words.view(np.uint8)
        else:
            raise PtxError(f"memory of space {space} is not interpreted")

    return step


def _atomic(modifiers: list[str], operands: list[str]) -> Step:
    """``atom`` returns the value before, ``red`` does not, and may add a vector."""
    space, operation, *_, kind = modifiers
    *to, address, value = operands
    if space != "global" or operation not in ("add", "inc") or SIZES[kind] != 4:
        return refuse(modifiers)

    def step(machine: Machine, lanes: Lanes) -> None:
        where = machine.address(address, "u64", lanes)
        registers = elements(value)
        if (where % np.uint64(4 * len(registers))).any():
            raise PtxError("an atomic operation is not aligned")
        for i, register in enumerate(registers):
            values = np.broadcast_to(machine.read(register, kind, lanes), len(lanes))
            before = machine.memory.atomic(where + np.uint64(4 * i), operation, values)
            if to:
                machine.write(to[0], before, lanes)

    return step


def _copy_async(modifiers: list[str], operands: list[str]) -> Step:
    if modifiers == ["commit_group"]:
        return _commit
    if modifiers == ["wait_group"]:
        return lambda machine, lanes: _wait(machine, lanes, int(operands[0]))
    if modifiers == ["wait_all"]:

        def all_of_them(machine: Machine, lanes: Lanes) -> None:
            _commit(machine, lanes)
            _wait(machine, lanes, 0)

        return all_of_them
    if modifiers != ["shared", "global"]:
        return refuse(modifiers)
    size = int(operands[2])

    def step(machine: Machine, lanes: Lanes) -> None:
        offset = machine.shared.begin_copy(shared_address(machine, operands[0], lanes), size, lanes)
        data = np.zeros((len(lanes), size), np.uint8)
        count = machine.read(operands[3], "u32", lanes) if len(operands) > 3 else np.array(size)
        count = np.broadcast_to(count, len(lanes))
        if not np.isin(count, (0, size)).all():
            raise PtxError("an asynchronous copy of a part of its size")
        reads = np.flatnonzero(count)
        if len(reads):
            address = machine.address(operands[1], "u64", lanes)[reads]
            words = min(size, 8)
            loaded = machine.memory.load(address, words, size // words)
            data[reads] = np.ascontiguousarray(loaded).view(np.uint8)
        machine.copies.append(Copy(lanes, machine.committed[lanes], offset, data))

    return step


def _commit(machine: Machine, lanes: Lanes) -> None:
    machine.committed[lanes] += 1


def _wait(machine: Machine, lanes: Lanes, pending: int) -> None:
    """Copies in all but the last `pending` groups of each thread arrive."""
    waiting = np.zeros(len(machine.lane), np.bool_)
    waiting[lanes] = True
    left = []
    for copy in machine.copies:
        done = waiting[copy.lane] & (copy.group < machine.committed[copy.lane] - pending)
        if done.any():
            machine.shared.end_copy(copy.offset[done], copy.data[done], copy.lane[done])
        if not done.all():
            keep = ~done
            left.append(Copy(copy.lane[keep], copy.group[keep], copy.offset[keep], copy.data[keep]))
    machine.copies = left


ACCESSES: dict[str, Maker] = {
    "ld": _load,
    "ldu": _load,
    "mapa": _map,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cp": lambda modifiers, operands: _copy_async(modifiers[1:], operands),
}
