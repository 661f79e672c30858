"""`inductor_options`: confpred's choices inside PyTorch's own compiler.

Pointwise code is Inductor's, convolutions are chosen; for those who accept its compile time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from confpred import __version__
from confpred.cuda import driver
from confpred.errors import ConfpredError
from confpred.pytorch import choosing, rewrite
from confpred.pytorch.backend import Options, chooser, ordinal_of
from confpred.pytorch.layers import is_deterministic


def inductor_options(**options: Any) -> dict[str, Any]:
    """Return options of ``torch.compile`` that let its backend use confpred's choices.

    ::

        torch.compile(model, options=confpred.inductor_options())

    Args:
        options: ``max_regret``, ``limits`` and ``verify`` as of `confpred.optimize`; ``graphs``
            lets Inductor make CUDA graphs, which it does by default.

    Raises:
        InvalidInput: an option is not allowed.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    told = Options.of(options)

    class Pass(CustomGraphPass):
        """Lets confpred compute the convolutions that it is predicted to win."""

        def __call__(self, graph: fx.Graph) -> None:
            ordinal = ordinal_of(graph)
            if ordinal is not None:
                rewrite.serve(graph, chooser(ordinal, told), told.wishes)

        def uuid(self) -> Any:
            return _identity(told)

    return {"joint_custom_post_pass": Pass(), "triton.cudagraphs": told.graphs}


def _identity(options: Options) -> Any:
    """Return a text that is another one where choices may be others; Inductor keeps programs."""
    if not torch.cuda.is_available():
        return __version__
    try:
        device = driver.device_of(torch.cuda.current_device())
        facts = choosing.identity(device, options.wishes), options.verify, is_deterministic()
    except ConfpredError as error:
        return f"{__version__} {error}"
    return f"{__version__} {facts}"
