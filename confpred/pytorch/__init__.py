"""confpred inside PyTorch; importing this package imports PyTorch.

A network:
    network    `optimize` and `revert`
    backend    the backend of torch.compile, and its options
    layouts    one layout for a graph
    rewrite    passes over graphs: fusion, choice, batch norm
    freeze     what depends on weights alone, computed once
    graphs     CUDA graphs of captured graphs
    inductor   the same choices inside PyTorch's compiler
    explain    a capture on fake tensors: what would run
    bundle     the same as a plan and compiled kernels

Calls:
    conv2d, linear_chain   the public functions
    eager      `enable` and `disable`, and a convolution with a record of gradients
    operators  what rewritten graphs call
    convolve   forward and both gradients, by a launch or PyTorch's operator
    pointwise  one kernel for what follows a convolution
    fold       batch norms as filters and biases, in one launch

From a problem to a launch:
    layers     PyTorch's arguments as a problem
    choosing   the predictor, limits and switches in force; choices as a plan
    verify     measured choices
    loading    from a choice to a launch
    kernels    the kernels of this process: compiled in threads, and loaded
    ready      launches that are ready to run, one for each shape
"""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("torch") is None:
    raise MissingExtra("torch", "gpu")
