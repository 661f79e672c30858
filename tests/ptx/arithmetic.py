"""Instructions on registers alone: arithmetic, comparison, moves and conversions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.machine import Machine, numpy_type
from ptx.memory import Lanes
from ptx.operands import Maker, Step, elements, refuse
from ptx.text import SIZES, PtxError

Values = NDArray[Any]


# Arithmetic: a destination and a function of some sources.


def _of(function: Callable[..., Any], *kinds: str) -> Maker:
    """Return an instruction with sources of these types; without them, all have its own type, which
    is that of the result."""

    def make(modifiers: list[str], operands: list[str]) -> Step:
        own = modifiers[-1]

        def step(machine: Machine, lanes: Lanes) -> None:
            sources = zip(operands[1:], kinds or repeat(own), strict=False)
            values = (np.asarray(machine.read(o, kind or own, lanes)) for o, kind in sources)
            result = np.asarray(function(*values))
            machine.write(operands[0], result.astype(numpy_type(own), copy=False), lanes)

        return step

    return make


def _simple(function: Callable[..., Any]) -> Maker:
    def make(modifiers: list[str], operands: list[str]) -> Step:
        if len(modifiers) != 1 or modifiers[0] in ("f16x2", "bf16x2", "f16", "bf16", "f64"):
            return refuse(modifiers)
        return _of(function)(modifiers, operands)

    return make


def _fma(a: Values, b: Values, c: Values) -> Values:
    return np.asarray(a, np.float64) * b + c  # rounded once, when it is written


def _fused(modifiers: list[str], operands: list[str]) -> Step:
    if modifiers != ["rm", "f32"]:
        return _simple(_fma)(modifiers, operands)

    def down(a: Values, b: Values, c: Values) -> Values:
        exact = _fma(a, b, c)
        near = exact.astype(np.float32)
        return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)

    return _of(down)(["f32"], operands)


def _quotient(a: Values, b: Values) -> Values:
    if np.issubdtype(a.dtype, np.floating):
        return a / b
    if (b == 0).any():
        raise PtxError("a division by zero")
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    sign = np.where((wide_a < 0) != (wide_b < 0), -1, 1)
    return sign * (np.abs(wide_a) // np.abs(wide_b))


def _remainder(a: Values, b: Values) -> Values:
    return a.astype(np.int64) - _quotient(a, b) * b.astype(np.int64)


def _shift_left(a: Values, amount: Values) -> Values:
    bits = 8 * a.dtype.itemsize
    return np.where(amount < bits, a << np.minimum(amount, bits - 1).astype(a.dtype), 0)


def _shift_right(a: Values, amount: Values) -> Values:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    if np.issubdtype(shifted.dtype, np.signedinteger):
        return shifted  # the sign fills
    return np.where(amount < bits, shifted, 0)


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


def _field(start: Values, count: Values) -> tuple[Values, Values]:
    """Return the first bit and the number of bits of a field."""
    found = [np.minimum(x & 0xFF, 32).astype(np.uint64) for x in (start, count)]
    return found[0], found[1]


def _bit_field_insert(a: Values, b: Values, start: Values, count: Values) -> Values:
    start, count = _field(start, count)
    mask = ((np.uint64(1) << count) - np.uint64(1)) << start
    kept = b.astype(np.uint64) & ~mask
    return (kept | a.astype(np.uint64) << start & mask) & np.uint64(0xFFFFFFFF)


def _bit_field_extract(modifiers: list[str], operands: list[str]) -> Step:
    signed = modifiers[0] == "s32"
    if modifiers[0] not in ("u32", "s32"):
        return refuse(modifiers)

    def extract(a: Values, start: Values, count: Values) -> Values:
        start, count = (x.astype(np.int64) for x in _field(start, count))
        wide = (a.astype(np.int32) if signed else a).astype(np.int64)
        field = (wide >> start) & ((1 << count) - 1)
        if signed:
            top = np.where(count > 0, field >> np.maximum(count - 1, 0) & 1, 0)
            field = field - (top << count)
        return np.asarray(field & 0xFFFFFFFF).astype(np.uint32)

    return _of(extract, "u32", "u32", "u32")(modifiers, operands)


def _permute(a: Values, b: Values, selector: Values) -> Values:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result: Any = np.uint64(0)
    for i in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * i)
        byte = both >> np.uint64(8) * (nibble & np.uint64(7)) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        byte = np.where(nibble & np.uint64(8), sign, byte)
        result = result | byte << np.uint64(8 * i)
    return np.asarray(result)


def _logic3(modifiers: list[str], operands: list[str]) -> Step:
    table = int(operands[4], 0)

    def logic(a: Values, b: Values, c: Values) -> Values:
        result: Any = np.uint32(0)
        for i in range(8):
            if table >> i & 1:
                result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return np.asarray(result)

    return _of(logic, "b32", "b32", "b32")(modifiers, operands)


def _funnel_shift(modifiers: list[str], operands: list[str]) -> Step:
    side, mode, _ = modifiers

    def shift(low: Values, high: Values, amount: Values) -> Values:
        low, high, amount = (x.astype(np.uint64) for x in (low, high, amount))
        amount = amount & np.uint64(31) if mode == "wrap" else np.minimum(amount, np.uint64(32))
        both = high << np.uint64(32) | low
        return both << amount >> np.uint64(32) if side == "l" else both >> amount

    return _of(shift, "u32", "u32", "u32")(modifiers, operands)


# Comparison and choice.

_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


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


#: Changes of a value by a conversion, beside that of its type.
_CHANGES: dict[str, Callable[[Values], Values]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
    "sat": lambda x: np.fmin(np.fmax(x, np.float32(0)), np.float32(1)),  # 0 for NaN
}


def _convert(modifiers: list[str], operands: list[str]) -> Step:
    *how, to, source = modifiers
    changes = [_CHANGES[m] for m in how if m in _CHANGES]
    if len(changes) < len(how) or ("sat" in how and not to == source == "f32"):
        return refuse(modifiers)

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
                for change in changes:
                    value = change(value)
                result = np.asarray(value).astype(numpy_type(to))
        size = SIZES[machine.kernel.registers[operands[0]]]
        if result.dtype.itemsize < size:  # a narrow result is widened by its sign
            result = result.astype(np.dtype(f"{result.dtype.kind}{size}"))
        machine.write(operands[0], result, lanes)

    return step


ARITHMETIC: dict[str, Maker] = {
    "add": _simple(lambda a, b: a + b),
    "sub": _simple(lambda a, b: a - b),
    "mul": _product,
    "mad": _product,
    "fma": _fused,
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
    "shl": _of(_shift_left, "", "u32"),
    "shr": _of(_shift_right, "", "u32"),
    "shf": _funnel_shift,
    "bfi": _simple(_bit_field_insert),
    "bfe": _bit_field_extract,
    "prmt": _simple(_permute),
    "lop3": _logic3,
    "setp": _compare,
    "selp": _of(lambda a, b, chosen: np.where(chosen, a, b), "", "", "pred"),
    "mov": _move,
    "cvt": _convert,
    # Generic addresses are not told apart from those of the space they are used in.
    "cvta": _of(lambda address: address),
}
