"""confpred inside PyTorch; importing this package imports PyTorch.

switch      `enable` and `disable`
routing     the functions that they put in the place of PyTorch's
module      the method of `torch.nn.Conv2d` that they do
conv2d      the public function: checks its arguments, and decides which way a call goes
linear_chain  the public function for chains of linear layers
prepared    what is made of weights once, and again when they change
autograd    eager calls, with gradients or without
operators   what torch.compile sees
tracing     where an operator of ours pays in a compiled program
guards      whether a call is like the last one from the same place
directions  a forward without gradients: ours, or PyTorch's own with a cheap epilogue
gradients   a layer in training: what serves each of its three directions
policy      whether to wait for a kernel, and whether to measure
verify      measured choices
recording   the choices of a block as a plan
choosing    from a problem to a launch; what was found is kept here
kernels     the kernels of this process: compiled in threads, and loaded
fallback    PyTorch's own operators, whatever is put over them
epilogue    one kernel for what follows PyTorch's own convolution
layers      PyTorch's arguments as a problem
layouts     which layouts kernels read, and when it pays to convert to them
casts       weights in autocast's dtype
ready       launches that are ready to run, one for each shape
programs    the same for launches with matrix products in them
workspace   the device memory that launches on one stream share
streams     what the hot path asks CUDA's runtime
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("torch") is None:
    raise MissingExtra("torch", "gpu")
