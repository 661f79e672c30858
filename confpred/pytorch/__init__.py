"""confpred inside PyTorch; importing it takes PyTorch, which nothing outside of this room does.

conv2d      the public function: what its arguments must be, and which way a call goes
autograd    custom operators, for gradients and torch.compile
directions  forward, input gradient, filter gradient: ours or PyTorch's own
ready       launches with nothing left to decide, one a shape
workspace   the device memory that launches on one stream share
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("torch") is None:
    raise MissingExtra("torch", "gpu")
