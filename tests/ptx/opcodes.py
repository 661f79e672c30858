"""What each instruction does to the registers and the memory of the threads that take it.

The semantics are those of the PTX ISA manual; fragments of matrices lie in registers as its section
"Warp-level matrix instructions" draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.machine import WARP, Copy, Machine, numpy_type
from ptx.memory import Lanes, unsigned
from ptx.text import SIZES, Instruction, PtxError

Step = Callable[[Machine, Lanes], None]
Values = NDArray[Any]

#: Modifiers that change nothing here: roundings to nearest, approximations (computed exactly),
#: caching, ordering.
_IGNORED = {
    "rn", "approx", "ftz", "full", "uni", "volatile", "relaxed", "weak", "nc", "ca", "cg", "cs",
    "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "gpu", "cta", "sys", "aligned", "sync",
}  # fmt: skip


def decode(instruction: Instruction) -> Step:
    """What `instruction` does; one that is not interpreted is an error when it is reached."""
    name, *modifiers = instruction.opcode
    modifiers = [m for m in modifiers if m not in _IGNORED]
    maker = _MAKERS.get(name)
    if maker is None:

        def unknown(machine: Machine, lanes: Lanes) -> None:
            raise PtxError("an instruction that is not interpreted")

        return unknown
    return maker(modifiers, list(instruction.operands))


def elements(operand: str) -> list[str]:
    """The registers of a vector in braces, or the one register."""
    return [part.strip() for part in operand.strip("{}").split(",")]


# Arithmetic: a destination and some sources of one type.


def _simple(function: Callable[..., Any]) -> Callable[[list[str], list[str]], Step]:
    def make(modifiers: list[str], operands: list[str]) -> Step:
        if len(modifiers) != 1:
            return _refuse(modifiers)
        kind = modifiers[0]
        if kind in ("f16x2", "bf16x2", "f16", "bf16", "f64"):
            return _refuse(modifiers)

        def step(machine: Machine, lanes: Lanes) -> None:
            values = (machine.read(o, kind, lanes) for o in operands[1:])
            result = np.asarray(function(*values))
            machine.write(operands[0], result.astype(numpy_type(kind), copy=False), lanes)

        return step

    return make


def _refuse(modifiers: list[str]) -> Step:
    def step(machine: Machine, lanes: Lanes) -> None:
        raise PtxError(f"modifiers that are not interpreted ({'.'.join(modifiers)})")

    return step


def _fma(a: Values, b: Values, c: Values) -> Values:
    return np.asarray(a, np.float64) * b + c  # rounded once, when it is written


def _quotient(a: Values, b: Values) -> Values:
    if np.issubdtype(np.asarray(a).dtype, np.floating):
        return a / b
    if (np.asarray(b) == 0).any():
        raise PtxError("a division by zero")
    wide_a, wide_b = np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64)
    sign = np.where((wide_a < 0) != (wide_b < 0), -1, 1)
    return sign * (np.abs(wide_a) // np.abs(wide_b))


def _remainder(a: Values, b: Values) -> Values:
    wide_a, wide_b = np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64)
    return wide_a - _quotient(a, b) * wide_b


def _shift_left(a: Values, amount: Values) -> Values:
    bits = 8 * np.asarray(a).dtype.itemsize
    amount = np.asarray(amount)
    return np.where(amount < bits, a << np.minimum(amount, bits - 1).astype(a.dtype), 0)


def _shift_right(a: Values, amount: Values) -> Values:
    bits = 8 * np.asarray(a).dtype.itemsize
    amount = np.asarray(amount)
    shifted = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    if np.issubdtype(shifted.dtype, np.signedinteger):
        return shifted  # the sign fills
    return np.where(amount < bits, shifted, 0)


def _shift(function: Callable[..., Any]) -> Callable[[list[str], list[str]], Step]:
    def make(modifiers: list[str], operands: list[str]) -> Step:
        kind = modifiers[0]

        def step(machine: Machine, lanes: Lanes) -> None:
            value = np.asarray(machine.read(operands[1], kind, lanes))
            amount = machine.read(operands[2], "u32", lanes)
            result = np.asarray(function(value, amount)).astype(value.dtype, copy=False)
            machine.write(operands[0], result, lanes)

        return step

    return make


def _product(modifiers: list[str], operands: list[str]) -> Step:
    """``mul`` and ``mad``: with a fourth operand that is added."""
    if len(modifiers) == 1:  # of floats
        return _simple(lambda a, b, c=None: a * b if c is None else _fma(a, b, c))(
            modifiers, operands
        )
    part, kind = modifiers
    size = SIZES[kind]
    result_kind = f"{kind[0]}{16 * size}" if part == "wide" else kind

    def step(machine: Machine, lanes: Lanes) -> None:
        a, b = (np.asarray(machine.read(o, kind, lanes)) for o in operands[1:3])
        if part == "lo":
            product = a * b
        elif part == "wide":
            wide = numpy_type(result_kind)
            product = a.astype(wide) * b.astype(wide)
        elif part == "hi" and size == 4:
            wide = np.int64 if kind[0] == "s" else np.uint64
            product = ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)
        else:
            raise PtxError(f"a product of type {kind} that is not interpreted")
        if len(operands) == 4:
            product = product + machine.read(operands[3], result_kind, lanes)
        machine.write(operands[0], np.asarray(product), lanes)

    return step


def _bit_field_insert(a: Values, b: Values, start: Values, count: Values) -> Values:
    start, count = (np.minimum(np.asarray(x) & 0xFF, 32).astype(np.uint64) for x in (start, count))
    mask = ((np.uint64(1) << count) - np.uint64(1)) << start
    kept = np.asarray(b).astype(np.uint64) & ~mask
    return (kept | np.asarray(a).astype(np.uint64) << start & mask) & np.uint64(0xFFFFFFFF)


def _bit_field_extract(modifiers: list[str], operands: list[str]) -> Step:
    signed = modifiers[0] == "s32"
    if modifiers[0] not in ("u32", "s32"):
        return _refuse(modifiers)

    def step(machine: Machine, lanes: Lanes) -> None:
        a = np.asarray(machine.read(operands[1], "u32", lanes)).astype(np.int64)
        start, count = (
            np.minimum(np.asarray(machine.read(o, "u32", lanes)) & 0xFF, 32).astype(np.int64)
            for o in operands[2:]
        )
        if signed:
            a = a.astype(np.int32).astype(np.int64)
        field = (a >> start) & ((1 << count) - 1)
        if signed:
            top = np.where(count > 0, field >> np.maximum(count - 1, 0) & 1, 0)
            field = field - (top << count)
        machine.write(operands[0], np.asarray(field & 0xFFFFFFFF).astype(np.uint32), lanes)

    return step


def _permute(a: Values, b: Values, selector: Values) -> Values:
    both = np.asarray(a).astype(np.uint64) | np.asarray(b).astype(np.uint64) << np.uint64(32)
    result: Any = np.uint64(0)
    for i in range(4):
        nibble = np.asarray(selector).astype(np.uint64) >> np.uint64(4 * i)
        byte = both >> np.uint64(8) * (nibble & np.uint64(7)) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        byte = np.where(nibble & np.uint64(8), sign, byte)
        result = result | byte << np.uint64(8 * i)
    return np.asarray(result)


def _logic3(modifiers: list[str], operands: list[str]) -> Step:
    table = int(operands[4], 0)

    def step(machine: Machine, lanes: Lanes) -> None:
        a, b, c = (np.asarray(machine.read(o, "b32", lanes)) for o in operands[1:4])
        result = np.zeros(len(lanes), np.uint32)
        for i in range(8):
            if table >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        machine.write(operands[0], result, lanes)

    return step


def _funnel_shift(modifiers: list[str], operands: list[str]) -> Step:
    side, mode, _ = modifiers

    def step(machine: Machine, lanes: Lanes) -> None:
        low, high, amount = (
            np.asarray(machine.read(o, "u32", lanes)).astype(np.uint64) for o in operands[1:]
        )
        amount = amount & np.uint64(31) if mode == "wrap" else np.minimum(amount, np.uint64(32))
        both = high << np.uint64(32) | low
        moved = both << amount >> np.uint64(32) if side == "l" else both >> amount
        machine.write(operands[0], np.asarray(moved).astype(np.uint32), lanes)

    return step


# Comparison and choice.

_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _compare(modifiers: list[str], operands: list[str]) -> Step:
    comparison, *joined, kind = modifiers
    unordered = comparison in ("equ", "neu", "ltu", "leu", "gtu", "geu")
    function = _COMPARISONS.get(comparison[:2]) if comparison not in ("num", "nan") else None

    def step(machine: Machine, lanes: Lanes) -> None:
        a, b = (np.asarray(machine.read(o, kind, lanes)) for o in operands[1:3])
        floating = np.issubdtype(a.dtype, np.floating)
        nan = np.isnan(a) | np.isnan(b) if floating else np.False_
        if function is None:
            found = nan if comparison == "nan" else ~nan
        else:
            found = function(a, b)
            # An ordered "ne" is false of NaN, an unordered comparison true.
            found = found | nan if unordered else found & ~nan
        if joined:
            other = machine.read(operands[3].lstrip("!"), "pred", lanes)
            other = other != operands[3].startswith("!")
            found = {"and": found & other, "or": found | other, "xor": found ^ other}[joined[0]]
        machine.write(operands[0], np.broadcast_to(found, len(lanes)), lanes)

    return step


def _select(modifiers: list[str], operands: list[str]) -> Step:
    kind = modifiers[0]

    def step(machine: Machine, lanes: Lanes) -> None:
        a, b = (machine.read(o, kind, lanes) for o in operands[1:3])
        machine.write(operands[0], np.where(machine.read(operands[3], "pred", lanes), a, b), lanes)

    return step


# Moves and conversions.


def _move(modifiers: list[str], operands: list[str]) -> Step:
    kind, (to, source) = modifiers[0], operands

    def step(machine: Machine, lanes: Lanes) -> None:
        if source.startswith("{"):  # packed
            parts = elements(source)
            bits = 8 * SIZES[kind] // len(parts)
            value: Any = np.uint64(0)
            for i, part in enumerate(parts):
                piece = np.asarray(machine.read(part, f"b{bits}", lanes)).astype(np.uint64)
                value = value | piece << np.uint64(bits * i)
            machine.write(to, np.asarray(value).astype(numpy_type(kind)), lanes)
        elif to.startswith("{"):  # unpacked
            parts = elements(to)
            bits = 8 * SIZES[kind] // len(parts)
            value = np.asarray(machine.read(source, kind, lanes)).astype(np.uint64)
            for i, part in enumerate(parts):
                if part != "_":
                    piece = value >> np.uint64(bits * i)
                    machine.write(part, piece.astype(numpy_type(f"b{bits}")), lanes)
        else:
            machine.write(to, machine.read(source, kind, lanes), lanes)

    return step


def bfloat16_bits(x: Values) -> NDArray[np.uint16]:
    """float32 rounded to bfloat16, nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _half_bits(x: Values, kind: str) -> NDArray[np.uint16]:
    if kind == "bf16":
        return bfloat16_bits(x)
    return np.ascontiguousarray(x).astype(np.float16).view(np.uint16)


