"""Instructions in which the lanes of a warp take part together.

Fragments of matrices lie in registers as the section "Warp-level matrix instructions" of the PTX
ISA manual draws them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.arithmetic import half_values
from ptx.machine import WARP, Machine
from ptx.memory import Lanes
from ptx.operands import Maker, Step, elements, refuse, shared_address

Values = NDArray[Any]


def _load_matrix(modifiers: list[str], operands: list[str]) -> Step:
    """``ldmatrix``: lane i of the first 8 (16, 32) lanes names the i-th row of 16 bytes."""
    shape, count_name, *transposed, _, _ = modifiers
    if shape != "m8n8":
        return refuse(modifiers)
    count = int(count_name[1:])
    registers = elements(operands[0])

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        warps = lanes.reshape(-1, WARP)
        address = shared_address(machine, operands[1], lanes).reshape(-1, WARP)[:, : 8 * count]
        rows = machine.shared.load(address.ravel(), 8, 2, warps[:, : 8 * count].ravel())
        matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, count, 8, 8)
        for i, register in enumerate(registers):
            machine.write(register, _fragment(matrices[:, i], bool(transposed)), lanes)

    return step


def _store_matrix(modifiers: list[str], operands: list[str]) -> Step:
    shape, count_name, *transposed, _, _ = modifiers
    if shape != "m8n8":
        return refuse(modifiers)
    count = int(count_name[1:])

    def step(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes)
        warps = lanes.reshape(-1, WARP)
        address = shared_address(machine, operands[0], lanes).reshape(-1, WARP)[:, : 8 * count]
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
    """Return the reverse of `_fragment`."""
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
        return refuse(modifiers)
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


WARPS: dict[str, Maker] = {
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "movmatrix": _move_matrix,
    "mma": _multiply,
    "shfl": _shuffle,
    "bar": _warp_barrier,
    "membar": _nothing,
    "fence": _nothing,
}
