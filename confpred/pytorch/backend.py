"""``torch.compile(model, backend="confpred")``: PyTorch captures, confpred chooses.

    Dynamo --> AOTAutograd --> fusing (what runs, chosen in one call) --> CUDA graph
              inference        fuse
              joint            serve, then forward and backward apart

Dynamo's guards say when a captured graph still holds. Parameters and buffers are inputs of the
graphs, so that every write to one is seen.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import _disable_current_modes

from confpred.errors import InvalidInput, nearest
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.norm import BATCH_NORM
from confpred.problem.norm_of_groups import NORM
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.pytorch.rewrite import fusing, inductor, layouts, normalising, passes, training
from confpred.pytorch.rewrite.passes import Step
from confpred.pytorch.rewrite.sites import Site
from confpred.pytorch.run import choosing, tuning, verify
from confpred.pytorch.run.choosing import Wishes
from confpred.pytorch.run.graphs import Memory, graphed, memory_of_inference
from confpred.pytorch.run.loading import compile_ahead
from confpred.pytorch.status import Calls, Capture, Pass, capture_of

log = logging.getLogger("confpred")
NETWORK = "network"  # of the option `verify`


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the backend, the keys of ``torch.compile(..., options={...})``.

    Attributes:
        inductor: let Inductor compile the rest of a graph: fewer passes over memory, for a first
            step that takes as long as that of ``torch.compile``. None: on a GPU, where Triton and a
            C compiler are installed.
        graphs: replay captured graphs as CUDA graphs.
        freeze: compute once what depends on parameters and buffers alone, such as folded filters.
            For networks whose weights are not written any more: a write is not seen.
        verify: time so many of the best predictions and PyTorch's operator for each layer, and take
            the fastest; 0 trusts the predictions. ``"network"``: time each captured graph with
            confpred's choices and without, and keep the faster; a graph compiles twice.
        max_regret: take a prediction only where the bound on its regret is at most this.
        limits: every choice keeps within them.
        tune: measure layers whose answers are guesses, for at most so many seconds of a network,
            and keep the answers (`confpred.pytorch.run.tuning`); 0 measures nothing and follows no
            such answers. None: 60 on a GPU that no model knows, else 0.

    Raises:
        InvalidInput: a value is not allowed.
    """

    inductor: bool | None = None
    graphs: bool = True
    freeze: bool = False
    verify: int | str = 0
    max_regret: float | None = None
    limits: Limits = UNLIMITED
    tune: float | None = None

    def __post_init__(self) -> None:
        for name, more in (("inductor", ", or None"), ("graphs", ""), ("freeze", "")):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (more and value is None):
                raise InvalidInput(name, value, f"True or False{more}")
        counted = type(self.verify) is int and 0 <= self.verify <= 8
        if not counted and self.verify != NETWORK:
            raise InvalidInput("verify", self.verify, f"an integer from 0 to 8, or {NETWORK!r}")
        tune = self.tune
        if tune is not None and not (type(tune) in (int, float) and 0 <= tune < math.inf):
            raise InvalidInput("tune", tune, "seconds, or None")
        _ = self.wishes

    def __getattr__(self, name: str) -> None:
        """Return None for an option that a pickle of an earlier version lacks."""
        if name != "tune":
            raise AttributeError(name)

    @property
    def wishes(self) -> Wishes:
        return Wishes(self.limits, self.max_regret)

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """Return the options that a dictionary names."""
        names = [f.name for f in fields(cls)]
        for name in given or {}:
            if name not in names:
                raise InvalidInput("options", name, nearest(name, names))
        return cls(**(given or {}))


def confpred(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    calls: Calls | None = None,
) -> Any:
    """Compile a graph of Dynamo's; the backend that ``torch.compile`` finds by this name. `calls`
    are those of a model that `confpred.optimize` was given.

    Raises:
        InvalidInput: `options` are not of `Options`, or there is a mode: confpred has none.
    """
    if mode not in (None, "default"):
        raise InvalidInput("mode", mode, "None; options={'graphs': False} is without CUDA graphs")
    compiler = Compiler(Options.of(options), calls)
    _guard_hooks()
    compiled = compiler.compile(gm, example_inputs)
    log.info("%s", compiler.capture)
    return compiled


