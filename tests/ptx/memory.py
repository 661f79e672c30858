"""Device and shared memory that know what was written, and by whom.

Addresses of device memory are 64 bits wide: the number of the operand, from 1, above `_SHIFT`, and
the offset in it below. Address 0 is nobody's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptx.text import PtxError

_SHIFT = 40
_OFFSET = np.uint64((1 << _SHIFT) - 1)
POISON = 0xFF  # every byte: NaN in all the dtypes
_SEVERAL = 0xFFFFFF  # as the number of a thread: those of several warps
_UNIT = 2  # bytes: what shared memory is watched by, the smallest element that kernels use

Lanes = NDArray[np.int64]
Words = NDArray[np.unsignedinteger]


def unsigned(size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"u{size}")


class Operand:
    """Device memory of one operand.

    Args:
        data: its bytes; kept, not copied.
        written: whether it holds something at first; else it is poisoned.
        once: whether no two threads may store to the same place in it.
    """

    def __init__(self, name: str, data: NDArray[np.uint8], *, written: bool, once: bool) -> None:
        self.name, self.size = name, len(data)
        padded = -(-self.size // 16) * 16
        self.bytes = np.full(padded, POISON, np.uint8)
        if written:
            self.bytes[: self.size] = data
        self.written = None if written else np.zeros(padded, np.uint8)
        self.writer = np.full(padded // _UNIT, -1, np.int64) if once else None

    @property
    def content(self) -> NDArray[np.uint8]:
        return self.bytes[: self.size]


class DeviceMemory:
    """The operands of a launch."""

    def __init__(self, operands: list[Operand]) -> None:
        self._operands = operands

    def address(self, name: str) -> int:
        """Return the address of an operand; 0 where there is none of that name."""
        for number, operand in enumerate(self._operands, 1):
            if operand.name == name:
                return number << _SHIFT
        return 0

    def forget_writers(self) -> None:
        """Forget who wrote what; for between two launches, which are ordered."""
        for operand in self._operands:
            if operand.writer is not None:
                operand.writer.fill(-1)

    def load(self, address: NDArray[np.uint64], size: int, count: int) -> Words:
        """`count` neighbouring words of `size` bytes a lane: ``(lanes, count)``."""
        words = np.empty((len(address), count), unsigned(size))
        for operand, lanes, index in self._places(address, size, count):
            if operand.written is not None:
                marks = operand.written.view(unsigned(size))[index]
                if (marks != np.iinfo(marks.dtype).max).any():
                    raise PtxError(f"{operand.name} is read where nothing was written")
            words[lanes] = operand.bytes.view(unsigned(size))[index]
        return words

    def store(self, address: NDArray[np.uint64], words: Words, thread: Lanes) -> None:
        """The reverse of `load`, by the threads numbered `thread` in the whole grid."""
        size, count = words.dtype.itemsize, words.shape[1]
        for operand, lanes, index in self._places(address, size, count):
            operand.bytes.view(unsigned(size))[index] = words[lanes]
            if operand.written is not None:
                operand.written.view(unsigned(size))[index] = np.iinfo(words.dtype).max
            if operand.writer is not None:
                units = _units(index[:, 0] * size, size * count)
                by = np.broadcast_to(thread[lanes][:, None], units.shape)
                before = operand.writer[units]
                operand.writer[units] = by
                if ((before >= 0) & (before != by)).any() or (operand.writer[units] != by).any():
                    raise PtxError(f"two threads store to the same place in {operand.name}")

    def atomic(self, address: NDArray[np.uint64], kind: str, value: NDArray[np.generic]) -> Words:
        """Add, or increment with wrap-around, in the order of the lanes; the values before."""
        before = np.empty(len(address), np.uint32)
        for operand, lanes, index in self._places(address, 4, 1):
            if operand.written is not None and not operand.written.view(np.uint32)[index].all():
                raise PtxError(f"an atomic operation on {operand.name} where nothing was written")
            cells = operand.bytes.view(value.dtype)
            place, values = index[:, 0], value[lanes]
            if kind == "add" and len(np.unique(place)) == len(place):
                before[lanes] = cells[place].view(np.uint32)
                cells[place] += values
                continue
            olds = []
            for at, x in zip(place.tolist(), values, strict=True):
                olds.append(cells[at])
                cells[at] = cells[at] + x if kind == "add" else _incremented(cells[at], x)
            before[lanes] = np.array(olds, cells.dtype).view(np.uint32)
        return before

    def _places(
        self, address: NDArray[np.uint64], size: int, count: int
    ) -> list[tuple[Operand, Lanes | slice, NDArray[np.int64]]]:
        """For each operand, its lanes and the ``(lanes, count)`` indices of their words in it."""
        numbers = address >> np.uint64(_SHIFT)
        found: list[tuple[Operand, Lanes | slice, NDArray[np.int64]]] = []
        same = bool((numbers == numbers[0]).all())
        for number in numbers[:1].tolist() if same else np.unique(numbers).tolist():
            lanes = slice(None) if same else np.flatnonzero(numbers == number)
            if not 1 <= number <= len(self._operands):
                raise PtxError(f"address {int(address[0]):#x} is in no operand")
            operand = self._operands[number - 1]
            offset = (address[lanes] & _OFFSET).astype(np.int64)
            if (offset % (size * count)).any():
                raise PtxError(f"an access to {operand.name} is not aligned")
            if offset.max() + size * count > operand.size:
                end = offset.max() + size * count
                raise PtxError(f"byte {end - 1} of {operand.name}, which has {operand.size}")
            found.append((operand, lanes, offset[:, None] // size + np.arange(count)))
        return found


def _incremented(old: np.unsignedinteger, limit: np.unsignedinteger) -> int:
    return 0 if old >= limit else int(old) + 1


def _units(offset: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the watched units of `size` bytes at each of `offset`: ``(lanes, units)``."""
    return offset[:, None] // _UNIT + np.arange(-(-size // _UNIT))


