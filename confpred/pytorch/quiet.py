"""Layers that stay PyTorch's, which for some calls nobody looks up.

A step at a small batch waits for the host, and the answer for most layers is PyTorch's own
function, as it was at the step before. Inside a network the processor's caches hold nothing of
`choosing.latest` and its guards when a layer comes: each object that is read costs a tenth of a
microsecond or more, and to look a layer up two, of some twenty that the call takes
(``benchmarks/host_in_networks.py``). So after a lookup that said PyTorch's, the next calls of the
place go there at once, and then one looks again. That serves only PyTorch's own function, which is
right for any tensors; what is late by some calls, where tensors of another shape come, is a kernel
that would have been faster. Whatever is noticed to have changed ends it for all places.

The marks are a byte a slot, in one page of memory, by the address of what names the place. Where a
layer of ours has the same slot, nothing is skipped. Addresses differ from one process to the next,
so where PyTorch is told to be deterministic, nothing rests.
"""

from __future__ import annotations

#: Calls that go straight on. What comes in turns, such as steps with gradients and without, is
#: noticed nevertheless, unless there are seven turns.
CALLS = 6
LAST = 4095  # slot; a power of two less one
#: By slot, how many more calls go straight on.
left = bytearray(LAST + 1)
_ours = bytearray(LAST + 1)
_NONE = bytes(LAST + 1)


def slot_of(place: int) -> int:
    """The slot of a place that an address names; objects are 16 bytes apart at least. What looks at
    each call writes this out, as a call costs as much."""
    return place >> 4 & LAST


def rest(place: int) -> None:
    """Look `place` up again after some calls; it was PyTorch's."""
    slot = slot_of(place)
    if not _ours[slot]:
        left[slot] = CALLS


def serve(place: int) -> None:
    """Look `place` up at each call; it is ours."""
    slot = slot_of(place)
    _ours[slot] = 1
    left[slot] = 0


def look_again() -> None:
    """Look each place up at its next call."""
    left[:] = _NONE


def forget() -> None:
    """Look each place up at its next call, and let slots that were ours be others'."""
    look_again()
    _ours[:] = _NONE
