"""What a layer of ours has to save where the host may be what a step waits for.

A kernel that saves the GPU some microseconds is no gain where the GPU waits for the host, and a
loss if the host takes longer to launch it. Whether the host is waited for nobody knows while a
layer is chosen, but it is not where the GPU takes longer for a layer than the host does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Host:
    """What a way of running layers asks of one of ours, in milliseconds of the GPU's time: without
    gradients, or of the forward and backward pass together.

    Attributes:
        layer: where a layer, or a network's layers on average, take the GPU at least this long by
            PyTorch's operators, the host is taken not to be waited for.
        more: what a layer has to save there: how much longer one of ours takes the host.
        much: what a layer has to save elsewhere.
    """

    layer: float
    more: float
    much: float

    def least(self, taken_ms: float) -> float:
        """What a layer has to save that takes the GPU `taken_ms` by PyTorch's operators, or is of a
        network whose layers do so on average."""
        return self.more if taken_ms >= self.layer else self.much


#: A program of Inductor calls PyTorch's convolution in C++, and ours in Python. An H200's host took
#: 31 to 43 us a layer there, with the pointwise kernels between them, and 5 to 40 us more for one
#: of ours: the fewer there are, the colder is what they run. Training is taken to be three times
#: that.
COMPILED, COMPILED_TRAINING = Host(0.045, 0.006, 0.05), Host(0.135, 0.02, 0.15)
#: The same of a layer whose network is known, which is judged by the network's mean. Of 28 that
#: were timed, those of 40 us a layer and more gained; where the host is waited for, no layer does,
#: whatever it saves the GPU.
COMPILED_NETWORK = Host(0.04, 0.006, inf)
#: An eager layer: its launch takes the host as long as PyTorch's operator, but 4 to 9 us longer
#: inside a network. A kernel that adds a bias, or fuses more, takes no longer, as it is in place of
#: several launches of PyTorch's; a plan of a library does, as there are many.
EAGER = Host(0.045, 0.006, 0.05)
#: A node of the graph in Python takes the host longer than PyTorch's own, which is C++
#: (``benchmarks/host_overhead.py``).
EAGER_TRAINING = Host(0.0, 0.04, 0.04)
#: In a CUDA graph nothing takes the host anything.
GRAPH = Host(0.0, 0.0, 0.0)
