"""Threads: where each of them is, and what waits for what.

All threads that stand at the same instruction take it together. The group at the smallest position
goes on first, so that those that took a short way wait for the others at the
place where the ways meet, and loops are left together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.memory import POISON, DeviceMemory, Lanes, SharedMemory
from ptx.text import SIZES, Instruction, Kernel, PtxError

WARP = 32
_STORED_IN = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
#: By the letter of a PTX type and its bits; bits of no type are unsigned numbers.
_TYPES = {
    f"{letter}{8 * size}": np.dtype(f"{kind}{size}")
    for letter, kind, sizes in (
        ("u", "u", (1, 2, 4, 8)), ("b", "u", (1, 2, 4, 8)), ("s", "i", (1, 2, 4, 8)),
        ("f", "f", (2, 4, 8)),
    )
    for size in sizes
} | {"pred": np.dtype(np.bool_)}  # fmt: skip


def numpy_type(name: str) -> np.dtype[Any]:
    """Return the NumPy type of a PTX type.

    Raises:
        PtxError: there is none.
    """
    if name not in _TYPES:
        raise PtxError(f"type {name} is not interpreted")
    return _TYPES[name]


@dataclass(slots=True)
class Copy:
    """Asynchronous copies that one instruction began: for each of its threads, the number of its
    group, where to, and what."""

    lane: Lanes
    group: Lanes
    offset: Lanes
    data: NDArray[np.uint8]


class Machine:
    """Some blocks of a grid, side by side.

    Attributes:
        lane: the numbers 0, 1, ... of the threads here; those of a block, and of a warp, are
            neighbours.
        thread: their numbers in the whole grid.
    """

    def __init__(
        self,
        kernel: Kernel,
        decode: Callable[[Instruction], Callable[[Machine, Lanes], None]],
        memory: DeviceMemory,
        arguments: Sequence[int | bytes],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        blocks: range,
        smem_bytes: int,
    ) -> None:
        threads = block[0] * block[1] * block[2]
        if threads % WARP:
            raise PtxError(f"{threads} threads a block are no whole warps")
        self.kernel, self.memory = kernel, memory
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        #: The one parameter that is a struct; its address counts from 0.
        self.struct = next((a for a in arguments if isinstance(a, bytes)), b"")
        self.blocks, self.grid = blocks, grid
        self.lane = np.arange(len(blocks) * threads)
        self.thread = self.lane + blocks.start * threads
        self.shared = SharedMemory(len(blocks), kernel.shared_bytes + smem_bytes, threads)
        self.local = np.zeros((len(self.lane), max(kernel.local_bytes, 1)), np.uint8)
        self.copies: list[Copy] = []
        self.committed = np.zeros(len(self.lane), np.int64)  # groups of copies of each thread
        self._special = _special_registers(self.lane, grid, block, blocks, threads)
        self._registers: dict[str, NDArray[Any]] = {}
        self._steps = [decode(instruction) for instruction in kernel.code]
        self._threads = threads
        self._alive = np.ones(len(self.lane), np.bool_)
        self._at_barrier = np.zeros(len(self.lane), np.bool_)
        self._barrier_exit = np.zeros(len(self.lane), np.int64)  # where those at a barrier go on
        self._waiting: dict[int, list[Lanes]] = {}  # by position
        #: How often each thread has come to its cluster's barrier; those that wait there.
        self._arrivals = np.zeros(len(self.lane), np.int64)
        self._at_cluster = np.zeros(len(self.lane), np.bool_)
        self._next = 0

    def run(self) -> None:
        """Run all threads to their ends.

        Raises:
            PtxError: see the package.
        """
        self._waiting = {0: [self.lane]}
        while self._waiting:
            position = min(self._waiting)
            lanes = np.sort(np.concatenate(self._waiting.pop(position)))
            self._go_on(position, lanes)

    def _go_on(self, position: int, lanes: Lanes) -> None:
        """Run `lanes` from `position`, until the group meets others, parts or ends."""
        stop = min(self._waiting, default=len(self._steps))
        while position < stop:
            self._next = position + 1
            try:
                taken = self._under_guard(position, lanes)
            except PtxError as error:
                raise PtxError(f"{error}: {self.kernel.code[position]}") from None
            if taken is not None:  # a branch, a barrier or the end
                return
            position = self._next
        if position >= len(self._steps):
            return
        self._waiting.setdefault(position, []).append(lanes)

    def _under_guard(self, position: int, lanes: Lanes) -> bool | None:
        instruction = self.kernel.code[position]
        if instruction.guard is None:
            active, others = lanes, lanes[:0]
        else:
            holds = self.read(instruction.guard, "pred", lanes) != instruction.negated
            active, others = lanes[holds], lanes[~holds]
        name = instruction.opcode[0]
        if name == "bra":
            self._wait(self.kernel.labels[instruction.operands[0]], active)
        elif name in ("ret", "exit"):
            self._alive[active] = False
            self._release_barriers()
        elif name == "barrier" and instruction.opcode[1] == "cluster":
            if instruction.opcode[2] == "arrive":
                self._arrivals[active] += 1
                self._wait(position + 1, active)
            else:
                self._at_cluster[active] = True
                self._barrier_exit[active] = position + 1
            self._release_clusters()
        elif name in ("bar", "barrier") and "warp" not in instruction.opcode:
            if instruction.operands != ("0",):
                raise PtxError("only barrier 0 is interpreted")
            self._at_barrier[active] = True
            self._wait_at_barrier(position + 1, active)
        else:
            if len(active):
                self._steps[position](self, active)
            return None
        self._wait(position + 1, others)
        return True

    def _wait(self, position: int, lanes: Lanes) -> None:
        if len(lanes):
            self._waiting.setdefault(position, []).append(lanes)

    def _wait_at_barrier(self, position: int, lanes: Lanes) -> None:
        self._barrier_exit[lanes] = position
        self._release_barriers()

    def _release_barriers(self) -> None:
        """Let those blocks go on whose threads are all at a barrier or have ended."""
        if not self._at_barrier.any():
            return
        there = (self._at_barrier | ~self._alive).reshape(-1, self._threads).all(axis=1)
        freed = np.flatnonzero(self._at_barrier & np.repeat(there, self._threads))
        if not len(freed):
            return
        self._at_barrier[freed] = False
        self.shared.block_barriers[np.unique(freed // self._threads)] += 1
        exits = self._barrier_exit[freed]
        for position in np.unique(exits).tolist():
            block = freed[exits == position] // self._threads
            if np.isin(block, freed[exits != position] // self._threads).any():
                raise PtxError("threads of a block meet at different barriers")
            self._wait(position, freed[exits == position])

    def _release_clusters(self) -> None:
        """Let those threads go on whose cluster's barrier all of its threads have come to. A
        cluster is the blocks that differ in z alone."""
        plane = self.grid[0] * self.grid[1]
        arrivals = self._arrivals.reshape(-1, plane, self._threads)
        slowest = np.broadcast_to(arrivals.min(axis=(0, 2))[None, :, None], arrivals.shape)
        freed = np.flatnonzero(self._at_cluster & (slowest.ravel() >= self._arrivals))
        if not len(freed):
            return
        self._at_cluster[freed] = False
        self.shared.block_barriers[np.unique(freed // self._threads)] += 1
        for position in np.unique(self._barrier_exit[freed]).tolist():
            self._wait(position, freed[self._barrier_exit[freed] == position])

    def of_cluster(self, lanes: Lanes, rank: NDArray[np.int64]) -> Lanes:
        """Return the threads like `lanes` in the blocks of this `rank` in their clusters."""
        plane = self.grid[0] * self.grid[1]
        block = lanes // self._threads % plane + plane * rank
        return block * self._threads + lanes % self._threads

    def whole_warps(self, lanes: Lanes) -> None:
        """Refuse a warp-wide instruction that not all lanes of a warp take together."""
        if (
            len(lanes) % WARP
            or (lanes.reshape(-1, WARP)[:, 0] % WARP).any()
            or (lanes.reshape(-1, WARP)[:, -1] - lanes.reshape(-1, WARP)[:, 0] != WARP - 1).any()
        ):
            raise PtxError("a warp-wide instruction without all lanes of a warp")

    def read(self, operand: str, kind: str, lanes: Lanes) -> Any:
        """Return the value of a register, immediate or address, as PTX type `kind`: an array, or
        one value for all of `lanes`."""
        wanted = numpy_type(kind)
        if operand in self.kernel.registers:
            register = self._register(operand)
            if register.itemsize > wanted.itemsize:  # the low bits of a wider register
                register = register.astype(f"u{wanted.itemsize}")
            register = register.view(wanted)
            return register if len(lanes) == len(register) else register[lanes]
        if operand in self._special:
            special = self._special[operand].astype(wanted)
            return special[lanes] if special.ndim else special[()]
        for addresses in (self.kernel.shared, self.kernel.local):
            if operand in addresses:
                return wanted.type(addresses[operand])
        if isinstance(self.arguments.get(operand), bytes):
            return wanted.type(0)
        return _immediate(operand, wanted)

    def write(self, register: str, value: Any, lanes: Lanes) -> None:
        """Set a register of `lanes`; the value's own type says how many bits of it."""
        kind = self.kernel.registers.get(register)
        if kind is None:
            raise PtxError(f"{register} is no register")
        value = np.asarray(value)
        stored = np.dtype(np.bool_) if kind == "pred" else np.dtype(_STORED_IN[SIZES[kind]])
        if kind != "pred" and value.dtype.itemsize != stored.itemsize:
            raise PtxError(f"{register} takes no {value.dtype}")
        if len(lanes) == len(self.lane) and value.ndim:
            self._registers[register] = np.array(value, order="C").view(stored)  # a copy
            return
        self._register(register)[lanes] = value.view(stored)

    def _register(self, name: str) -> NDArray[Any]:
        """Return the bits of a register in all threads: NaN where it was not set yet."""
        if name not in self._registers:
            kind = self.kernel.registers[name]
            size = SIZES[kind]
            poison = np.full(len(self.lane) * size, POISON, np.uint8).view(_STORED_IN[size])
            self._registers[name] = poison.astype(np.bool_) if kind == "pred" else poison
        return self._registers[name]

    def address(self, operand: str, kind: str, lanes: Lanes) -> NDArray[Any]:
        """Return the value of an address in brackets, for each of `lanes`."""
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        value = self.read(base, kind, lanes)
        shift = int(offset or "0", 0)
        wide = np.asarray(value).astype(np.int64) + shift
        return np.broadcast_to(wide, len(lanes)).astype(np.uint64 if kind == "u64" else np.int64)


