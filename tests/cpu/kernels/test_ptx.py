"""The interpreter itself: it refuses what it must, and its instructions compute what the manual of
PTX says, worked out here on Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from ptx.launch import run
from ptx.text import PtxError

from confpred.problem.operation import SCRATCH, ZEROED, KernelSpec, Launch, Step

FILE, THREADS = "ptx/cases.cu", 64
WORDS = np.random.default_rng(0).integers(0, 2**32, 2 * THREADS, dtype=np.uint32)


def launch(case: str) -> NDArray[np.uint32]:
    """Return the output of a case of ``cases.cu``."""
    step = Step(
        KernelSpec(FILE, "case_", ((f"CASE_{case}", 1),)),
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem_bytes=2 * THREADS * 16,
        operands=("out", "in", ZEROED, SCRATCH),
        scalars={"count": 2 * THREADS * 4},
    )
    inputs = {"in": WORDS[:THREADS].view(np.uint8)}
    found = run(Launch((step,), 4, 4 * THREADS), inputs, {"out": 4 * THREADS}, "sm_80")
    return found["out"].view(np.uint32)


def test_what_is_right_passes() -> None:
    words, thread = WORDS[:THREADS], np.arange(THREADS)
    for case in ("exchange", "overwrite"):
        assert (launch(case) == words[::-1]).all(), case
    assert (launch("warp_exchange") == words[thread ^ 1]).all()
    assert (launch("copy") == words[4 * ((63 - thread) % 16)]).all()
    assert (launch("late_copy") == words[4 * (thread % 16)]).all()
    parted = [
        sum(int(words[t]) if i % 2 else t for i in range(t % 7)) % 2**32 for t in range(THREADS)
    ]
    assert (launch("parting") == parted).all()
    assert (launch("last_block") == np.where(thread == 63, 1000, thread)).all()
    assert (launch("some_threads")[:40] == np.arange(39, -1, -1)).all()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("exchange_without_barrier", "read by thread .* after it was written by thread"),
        ("overwrite_without_barrier", "written by thread .* after it was read by thread"),
        ("warp_exchange_without_barrier", "read by thread .* after it was written by thread"),
        ("copy_without_wait", "read before the copy to it has been waited for"),
        ("copy_without_barrier", "read before the copy|read by thread .* after it was written"),
        ("beyond", "byte 259 of in, which has 256"),
        ("misaligned", "access to in is not aligned"),
        ("nowhere", "is in no operand"),
        ("beyond_shared", "of shared memory"),
        ("unwritten", f"byte 259 of {SCRATCH}|read where nothing was written"),
        ("same_place", "two threads store to the same place in out"),
        ("two_barriers", "meet at different barriers"),
        ("half_warp", "without all lanes of a warp"),
        ("dirty", "the zeroed workspace is left dirty"),
    ],
)
def test_what_is_wrong_is_refused(case: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        launch(case)


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def half_pair(kind: str) -> Callable[[int, int, int], int]:
    def expected(a: int, b: int, lane: int) -> int:
        high = np.float32(signed(a)) * np.float32(1e-7)
        low = np.float32(b) * np.float32(1e-9)
        if kind == "float16":
            bits = [int(np.float16(x).view(np.uint16)) for x in (low, high)]
        else:
            import torch

            pair = torch.tensor([low, high], dtype=torch.float32).to(torch.bfloat16)
            bits = [x & 0xFFFF for x in pair.view(torch.int16).tolist()]
        return bits[1] << 16 | bits[0]

    return expected


def saturated(a: int, b: int, lane: int) -> int:
    return float_bits(min(max(np.float32(signed(a)) * np.float32(1e-9), np.float32(0)), 1))


def fused_down(a: int, b: int, lane: int) -> int:
    """Python's floats hold the product of two float32, and the sum, without rounding."""
    exact = float(np.float32(signed(a)) * np.float32(1e-7)) * float(b * np.float32(1e-9))
    exact += 12582912.0
    near = np.float32(exact)
    return float_bits(near if float(near) <= exact else np.nextafter(near, np.float32(-np.inf)))