def half_values(bits: Values, kind: str) -> NDArray[np.float32]:
    """float16 or bfloat16 bits as float32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def _convert(modifiers: list[str], operands: list[str]) -> Step:
    *how, to, source = modifiers
    rounding = [m for m in how if m in ("rni", "rzi", "rmi", "rpi")]
    if [m for m in how if m not in rounding]:
        return _refuse(modifiers)

    def step(machine: Machine, lanes: Lanes) -> None:
        if to in ("f16x2", "bf16x2"):
            high, low = (
                _half_bits(np.broadcast_to(machine.read(o, "f32", lanes), len(lanes)), to[:-2])
                for o in operands[1:]
            )
            result: Any = high.astype(np.uint32) << np.uint32(16) | low
        else:
            read_as = "b16" if source in ("f16", "bf16") else source
            value = machine.read(operands[1], read_as, lanes)
            value = np.broadcast_to(value, len(lanes))
            if read_as != source:
                value = half_values(value, source)
            if to in ("f16", "bf16"):
                result = _half_bits(value, to)
            else:
                if rounding:
                    value = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[
                        rounding[0]
                    ](value)
                result = np.asarray(value).astype(numpy_type(to))
        size = SIZES[machine.kernel.registers[operands[0]]]
        if result.dtype.itemsize < size:  # a narrow result is widened by its sign
            result = result.astype(np.dtype(f"{result.dtype.kind}{size}"))
        machine.write(operands[0], result, lanes)

    return step


def _same_address(modifiers: list[str], operands: list[str]) -> Step:
    """``cvta``: generic addresses are not told apart from those of the space they are used in."""

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.write(operands[0], machine.read(operands[1], modifiers[-1], lanes), lanes)

    return step


# Memory.


_SPACES = ("global", "shared", "local", "param")


def _load(modifiers: list[str], operands: list[str]) -> Step:
    kind = modifiers[-1]
    space = modifiers[0] if modifiers[0] in _SPACES else "global"  # what generic addresses are here
    registers = elements(operands[0])

    def step(machine: Machine, lanes: Lanes) -> None:
        if space == "param":
            name = operands[1][1:-1]
            value = np.array(machine.arguments[name] & (1 << 8 * SIZES[kind]) - 1)
            machine.write(registers[0], value.astype(numpy_type(f"u{8 * SIZES[kind]}")), lanes)
            return
        size, count = SIZES[kind], len(registers)
        if space == "global":
            address = machine.address(operands[1], "u64", lanes)
            words = machine.memory.load(address, size, count)
        elif space == "shared":
            address = _shared_address(machine, operands[1], lanes)
            words = machine.shared.load(address, size, count, lanes)
        elif space == "local":
            address = machine.address(operands[1], "u64", lanes).astype(np.int64)
            pieces = address[:, None] + np.arange(size * count)
            words = machine.local[lanes[:, None], pieces].view(unsigned(size))
        else:
            raise PtxError(f"memory of space {space} is not interpreted")
        for i, register in enumerate(registers):
            value = np.ascontiguousarray(words[:, i]).view(numpy_type(kind))
            width = SIZES[machine.kernel.registers[register]]
            if value.dtype.itemsize < width:
                value = value.astype(np.dtype(f"{value.dtype.kind}{width}"))
            machine.write(register, value, lanes)

    return step


def _shared_address(machine: Machine, operand: str, lanes: Lanes) -> Any:
    """An address in shared memory, which registers of either width can hold."""
    base = operand[1:-1].partition("+")[0].strip()
    wide = machine.kernel.registers.get(base) in ("b64", "u64", "s64")
    return machine.address(operand, "u64" if wide else "u32", lanes)


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
            machine.shared.store(_shared_address(machine, operands[0], lanes), words, lanes)
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
        return _refuse(modifiers)

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
        return _refuse(modifiers)
    size = int(operands[2])

    def step(machine: Machine, lanes: Lanes) -> None:
        offset = machine.shared.begin_copy(
            _shared_address(machine, operands[0], lanes), size, lanes
        )
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


# Warps.


def _load_matrix(modifiers: list[str], operands: list[str]) -> Step:
    """``ldmatrix``: lane i of the first 8 (16, 32) lanes names the i-th row of 16 bytes."""
    shape, count_name, *transposed, _, _ = modifiers
    if shape != "m8n8":
        return _refuse(modifiers)
    count = int(count_name[1:])
    registers = elements(operands[0])

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        warps = lanes.reshape(-1, WARP)
        address = _shared_address(machine, operands[1], lanes).reshape(-1, WARP)[:, : 8 * count]
        rows = machine.shared.load(address.ravel(), 8, 2, warps[:, : 8 * count].ravel())
        matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, count, 8, 8)
        for i, register in enumerate(registers):
            machine.write(register, _fragment(matrices[:, i], bool(transposed)), lanes)

    return step


def _store_matrix(modifiers: list[str], operands: list[str]) -> Step:
    shape, count_name, *transposed, _, _ = modifiers
    if shape != "m8n8":
        return _refuse(modifiers)
    count = int(count_name[1:])

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        warps = lanes.reshape(-1, WARP)
        address = _shared_address(machine, operands[0], lanes).reshape(-1, WARP)[:, : 8 * count]
        matrices = np.stack(
            [_matrix(machine, r, lanes, bool(transposed)) for r in elements(operands[1])], axis=1
        )
        rows = np.ascontiguousarray(matrices).view(np.uint64).reshape(-1, 2)
        machine.shared.store(address.ravel(), rows, warps[:, : 8 * count].ravel())

    return step


def _fragment(matrices: NDArray[np.uint16], transposed: bool) -> NDArray[np.uint32]:
    """``(warps, 8, 8)`` elements as the registers of lanes: two neighbours of row ``lane / 4``."""
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(np.uint32).ravel()


def _matrix(machine: Machine, register: str, lanes: Lanes, transposed: bool) -> NDArray[np.uint16]:
    """The reverse of `_fragment`."""
    value = np.ascontiguousarray(
        np.broadcast_to(machine.read(register, "b32", lanes), len(lanes)), np.uint32
    )
    matrices = value.view(np.uint16).reshape(-1, 8, 8)
    return matrices.transpose(0, 2, 1) if transposed else matrices


def _move_matrix(modifiers: list[str], operands: list[str]) -> Step:
    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        matrices = _matrix(machine, operands[1], lanes, transposed=False)
        machine.write(operands[0], _fragment(matrices, transposed=True), lanes)

    return step


def _multiply(modifiers: list[str], operands: list[str]) -> Step:
    """``mma`` of 16 rows, 8 columns, and an inner extent of 8 or 16, added up in float32."""
    shape, *layout, to, kind, _, added = modifiers
    if shape not in ("m16n8k8", "m16n8k16") or layout != ["row", "col"] or to != "f32" != added:
        return _refuse(modifiers)
    halves = int(shape[6:]) // 8
    to_registers, a, b, c = map(elements, operands)

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)

        def matrix(register: str) -> NDArray[np.float32]:
            return half_values(_matrix(machine, register, lanes, transposed=False), kind)

        left = np.concatenate(
            [
                np.concatenate([matrix(a[2 * half]), matrix(a[2 * half + 1])], axis=1)
                for half in range(halves)
            ],
            axis=2,
        )
        right = np.concatenate([matrix(register) for register in b], axis=2)
        product = (left @ right.transpose(0, 2, 1)).reshape(-1, 2, 8, 4, 2)
        for i, register in enumerate(to_registers):
            values = product[:, i // 2, :, :, i % 2].ravel()
            machine.write(register, values + machine.read(c[i], "f32", lanes), lanes)

    return step


def _shuffle(modifiers: list[str], operands: list[str]) -> Step:
    mode, _ = modifiers
    to, *predicate = operands[0].split("|")

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        value = np.broadcast_to(machine.read(operands[1], "b32", lanes), len(lanes))
        amount, clamp = (
            np.broadcast_to(machine.read(o, "u32", lanes), len(lanes)).astype(np.int64)
            for o in operands[2:4]
        )
        amount &= 31
        own, segment = lanes % WARP, clamp >> 8 & 31
        least, most = own & segment, (own & segment) | (clamp & 31 & ~segment)
        source = {
            "up": own - amount,
            "down": own + amount,
            "bfly": own ^ amount,
            "idx": least | (amount & ~segment),
        }[mode]
        valid = source >= most if mode == "up" else source <= most
        source = np.where(valid, source, own)
        machine.write(to, value[np.arange(len(lanes)) // WARP * WARP + source], lanes)
        if predicate:
            machine.write(predicate[0], valid, lanes)

    return step


def _warp_barrier(modifiers: list[str], operands: list[str]) -> Step:
    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        machine.shared.warp_barriers[np.unique(lanes // WARP)] += 1

    return step


def _nothing(modifiers: list[str], operands: list[str]) -> Step:
    """Fences: memory is in order here."""
    return lambda machine, lanes: None


_MAKERS: dict[str, Callable[[list[str], list[str]], Step]] = {
    "add": _simple(lambda a, b: a + b),
    "sub": _simple(lambda a, b: a - b),
    "mul": _product,
    "mad": _product,
    "fma": _simple(_fma),
    "div": _simple(_quotient),
    "rem": _simple(_remainder),
    "min": _simple(np.fmin),
    "max": _simple(np.fmax),
    "abs": _simple(np.abs),
    "neg": _simple(np.negative),
    "copysign": _simple(lambda a, b: np.copysign(b, a)),
    "ex2": _simple(np.exp2),
    "lg2": _simple(np.log2),
    "rcp": _simple(lambda a: 1 / a),
    "sqrt": _simple(np.sqrt),
    "rsqrt": _simple(lambda a: 1 / np.sqrt(a)),
    "tanh": _simple(np.tanh),
    "and": _simple(np.bitwise_and),
    "or": _simple(np.bitwise_or),
    "xor": _simple(np.bitwise_xor),
    "not": _simple(np.invert),
    "shl": _shift(_shift_left),
    "shr": _shift(_shift_right),
    "shf": _funnel_shift,
    "bfi": _simple(_bit_field_insert),
    "bfe": _bit_field_extract,
    "prmt": _simple(_permute),
    "lop3": _logic3,
    "setp": _compare,
    "selp": _select,
    "mov": _move,
    "cvt": _convert,
    "cvta": _same_address,
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cp": lambda modifiers, operands: _copy_async(modifiers[1:], operands),
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "movmatrix": _move_matrix,
    "mma": _multiply,
    "shfl": _shuffle,
    "bar": _warp_barrier,
    "membar": _nothing,
    "fence": _nothing,
}
