"""confpred inside PyTorch; importing this package imports PyTorch.

conv2d      the public function: checks its arguments, and decides which way a call goes
autograd    custom operators, for gradients and torch.compile
directions  forward, input gradient, filter gradient: ours or PyTorch's own
ready       launches that are ready to run, one for each shape
workspace   the device memory that launches on one stream share
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("torch") is None:
    raise MissingExtra("torch", "gpu")