def _guard_hooks() -> None:
    """Let the guards of the capture under way see hooks that are added to modules later: Dynamo
    skips them unless it is set not to, and a hook would be ignored."""
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
    """The compilers that AOTAutograd calls with the graphs of a capture; `sites` are the
    convolutions that were found and `norms` the norms, `capture` is what `confpred.status` knows of
    it. One that does not choose leaves them to PyTorch."""

    capture: Capture

    def __init__(
        self, options: Options, calls: Calls | None = None, *, chooses: bool = True
    ) -> None:
        self.options, self._calls, self._chooses = options, calls, chooses
        self.inductor = bool(options.inductor)
        self.sites: list[Site] = []
        self.norms: list[Site] = []
        self._values: Sequence[Any] = ()  # of the inputs, during a capture
        self.memory = Memory()

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph of Dynamo's; see `confpred`."""
        self.capture = capture_of(gm, example_inputs, self._calls, self.options.limits, self.sites)
        with self.capture.compiling("PyTorch traces it"), self._measuring():
            compiled = self._compiled(gm, example_inputs)
            if self.options.verify == NETWORK and self.sites:
                compiled = self._against_pytorch(compiled, gm, example_inputs)
        return compiled

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Let guesses of the block be measured, once its device is known (`chooser`)."""
        calls, options = self._calls, self.options
        timed = isinstance(options.verify, int) and options.verify > 0  # measures by itself
        tune = 0.0 if timed else options.tune
        tuner = tuning.of_process(tune) if calls is None else calls.tuner or tuning.Tuner(tune)
        if calls is not None:
            calls.tuner = tuner
        self.capture.tuner = tuner
        former = choosing.measuring.set(None)
        try:
            yield
        finally:
            choosing.measuring.reset(former)

    def _against_pytorch(self, ours: Any, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Return what keeps the faster of `ours` and the same graph without confpred's choices."""
        capture, other = self.capture, Compiler(self.options, chooses=False)
        other.capture = replace(capture, passes=[], sites=other.sites, doing="", was_slow=True)

        def decided(is_ours: bool, why: str) -> None:
            capture.kept, capture.is_rejected = why, not is_ours
            log.info("verify='network': %s", why)
            if is_ours:
                return
            capture.passes = other.capture.passes
            for choice in (site.choice for site in self.sites if site.is_ours):
                if choice is not None:
                    choosing.announce(replace(choice, candidate=PYTORCH_OPERATOR))

        known: Any = torch._guards.TracingContext.get().fw_metadata
        inputs = known.input_info
        why = passes.foreign_operator(gm)
        if len(inputs) != len(example_inputs):  # AOTAutograd has put some together
            why = "inputs that it writes to share memory"
        if why:
            decided(True, verify.UNTIMED + why)
            return ours
        try:
            with other.capture.compiling("PyTorch traces it again"):
                others = other._compiled(gm, example_inputs)
        except Exception as error:
            passes.warn_of(error, "verify='network'", "confpred's choices are kept")
            return ours
        written = [place for place, x in enumerate(inputs) if x.mutates_data]
        rivals = verify.Rivals(ours, others, written, decided)
        rivals.confpred_capture = capture  # which lives as long
        return rivals

    def _compiled(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph of Dynamo's by AOTAutograd."""
        from torch._dynamo.backends.common import aot_autograd

        # PyTorch expects another layout of convolutions without cuDNN, and of empty ones.
        empty = any(isinstance(x, Tensor) and 0 in x.shape for x in example_inputs)
        if self.options.inductor is None:
            on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in example_inputs)
            self.inductor = on_gpu and inductor.is_available()
        self.inductor &= torch.backends.cudnn.enabled and not empty
        # Up to PyTorch 2.9 Dynamo gives its backend another mode than that of fake inputs, which
        # AOTAutograd refuses; only the former has an environment for the guards on shapes.
        context: Any = torch._guards.TracingContext.get()
        modes = [x.fake_mode for x in example_inputs if isinstance(x, FakeTensor)]
        former, context.fake_mode = context.fake_mode, (*modes, context.fake_mode)[0]
        self._values = example_inputs
        compile = aot_autograd(
            fw_compiler=self.forward,
            bw_compiler=self.backward,
            inference_compiler=self.inference,
            partition_fn=self.partition,
            keep_inference_input_mutations=True,
        )
        try:
            # A donated buffer, which a backward pass may write to, forbids `retain_graph`.
            with torch._functorch.config.patch(donated_buffer=False):
                return compile(gm, example_inputs)
        finally:
            self._values, context.fake_mode = (), former
            if not torch.backends.cudnn.enabled:
                # PyTorch remembers strides of fake results, and not that cuDNN was off.
                FakeTensorMode.cache_clear()

    def chooser(self, graph: fx.Graph) -> choosing.Choose | None:
        """Return what chooses for the device of `graph`; None where that is no GPU."""
        ordinal = ordinal_of(graph)
        if ordinal is None or not self._chooses:
            return None
        if self.capture.tuner is not None:
            choosing.measuring.set(self.capture.tuner.on(ordinal))
        return chooser(ordinal, self.options)

    def _inductors(self, graph: fx.Graph) -> Device | None:
        """Return the device that Inductor compiles `graph` for; None where it does not."""
        ordinal = ordinal_of(graph)
        return choosing.device_of(ordinal) if self.inductor and ordinal is not None else None

    def inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph without gradients."""
        passes.refuse_mixed_dtypes(gm.graph)
        steps: list[Step] = [passes.views_of_any_layout, passes.drop_copies]
        choose = self.chooser(gm.graph)
        if choose is not None:
            fuse = partial(fusing.fuse, inputs=self._values, device=self._inductors(gm.graph))
            steps += [layouts.to_channels_last, partial(self._replace, fuse, choose)]
            norms = self._norms(choose, (NORM,))
            steps += [layouts.keep_strides, *norms, *[passes.drop_copies] * bool(norms)]
        if self.inductor:
            gm, steps = self._decomposed(gm, inputs, steps), []
        self._attempt(gm, [*steps, passes.update_in_place])
        run = partial(self._run, inputs=inputs, kind="inference")
        known: Any = torch._guards.TracingContext.get().fw_metadata
        static = known.static_input_indices
        return passes.frozen(gm, static, run) if self.options.freeze else run(gm, static)

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Rewrite a graph of forward and backward, and cut it where autograd would.

        Only Inductor computes something again in the backward pass: without fused pointwise kernels
        that costs a pass over memory each.
        """
        from torch._functorch import partitioners

        passes.refuse_mixed_dtypes(joint.graph)
        steps: list[Step] = [passes.views_of_any_layout, passes.gradients_of_silu]
        choose = self.chooser(joint.graph)
        if choose is not None:
            convolutions = partial(training.serve_convolutions, compiled=self.inductor)
            serve = partial(self._replace, convolutions, choose)
            steps += [layouts.to_channels_last, serve, layouts.keep_strides]
            steps += self._norms(choose, (BATCH_NORM, NORM))
        if self.inductor:
            joint, steps = self._decomposed(joint, inputs, steps), []
        if self.inductor:
            return partitioners.min_cut_rematerialization_partition(
                joint, inputs, compiler="inductor", **options
            )
        self._attempt(joint, [*steps, passes.batch_norms_as_eager, passes.describe_tensors])
        return partitioners.default_partition(joint, inputs, **options)

    def forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile the forward pass of a graph with gradients."""
        known: Any = torch._guards.TracingContext.get().fw_metadata
        static, visible = known.static_input_indices, known.num_forward_returns
        known.bw_donated_idxs = []
        self._finish(gm, static)
        return self._run(gm, static, inputs, "forward", visible)

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile the backward pass, whose saved tensors stay where they are."""
        from torch._inductor.utils import count_tangents  # of all other inputs

        with self.capture.compiling("the backward pass is rewritten"):
            self._finish(gm, ())
            return self._run(gm, range(count_tangents(gm)), inputs, "backward")

    def _finish(self, gm: fx.GraphModule, parameters: Sequence[int]) -> None:
        """Rewrite a pass of a graph with gradients, after it was cut."""
        convert = partial(passes.convert_together, parameters)
        self._attempt(gm, [passes.drop_copies, convert, passes.update_in_place])

    def _attempt(self, gm: fx.GraphModule, steps: Sequence[Step]) -> None:
        """Rewrite `gm` by `steps`, all or none; the sites are those of what is left."""
        counts = [(kind, len(kind)) for kind in (self.sites, self.norms)]
        if not passes.attempt(gm, steps):
            for kind, count in counts:
                del kind[count:]

    def _replace(self, replace: Any, choose: choosing.Choose, graph: fx.Graph) -> None:
        """Let confpred compute the convolutions of `graph` by `replace`."""
        self.capture.doing = "confpred chooses, and compiles kernels"
        self.sites += replace(graph, choose, self.options.wishes)

    def _norms(self, choose: choosing.Choose, kinds: Sequence[Operation]) -> list[Step]:
        """Return the steps that let confpred compute norms of `kinds`; none where nothing is known
        of them."""
        names = [kind.name for kind in kinds if choosing.is_known(kind.name)]
        serve = partial(normalising.serve_norms, choose=choose, operations=names, found=self.norms)
        return [serve, layouts.keep_strides] if names else []

    def _decomposed(self, gm: fx.GraphModule, inputs: Any, steps: Sequence[Step]) -> fx.GraphModule:
        """Return `gm` after `steps`, in the operators that Inductor lowers unless that fails."""
        self._attempt(gm, [*steps, layouts.filters_to_channels_last])
        try:
            return inductor.decomposed(gm, inputs)
        except Exception as error:
            passes.warn_of(error, "decompositions", "Inductor does not compile")
            self.inductor = False
            return gm

    def _run(
        self, gm: fx.GraphModule, static: Sequence[int], inputs: Sequence[Any], kind: str,
        visible: int | None = None,
    ) -> Any:  # fmt: skip
        """Return a function that runs `gm`; the arguments are those of `Graphed`."""
        from torch._dynamo.backends.debugging import boxed_nop

        self.capture.ordinal = ordinal = ordinal_of(gm.graph)
        mutated = passes.written_inputs(gm.graph)
        plain: Any = None
        if self.inductor:
            self.capture.doing = f"Inductor compiles the {kind} pass"
            changed = _LazyGraphModule(gm, copy.deepcopy(gm.graph))  # Python does not compile it
            try:
                plain = inductor.compiled(changed, inputs, static, mutated, visible, kind)
            except Exception as error:
                passes.warn_of(error, "Inductor", f"a graph's {kind} pass is not compiled")
        done = Pass(kind, set(), "Inductor" if plain is not None else "PyTorch's operators")
        if plain is None:
            plain = boxed_nop(gm, [])
        self.capture.passes.append(done)
        run: Any = plain
        if not self.options.graphs or ordinal is None:
            done.reasons.add("without a GPU" if ordinal is None else "as graphs=False")
        else:
            memory = memory_of_inference(ordinal) if kind == "inference" else self.memory
            run = graphed(
                gm, plain, memory=memory, device=ordinal, static=static, written=mutated,
                visible=visible, kind=kind, reasons=done.reasons,
            )  # fmt: skip
        done.run = ref(run)
        run.confpred_capture = self.capture  # which lives as long
        return run