class SharedMemory:
    """The shared memory of some blocks at once, each of `size` bytes.

    For each unit, the last thread that wrote and the last warp that read, with the count of
    barriers (of the block, and of the warp) at that time: two threads that touch a unit, one of
    them to write, need a barrier between them.
    """

    def __init__(self, blocks: int, size: int, threads: int) -> None:
        self.size, self.threads = size, threads
        self._stride = -(-max(size, 1) // 16) * 16
        self._bytes = np.full(blocks * self._stride, POISON, np.uint8)
        units = len(self._bytes) // _UNIT
        self._write = np.full(units, -1, np.int64)  # packed as `_stamp` does
        self._read = np.full(units, -1, np.int64)
        self._copying = np.zeros(units, np.bool_)
        self.block_barriers = np.zeros(blocks, np.int64)
        self.warp_barriers = np.zeros(blocks * (threads // 32), np.int64)

    def load(self, address: NDArray[np.integer], size: int, count: int, lane: Lanes) -> Words:
        """`count` neighbouring words of `size` bytes for each of the threads `lane`."""
        offset = self._offset(address, size * count, lane)
        units = _units(offset, size * count)
        if self._copying[units].any():
            raise PtxError("shared memory is read before the copy to it has been waited for")
        stamp = self._stamp(lane)
        self._check(self._write[units], stamp, lane, "read", "written")
        self._note_readers(units, stamp)
        return self._bytes.view(unsigned(size))[offset[:, None] // size + np.arange(count)]

    def store(self, address: NDArray[np.integer], words: Words, lane: Lanes) -> None:
        size, count = words.dtype.itemsize, words.shape[1]
        offset = self._offset(address, size * count, lane)
        self._mark(_units(offset, size * count), lane)
        self._bytes.view(unsigned(size))[offset[:, None] // size + np.arange(count)] = words

    def begin_copy(self, address: NDArray[np.integer], size: int, lane: Lanes) -> Lanes:
        """Begin an asynchronous copy of `size` bytes; returns where it goes to."""
        offset = self._offset(address, size, lane)
        units = _units(offset, size)
        self._mark(units, lane)
        self._copying[units] = True
        self._bytes.reshape(-1, size)[offset // size] = POISON
        return offset

    def end_copy(self, offset: Lanes, data: NDArray[np.uint8], lane: Lanes) -> None:
        size = data.shape[1]
        units = _units(offset, size)
        self._mark(units, lane)
        self._copying[units] = False
        self._bytes.reshape(-1, size)[offset // size] = data

    def _offset(self, address: NDArray[np.integer], size: int, lane: Lanes) -> Lanes:
        address = address.astype(np.int64)
        if (address % size).any():
            raise PtxError("an access to shared memory is not aligned")
        if (address + size > self.size).any():
            raise PtxError(f"byte {address.max() + size - 1} of {self.size} of shared memory")
        return lane // self.threads * self._stride + address

    def _stamp(self, lane: Lanes) -> Lanes:
        block, warp = self.block_barriers[lane // self.threads], self.warp_barriers[lane // 32]
        return block << 44 | warp << 24 | lane

    def _note_readers(self, units: NDArray[np.int64], stamp: Lanes) -> None:
        mine = np.broadcast_to(stamp[:, None], units.shape)
        before = self._read[units]
        shared = (before >> 44 == mine >> 44) & ((before ^ mine) & 0xFFFFFF > 31)
        self._read[units] = np.where(shared, mine | _SEVERAL, mine) if shared.any() else mine
        lost = (self._read[units] ^ mine) & 0xFFFFFF > 31  # warps that read in the same instruction
        if lost.any():
            self._read[units[lost]] |= _SEVERAL

    def _mark(self, units: NDArray[np.int64], lane: Lanes) -> None:
        stamp = self._stamp(lane)
        self._check(self._write[units], stamp, lane, "written", "written")
        self._check(self._read[units], stamp, lane, "written", "read")
        self._write[units] = stamp[:, None]
        if (self._write[units] != stamp[:, None]).any():
            raise PtxError("shared memory is written by two threads at once")

    def _check(
        self, before: NDArray[np.int64], stamp: Lanes, lane: Lanes, now: str, then: str
    ) -> None:
        recent = before >> 44 == stamp[:, None] >> 44
        if not recent.any():
            return
        other = before & 0xFFFFFF
        same_warp = other >> 5 == lane[:, None] >> 5
        ordered = same_warp & (before >> 24 != stamp[:, None] >> 24)
        race = recent & (before >= 0) & (other != lane[:, None]) & ~ordered
        if then == "read":
            race &= ~same_warp  # lanes of one warp read together, and then go on together
        if race.any():
            at = tuple(np.argwhere(race)[0])
            first = "several" if other[at] == _SEVERAL else f"thread {other[at] % self.threads}"
            raise PtxError(
                f"shared memory is {now} by thread {lane[at[0]] % self.threads} after it was "
                f"{then} by {first} without a barrier between them"
            )