def float_bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def permuted(a: int, b: int, lane: int) -> int:
    """Selector 0x5d06: bytes 6, 0, the sign of 5, 5."""
    both = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    return int.from_bytes([both[6], both[0], 255 if both[5] & 128 else 0, both[5]], "little")


def inserted(a: int, b: int, lane: int) -> int:
    mask = (2**7 - 1) << 9
    return b & ~mask | a << 9 & mask


def chosen(a: int, b: int, lane: int) -> int:
    """Table 0xca: the second where the first has a 1, the third elsewhere."""
    c = lane * 0x01010101
    return a & b | ~a & c


#: Result of each instruction for one lane's operands, in the order of the kernel's instructions.
EXPECTED: dict[str, Callable[[int, int, int], int]] = {
    "mul.hi.u32": lambda a, b, lane: a * b >> 32,
    "mul.hi.s32": lambda a, b, lane: signed(a) * signed(b) >> 32,
    "div.s32": lambda a, b, lane: int(np.trunc(np.longdouble(signed(a)) / signed(b))),
    "rem.s32": lambda a, b, lane: int(np.fmod(signed(a), signed(b))),
    "shl.b32": lambda a, b, lane: 0 if b > 31 else a << b,
    "shr.u32": lambda a, b, lane: 0 if b > 31 else a >> b,
    "shr.s32": lambda a, b, lane: signed(a) >> min(b, 31),
    "min.s32": lambda a, b, lane: min(signed(a), signed(b)),
    "max.u32": lambda a, b, lane: max(a, b),
    "bfe.u32": lambda a, b, lane: a >> 5 & 2047,
    "bfe.s32": lambda a, b, lane: (a >> 5 & 2047) - (a >> 15 & 1) * 2048,
    "bfi.b32": inserted,
    "prmt.b32": permuted,
    "shf.l.wrap": lambda a, b, lane: (b << 32 | a) << 7 >> 32,
    "shf.r.clamp": lambda a, b, lane: (b << 32 | a) >> 13,
    "lop3.b32": chosen,
    "cvt.rn.f16x2.f32": half_pair("float16"),
    "cvt.rn.bf16x2.f32": half_pair("bfloat16"),
    "cvt.sat.f32.f32": saturated,
    "fma.rm.f32": fused_down,
}


@pytest.fixture(scope="module")
def operations() -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Two operands a thread, some of them small, and the results of each instruction."""
    words = WORDS.copy()
    words[THREADS::2] %= 40  # amounts to shift by
    words[THREADS:] += words[THREADS:] == 0
    step = Step(
        KernelSpec(FILE, "operations", ()), (1, 1, 1), (THREADS, 1, 1), 0, ("out", "in"), {}
    )
    count = len(EXPECTED) + 5
    found = run(
        Launch((step,)), {"in": words.view(np.uint8)}, {"out": 4 * THREADS * count}, "sm_80"
    )
    results = found["out"].view(np.uint32).reshape(count, THREADS)
    return words[:THREADS], words[THREADS:], results


@pytest.mark.parametrize(("index", "name"), list(enumerate(EXPECTED)))
def test_an_instruction_computes_what_the_manual_says(index, name, operations) -> None:
    a, b, results = operations
    lanes = range(THREADS)
    right = [EXPECTED[name](int(a[t]), int(b[t]), t) % 2**32 for t in lanes]
    assert results[index].tolist() == right


def test_lanes_exchange_what_the_manual_says(operations) -> None:
    a, b, results = operations
    lane = np.arange(THREADS) % 32
    base = np.arange(THREADS) - lane
    exclusive, up, down, index, moved = results[len(EXPECTED) :]
    assert (exclusive == a[base + (lane ^ 5)]).all()
    assert (up == a[base + np.where(lane >= 3, lane - 3, lane)]).all()
    assert (down == a[base + np.where(lane % 8 + 3 < 8, lane + 3, lane)]).all()
    assert (index == a[base + lane // 16 * 16 + b % 16]).all()
    matrices = a.view(np.uint16).reshape(-1, 8, 8)
    assert (moved.view(np.uint16).reshape(-1, 8, 8) == matrices.transpose(0, 2, 1)).all()