def chooser(ordinal: int, options: Options) -> choosing.Choose:
    """Return a function that chooses for CUDA device `ordinal`, and compiles in parallel."""

    def choose(problems: Sequence[Record]) -> Sequence[Choice | None]:
        convolutions = [problem for problem in problems if isinstance(problem, Problem)]
        top = options.verify
        if isinstance(top, int) and top and convolutions:
            with _disable_current_modes():  # AOTAutograd's fake tensors cannot be timed
                how = ordinal, top, options.wishes
                found: dict[Record, Choice | None] = {
                    p: verify.fastest(p, *how) for p in dict.fromkeys(convolutions)
                }
            rest = [problem for problem in problems if problem not in found]
            found |= zip(rest, choose(rest) if rest else (), strict=True)
            return [found[problem] for problem in problems]
        choices = choosing.choose_on(problems, ordinal, options.wishes)
        known = dict.fromkeys(choice for choice in choices if choice is not None)
        compile_ahead(list(known), ordinal, options.limits)
        return choices

    return choose


def ordinal_of(graph: fx.Graph) -> int | None:
    """Return the CUDA device of the tensors of `graph`; None where they are elsewhere."""
    for node in graph.nodes:
        val = passes.val_of(node)
        if isinstance(val, Tensor) and val.device.type == "cuda":
            return val.device.index or 0
    return None