def _special_registers(
    lane: Lanes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    blocks: range,
    threads: int,
) -> dict[str, NDArray[np.uint32]]:
    inside, number = lane % threads, lane // threads + blocks.start
    found = {"%laneid": inside % WARP}
    for prefix, index, sizes in (("%tid", inside, block), ("%ctaid", number, grid)):
        count = "%ntid" if prefix == "%tid" else "%nctaid"
        for axis, size in zip("xyz", sizes, strict=True):
            found[f"{prefix}.{axis}"] = index % size
            found[f"{count}.{axis}"] = np.array(size)
            index = index // size
    return {name: value.astype(np.uint32) for name, value in found.items()}


def _immediate(text: str, wanted: np.dtype[Any]) -> Any:
    if text.startswith(("0f", "0F")):
        return np.array(int(text[2:], 16), np.uint32).view(np.float32).astype(wanted)[()]
    if text.startswith(("0d", "0D")):
        return np.array(int(text[2:], 16), np.uint64).view(np.float64).astype(wanted)[()]
    try:
        value = int(text.rstrip("U"), 0)
    except ValueError:
        raise PtxError(f"{text} is no operand that is interpreted") from None
    if wanted == np.bool_:
        return np.bool_(value)
    bits = value & ((1 << 8 * wanted.itemsize) - 1)
    return np.array(bits, np.dtype(f"u{wanted.itemsize}")).view(wanted)[()]
