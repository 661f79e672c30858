"""confpred inside PyTorch; importing this package imports PyTorch.

A network:
    network    `optimize` and `revert`
    backend    the backend of torch.compile, its options, and the same choices inside Inductor
    layouts    one layout for a graph
    fusing     what is chosen, and fused with it: convolutions become confpred's operators
    passes     passes over any graph: batch norm as eager mode, copies, views, updates in place,
               what depends on weights alone
    graphs     CUDA graphs of captured graphs
    explain    a capture on fake tensors: what would run
    plan       the same as a plan; choices recorded while a block runs

Calls:
    eager      `conv2d`, `enable` and `disable`
    linear_chain
    operators  what rewritten graphs call
    convolve   a convolution's arguments; forward and both gradients, by a launch or PyTorch
    pointwise  one kernel for what follows a convolution
    fold       batch norms as filters and biases, in one launch

From a problem to a launch:
    choosing   the predictor or plan, limits and switches in force
    verify     measured choices
    loading    kernels compiled in threads, and launches that are ready for one shape
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("torch") is None:
    raise MissingExtra("torch", "gpu")
