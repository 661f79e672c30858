"""Whole networks, for `confpred.optimize` and `confpred.explain`; importing this imports PyTorch.

modules    which modules are convolutions, norms, activations or nothing at all in evaluation
tracing    a network as a graph, or its parts where the whole cannot be traced
chains     convolution -> norm -> residual -> activation, found in a graph
fused      what one such chain does at a call: folded, in plain PyTorch, or as one operator
operators  that operator, for `torch.compile`
forward    the forward of an optimized module: when it may run, and what must not have changed
instance_forward  what both forwards share: they are kept on a module, and go where it goes
training   the forward of a network that trains, and of its layers
optimize   `optimize` and `revert`
problems   the convolution problems of a network
explain    `explain`: a row for each layer
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("torch") is None:
    raise MissingExtra("torch", "gpu")
