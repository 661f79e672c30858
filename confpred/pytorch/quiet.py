"""Layers that stay PyTorch's, which for some calls nobody looks up.

A step at a small batch waits for the host, and the answer for most layers is PyTorch's own
function, as it was at the step before. Inside a network the processor's caches hold nothing of
`choosing.latest` and its guards when a layer comes: to look one up costs three microseconds, of
some twenty that the call takes (``benchmarks/host_in_networks.py``). So after a lookup that said
PyTorch's, the next calls of the layer go there at once, and then one looks again. That serves only
PyTorch's own function, which is right for any tensors; what is late by some calls, where tensors of
another shape come, is a kernel that would have been faster. Whatever is noticed to have changed
ends it for all layers.

The count is among the attributes of the layer, which are at hand when it is called: a table of
ours, by the layer's address, cost ten times as much. `leave` takes it away.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

#: Calls that go straight on. What comes in turns, such as steps with gradients and without, is
#: noticed nevertheless, unless there are thirteen turns.
CALLS = 12
#: The attribute of a layer that says how many calls are left, from `woken` on; negative where a
#: kernel of ours serves some of its calls.
MARK = "_confpred_rests"
woken = 0
_chosen = 0  # how often all was chosen anew
_marked: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def rest(layer: nn.Module) -> None:
    """Look `layer` up again after some calls; it was PyTorch's."""
    if layer.__dict__.get(MARK) != -1 - _chosen:
        _mark(layer, woken + CALLS)


def serve(layer: nn.Module) -> None:
    """Look `layer` up at each call; it is ours, for some tensors at least."""
    _mark(layer, -1 - _chosen)


def _mark(layer: nn.Module, value: int) -> None:
    own = layer.__dict__
    if MARK not in own:
        _marked[id(layer)] = layer
    own[MARK] = value


def rests(own: dict[str, Any]) -> bool:
    """Whether the layer whose attributes are `own` is not to be looked up at this call."""
    if not 0 < own.get(MARK, 0) - woken <= CALLS:  # other processes count from elsewhere
        return False
    own[MARK] -= 1
    return True


def look_again() -> None:
    """Look each layer up at its next call."""
    global woken
    woken += CALLS


def forget() -> None:
    """Look each layer up at its next call, as all is chosen anew."""
    global _chosen
    _chosen += 1
    look_again()


def leave() -> None:
    """Take all counts away from their layers."""
    for layer in list(_marked.values()):
        layer.__dict__.pop(MARK, None)
    _marked.clear()
