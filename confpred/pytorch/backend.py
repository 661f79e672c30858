"""``torch.compile(model, backend="confpred")``: PyTorch captures, confpred chooses.

    Dynamo --> AOTAutograd --> rewrite (what runs, chosen in one call) --> CUDA graph
              inference        fuse
              joint            serve_training, then forward and backward apart
              forward          update_in_place

Dynamo's guards say when a captured graph still holds. Parameters and buffers are inputs of the
graphs, so that every write to one is seen.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from confpred import __version__
from confpred.cuda import driver
from confpred.errors import ConfpredError, InvalidInput
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.limits import UNLIMITED, Limits
from confpred.pytorch import choosing, rewrite, verify
from confpred.pytorch.choosing import Wishes
from confpred.pytorch.convolve import is_deterministic
from confpred.pytorch.freeze import frozen
from confpred.pytorch.graphs import graphed
from confpred.pytorch.layouts import to_channels_last
from confpred.pytorch.loading import compile_ahead

log = logging.getLogger("confpred")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the backend, the keys of ``torch.compile(..., options={...})``.

    Attributes:
        graphs: replay captured graphs as CUDA graphs.
        freeze: compute once what depends on parameters and buffers alone, such as folded filters.
            For networks whose weights are not written any more: a write is not seen.
        verify: time so many of the best predictions and PyTorch's operator for each layer, and take
            the fastest; 0 trusts the predictions.
        max_regret: take a prediction only where the bound on its regret is at most this.
        limits: every choice keeps within them.

    Raises:
        InvalidInput: a value is not allowed.
    """

    graphs: bool = True
    freeze: bool = False
    verify: int = 0
    max_regret: float | None = None
    limits: Limits = UNLIMITED

    def __post_init__(self) -> None:
        for name in ("graphs", "freeze"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(name, getattr(self, name), "True or False")
        if type(self.verify) is not int or not 0 <= self.verify <= 8:
            raise InvalidInput("verify", self.verify, "an integer from 0 to 8")
        _ = self.wishes

    @property
    def wishes(self) -> Wishes:
        return Wishes(self.limits, self.max_regret)

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """Return the options that a dictionary names.

        Raises:
            InvalidInput: there is no such option, or a value is not allowed.
        """
        names = [f.name for f in fields(cls)]
        for name in given or {}:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidInput("options", name, f"one of {', '.join(names)}{meant}")
        return cls(**(given or {}))


def confpred(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a graph of Dynamo's; the backend that ``torch.compile`` finds by this name.

    Args:
        gm, example_inputs: from Dynamo.
        mode: None; confpred has no modes.
        options: see `Options`.

    Raises:
        InvalidInput: `mode` or `options` is not allowed.
    """
    if mode not in (None, "default"):
        raise InvalidInput("mode", mode, "None; options={'graphs': False} is without CUDA graphs")
    compiler = Compiler(Options.of(options))
    _guard_hooks()
    return compiler.compile(gm, example_inputs)


def _guard_hooks() -> None:
    """Let the guards of the capture under way see hooks that are added to modules later.

    Dynamo skips them unless it is told not to, and a hook would be ignored.
    """
    from torch._dynamo import callback, config

    if not config.skip_nnmodule_hook_guards:
        return

    def restore(*_: Any) -> None:
        config.skip_nnmodule_hook_guards = True
        callback.callback_handler.end_callbacks = [
            each for each in callback.callback_handler.end_callbacks if each is not restore
        ]

    callback.on_compile_end(restore)
    config.skip_nnmodule_hook_guards = False


class Compiler:
    """The compilers that AOTAutograd calls with the graphs of a capture.

    Attributes:
        options: see `Options`.
        sites: the convolutions found, as `confpred.pytorch.rewrite` describes them.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.sites: list[rewrite.Site] = []

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph of Dynamo's; see `confpred`."""
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(
            fw_compiler=self.forward,
            bw_compiler=self.backward,
            inference_compiler=self.inference,
            partition_fn=self.partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)

    def chooser(self, graph: fx.Graph) -> rewrite.Choose | None:
        """Return a function that chooses for the device of `graph`; None where that is no GPU."""
        ordinal = ordinal_of(graph)
        return None if ordinal is None else chooser(ordinal, self.options)

    def inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph without gradients."""
        rewrite.refuse_mixed_dtypes(gm.graph)
        rewrite.views_of_any_layout(gm.graph)
        rewrite.drop_copies(gm.graph)
        choose = self.chooser(gm.graph)
        if choose is not None:
            to_channels_last(gm.graph)
            self.sites += rewrite.fuse(gm.graph, choose, self.options.wishes)
        static = _static_inputs(gm)
        written = rewrite.update_in_place(gm.graph)
        if self.options.freeze:
            return frozen(
                gm, static, lambda rest, still: self._run(rest, still, written, None, "inference")
            )
        return self._run(gm, static, written, None, "inference")

    def partition(self, joint: fx.GraphModule, inputs: Any, **told: Any) -> Any:
        """Rewrite a graph of forward and backward, and cut it where autograd would.

        Nothing is computed again in the backward pass: without fused pointwise kernels that costs
        a pass over memory each.
        """
        from torch._functorch.partitioners import default_partition

        rewrite.refuse_mixed_dtypes(joint.graph)
        rewrite.views_of_any_layout(joint.graph)
        choose = self.chooser(joint.graph)
        if choose is not None:
            to_channels_last(joint.graph, told["num_fwd_outputs"])
            self.sites += rewrite.serve(joint.graph, choose, self.options.wishes)
        rewrite.batch_norms_as_eager(joint.graph)
        joint.recompile()
        return default_partition(joint, inputs, **told)

    def forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile the forward pass of a graph with gradients."""
        rewrite.drop_copies(gm.graph)
        written = rewrite.update_in_place(gm.graph)
        visible = _metadata().num_forward_returns
        return self._run(gm, _static_inputs(gm), written, visible, "forward")

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile the backward pass."""
        tangents = sum("tangents" in n.name for n in gm.graph.nodes if n.op == "placeholder")
        rewrite.drop_copies(gm.graph)
        saved = range(len([n for n in gm.graph.nodes if n.op == "placeholder"]) - tangents)
        return self._run(gm, list(saved), rewrite.update_in_place(gm.graph), None, "backward")

    def _run(
        self,
        gm: fx.GraphModule,
        static: Sequence[int],
        written: set[fx.Node],
        visible: int | None,
        kind: str,
    ) -> Any:
        from torch._dynamo.backends.debugging import boxed_nop

        gm.recompile()
        plain = boxed_nop(gm, [])
        if not self.options.graphs or ordinal_of(gm.graph) is None:
            return plain
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        mutated = [i for i, node in enumerate(places) if node in written]
        return graphed(gm, plain, static=static, written=mutated, visible=visible, kind=kind)


def chooser(ordinal: int, options: Options) -> rewrite.Choose:
    """Return a function that chooses for CUDA device `ordinal`, and compiles in parallel."""

    wishes = options.verify, options.wishes

    def choose(problems: Sequence[Problem]) -> Sequence[Choice | None]:
        if options.verify:
            with _disable_current_modes():  # AOTAutograd's fake tensors cannot be timed
                found = {p: verify.fastest(p, ordinal, *wishes) for p in dict.fromkeys(problems)}
            return [found[problem] for problem in problems]
        choices = choosing.choose_on(problems, ordinal, options.wishes)
        known = [choice for choice in dict.fromkeys(choices) if choice is not None]
        compile_ahead(known, ordinal, options.limits)
        return choices

    return choose


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


def ordinal_of(graph: fx.Graph) -> int | None:
    """Return the CUDA device of the tensors of `graph`; None where they are elsewhere."""
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, Tensor) and val.device.type == "cuda":
            return val.device.index or 0
    return None


def _metadata() -> Any:
    return torch._guards.TracingContext.get().fw_metadata


def _static_inputs(gm: fx.GraphModule) -> list[int]:
    """Return the places of the inputs that stay where they are: parameters and buffers."""
    return [int(i) for i in _metadata().static_input_indices]
