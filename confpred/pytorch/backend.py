"""``torch.compile(model, backend="confpred")``: PyTorch captures, confpred chooses.

    Dynamo --> AOTAutograd --> rewriting (all layers are chosen in one call) --> CUDA graph
              inference        fuse
              joint            lower_convolutions; then forward and backward are separate

Dynamo's guards check whether a captured graph is still valid. Parameters and buffers are inputs of
the graphs, so that writes to them take effect.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import _disable_current_modes

from confpred.errors import InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device
from confpred.problem.norm import BATCH_NORM
from confpred.problem.norm_of_groups import NORM
from confpred.problem.operation import Operation
from confpred.problem.record import Record
from confpred.pytorch.rewrite import fusing, inductor, layouts, normalising, passes
from confpred.pytorch.rewrite.passes import Step
from confpred.pytorch.rewrite.sites import Site
from confpred.pytorch.run import choosing, tuning, verify
from confpred.pytorch.run.graphs import (
    GraphMemory,
    make_replayable,
    memory_of_inference,
    why_no_graph,
)
from confpred.pytorch.run.loading import compile_ahead
from confpred.pytorch.run.memory import converting
from confpred.pytorch.run.options import NETWORK, Options
from confpred.pytorch.status import Calls, Capture, Pass, capture_of

log = logging.getLogger("confpred")


def confpred(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    calls: Calls | None = None,
) -> Any:
    """Compile a graph of Dynamo's; the backend that ``torch.compile`` finds by this name. `calls`
    is the history of a model's calls under `confpred.optimize`.

    Raises:
        InvalidInput: `options` are not of `Options`, or there is a mode: confpred has none.
    """
    if mode not in (None, "default"):
        raise InvalidInput("mode", mode, "None; options={'graphs': False} turns CUDA graphs off")
    compiler = Compiler(Options.of(options), calls)
    _guard_hooks()
    compiled = compiler.compile(gm, example_inputs)
    compiler.capture.end()
    log.info("%s", compiler.capture)
    return compiled


def _guard_hooks() -> None:
    """Let the guards of the present capture check for module hooks that are added later: by default
    Dynamo does not, and a hook would be ignored."""
    from torch._dynamo import callback, config

    if not config.skip_nnmodule_hook_guards:
        return

    def restore(*_: Any) -> None:
        config.skip_nnmodule_hook_guards = True
        callback.callback_handler.end_callbacks = [
            end for end in callback.callback_handler.end_callbacks if end is not restore
        ]

    callback.on_compile_end(restore)
    config.skip_nnmodule_hook_guards = False


@dataclass
class Lowered:
    """A pass as it is started, without the program that runs it.

    Attributes:
        kind, static, written, visible, dtypes: as of `confpred.pytorch.run.graphs.Graphed`.
        strides: of its inputs, as of `confpred.pytorch.rewrite.inductor.compile_pass`.
        ordinal: the CUDA device, or None.
        why: why it cannot become a CUDA graph, in words; None if it can.
        sites, norms, folds: of the graph; empty in a backward pass.
    """

    kind: str
    static: list[int]
    written: list[int]
    visible: int | None
    strides: dict[int, tuple[int, ...]]
    ordinal: int | None
    why: str | None
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    norms: list[Site] = field(default_factory=list)
    folds: list[fusing.Fold] = field(default_factory=list)


class Compiler:
    """The compilers that AOTAutograd calls with the graphs of a capture.

    `sites` has their convolutions and, in inference, batch norms; `norms` has the other norms.
    `folds` has the folds in float16 whose values are known, `inductor` says whether Inductor
    compiles, and `capture` is the record for `confpred.status`. Without `chooses`, PyTorch computes
    all layers.
    """

    capture: Capture

    def __init__(
        self, options: Options, calls: Calls | None = None, *, chooses: bool = True
    ) -> None:
        self.options, self._calls, self._chooses = options, calls, chooses
        self.inductor = bool(options.inductor)
        self.sites: list[Site] = []
        self.norms: list[Site] = []
        self.folds: list[fusing.Fold] = []
        self._keep: Callable[[Lowered, Any, Any], Any] | None = None  # for PyTorch's cache
        self._values: Sequence[Any] = ()  # of the inputs, during a capture
        self.memory = GraphMemory()

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph of Dynamo's; see `confpred`."""
        self.capture = capture_of(gm, example_inputs, self._calls, self.options.limits, self.sites)
        with self.capture.compiling("PyTorch traces it"), self._measuring():
            while True:  # each time with more answers
                with suppress(tuning.Measured):
                    compiled = self._compile(gm, example_inputs)
                    break
                self._begin()
            if self.options.verify == NETWORK and self.sites:
                compiled = self._race_pytorch(compiled, gm, example_inputs)
        return compiled

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Let guesses of the block be measured, once its device is known: `chooser` sets that."""
        calls, options = self._calls, self.options
        timed = isinstance(options.verify, int) and options.verify > 0  # measures by itself
        tune = 0.0 if timed else options.tune
        tuner = tuning.of_process(tune) if calls is None else calls.tuner or tuning.Tuner(tune)
        if calls is not None:
            calls.tuner = tuner
        self.capture.tuner = tuner
        token = choosing.measuring.set(None)
        try:
            yield
        finally:
            choosing.measuring.reset(token)

    def _race_pytorch(self, chosen: Any, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Return a function that keeps the faster of `chosen` and the same graph by PyTorch."""
        capture, other = self.capture, Compiler(self.options, chooses=False)
        other.capture = replace(capture, passes=[], sites=other.sites, doing="", was_slow=True)

        def note_decision(is_kept: bool, why: str) -> None:
            capture.kept, capture.is_rejected = why, not is_kept
            log.info("verify='network': %s", why)
            if is_kept:
                return
            capture.passes = other.capture.passes
            for site in (*self.sites, *self.norms):
                if site.choice is not None and site.is_lowered:
                    # A plan that was recorded must not find a kernel in the other layout, either.
                    for problem in site.by_layout.values() or (site.choice.problem,):
                        choice = replace(site.choice, problem=problem, candidate=PYTORCH_OPERATOR)
                        choosing.announce(choice)

        metadata: Any = torch._guards.TracingContext.get().fw_metadata
        inputs = metadata.input_info
        why = passes.find_foreign_operator(gm)
        if len(inputs) != len(example_inputs):  # AOTAutograd has put some together
            why = "inputs that it writes to share memory"
        if why:
            note_decision(True, verify.UNTIMED + why)
            return chosen
        try:
            with other.capture.compiling("PyTorch traces it again"):
                plain = other._compile(gm, example_inputs)
        except Exception as error:
            choosing.warn_of(error, "verify='network'", "confpred's choices are kept")
            return chosen
        written = [place for place, x in enumerate(inputs) if x.mutates_data]
        rivals = verify.Rivals(chosen, plain, written, note_decision)
        rivals.confpred_capture = capture  # keeps it alive as long
        return rivals

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
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
        compilers: dict[str, Any] = {
            "fw_compiler": self.forward, "bw_compiler": self.backward,
            "inference_compiler": self.inference,
        }  # fmt: skip
        caching: AbstractContextManager[None] = nullcontext()
        identity = self._identity(example_inputs)
        self.capture.tuner.begins_anew, self.capture.tuner.is_done = identity is not None, True
        if identity is not None:
            from confpred.pytorch import graph_cache  # imports Inductor

            self._keep = graph_cache.CachedPass.of
            compilers = {k: graph_cache.serializable(c) for k, c in compilers.items()}
            caching = graph_cache.caching(self, gm, identity)
        compile = aot_autograd(
            **compilers, partition_fn=self.partition, keep_inference_input_mutations=True
        )
        try:
            # A donated buffer, which a backward pass may write to, forbids `retain_graph`.
            with torch._functorch.config.patch(donated_buffer=False), caching:
                return compile(gm, example_inputs)
        finally:
            self._values, context.fake_mode = (), former
            if not torch.backends.cudnn.enabled:
                # PyTorch remembers strides of fake results, and not that cuDNN was off.
                FakeTensorMode.cache_clear()

    def _identity(self, inputs: Sequence[Any]) -> str | None:
        """Return what PyTorch's cache is to know of this graph; None where it cannot be kept."""
        if not self.inductor or torch.__version__ < "2.10":
            return None
        from confpred.pytorch import graph_cache

        is_training = self._calls is not None and self._calls.is_training
        return graph_cache.identity_of(self.options, inputs, is_training)

    def is_still_right(self, fold: fusing.Fold) -> bool:
        """Return whether the inputs of the graph show what `fold` says."""
        return fold.check(self._values) == fold

    def _begin(self) -> None:
        """Forget what was loaded of this graph, where PyTorch's cache had only a part of it."""
        if self._keep is not None:
            for of_graph in (self.sites, self.norms, self.folds, self.capture.passes):
                of_graph.clear()

    def chooser(self, graph: fx.Graph) -> choosing.Choose | None:
        """Return a function that chooses for the GPU of `graph`, and let guesses be measured there;
        None if it is on no GPU, or PyTorch computes all layers. Inductor's processes start, too."""
        ordinal = ordinal_of(graph)
        if self.inductor and ordinal is not None:
            inductor.start_workers()
        if ordinal is None or not self._chooses:
            return None
        choosing.measuring.set(self.capture.tuner.on(ordinal))
        return chooser(ordinal, self.options)

    def device_of(self, graph: fx.Graph) -> Device | None:
        """Return the device that `graph` runs on; None without a description."""
        ordinal = ordinal_of(graph)
        return None if ordinal is None else choosing.device_of(ordinal)

    def _inductor_device(self, graph: fx.Graph) -> Device | None:
        """Return the device that Inductor compiles `graph` for; None where it does not."""
        return self.device_of(graph) if self.inductor else None

    def _layout_step(self, graph: fx.Graph) -> Step:
        """Return the step that decides the layout of images and volumes."""
        device, constraints = self.device_of(graph), self.options.constraints
        return partial(layouts.to_channels_last, device=device, constraints=constraints)

    def inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph without gradients."""
        passes.refuse_mixed_dtypes(gm.graph)
        self._begin()
        steps: list[Step] = [passes.let_views_copy, passes.drop_round_trips, passes.drop_copies]
        choose = self.chooser(gm.graph)
        if choose is not None:
            fuse = partial(
                fusing.fuse, inputs=self._values, folds=self.folds,
                device=self._inductor_device(gm.graph),
            )  # fmt: skip
            steps += [self._layout_step(gm.graph), partial(self._replace, fuse, choose)]
            norms = self._norm_steps(choose, (NORM,))
            steps += [layouts.keep_strides, *norms, passes.drop_copies, layouts.lay_out_inputs]
        if self.inductor:
            gm, steps = self._decompose(gm, inputs, steps), []
        self._attempt(gm, [*steps, layouts.lay_out_group_norms, passes.update_in_place])
        run = partial(self._run, inputs=inputs, kind="inference")
        metadata: Any = torch._guards.TracingContext.get().fw_metadata
        static = metadata.static_input_indices
        return passes.freeze(gm, static, run) if self.options.freeze else run(gm, static)

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Rewrite a graph of forward and backward, and cut it where autograd would.

        Only Inductor recomputes values in the backward pass: without fused pointwise kernels each
        of them costs a pass over memory.
        """
        from torch._functorch import partitioners

        passes.refuse_mixed_dtypes(joint.graph)
        self._begin()
        steps: list[Step] = [passes.let_views_copy, passes.drop_round_trips]
        steps.append(passes.join_silu_gradients)
        choose = self.chooser(joint.graph)
        if choose is not None:
            convolutions = partial(fusing.lower_convolutions, compiled=self.inductor)
            lower = partial(self._replace, convolutions, choose)
            steps += [self._layout_step(joint.graph), lower, layouts.keep_strides]
            steps += [*self._norm_steps(choose, (BATCH_NORM, NORM)), layouts.lay_out_inputs]
        if self.inductor:
            joint, steps = self._decompose(joint, inputs, [*steps, normalising.recompute_norms]), []
        if self.inductor:
            passes.save_reads_of_written(joint.graph)
            return partitioners.min_cut_rematerialization_partition(
                joint, inputs, compiler="inductor", **options
            )
        steps += [layouts.lay_out_gradients, layouts.lay_out_group_norms]
        steps += [passes.restore_eager_batch_norms, passes.describe_tensors]
        self._attempt(joint, steps)
        return partitioners.default_partition(joint, inputs, **options)

    def forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile the forward pass of a graph with gradients."""
        metadata: Any = torch._guards.TracingContext.get().fw_metadata
        static, visible = metadata.static_input_indices, metadata.num_forward_returns
        metadata.bw_donated_idxs = []  # no donated buffers, as in `_compile`
        convert = partial(passes.convert_together, static)
        self._attempt(gm, [passes.drop_copies, convert, passes.update_in_place])
        return self._run(gm, static, inputs, "forward", visible)

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile the backward pass, whose saved tensors stay where they are."""
        from torch._inductor.utils import count_tangents  # counts all other inputs

        dtypes: dict[int, torch.dtype] = {}
        with self.capture.compiling("the backward pass is rewritten"):
            convert = partial(passes.leave_conversions, dtypes, self.inductor)
            if not self._attempt(gm, [passes.drop_copies, convert]):
                dtypes.clear()
            return self._run(gm, range(count_tangents(gm)), inputs, "backward", dtypes=dtypes)

    def _attempt(self, gm: fx.GraphModule, steps: Sequence[Step]) -> bool:
        """Rewrite `gm` by all `steps`, or return False; sites of a failed rewrite are removed."""
        counts = [(kind, len(kind)) for kind in (self.sites, self.norms)]
        if passes.attempt(gm, steps):
            return True
        for kind, count in counts:
            del kind[count:]
        self.capture.tuner.is_done = False
        return False

    def _replace(self, replace: Any, choose: choosing.Choose, graph: fx.Graph) -> None:
        """Let confpred compute layers of `graph`: `replace`, such as `fusing.fuse`, gets the graph,
        `choose` and the constraints, and returns their sites."""
        self.capture.doing = "confpred chooses, and compiles kernels"
        self.sites += replace(graph, choose, self.options.constraints)

    def _norm_steps(self, choose: choosing.Choose, kinds: Sequence[Operation]) -> list[Step]:
        """Return the steps that lower norms of `kinds`; empty where there is no model of them."""
        names = [kind.name for kind in kinds if choosing.is_known(kind.name)]
        lower = partial(normalising.lower_norms, choose=choose, operations=names, layers=self.norms)
        return [lower, layouts.keep_strides] if names else []

    def _decompose(self, gm: fx.GraphModule, inputs: Any, steps: Sequence[Step]) -> fx.GraphModule:
        """Return `gm` after `steps` and, unless that fails, in the operators that Inductor lowers.
        Where it fails, Inductor compiles no pass of this capture."""
        self._attempt(gm, [*steps, layouts.filters_to_channels_last])
        try:
            return inductor.decompose(gm, inputs)
        except Exception as error:
            choosing.warn_of(error, "decompositions", "Inductor does not compile")
            self.inductor = False
            return gm

    def _run(
        self, gm: fx.GraphModule, static: Sequence[int], inputs: Sequence[Any], kind: str,
        visible: int | None = None, dtypes: dict[int, torch.dtype] | None = None,
    ) -> Any:  # fmt: skip
        """Return a function that runs `gm`, of which `inputs` are fake or example inputs; the other
        arguments are those of `Graphed`."""
        from torch._dynamo.backends.debugging import boxed_nop

        ordinal, written = ordinal_of(gm.graph), passes.written_inputs(gm.graph)
        program: Any = None
        strides: dict[int, tuple[int, ...]] = {}
        if self.inductor:
            self.capture.doing = f"Inductor compiles the {kind} pass"
            # Inductor changes its graph. Python does not compile a lazy module.
            changed = _LazyGraphModule(gm, copy.deepcopy(gm.graph))
            try:
                program, strides = inductor.compile_pass(changed, inputs, static, visible, kind)
            except Exception as error:
                choosing.warn_of(error, "Inductor", f"a graph's {kind} pass is not compiled")
        replays = self.options.graphs and ordinal is not None
        lowered = Lowered(
            kind, list(static), written, visible, strides, ordinal,
            (passes.why_not_copied(gm.graph, static) or why_no_graph(gm, static, written))
            if replays else None, dtypes or {},
        )  # fmt: skip
        if kind != "backward":
            lowered.sites, lowered.norms = list(self.sites), list(self.norms)
            lowered.folds = list(self.folds)
        run = self.start(lowered, program, boxed_nop(gm, []) if program is None else None)
        is_done = self.capture.tuner.is_done
        return run if self._keep is None else self._keep(lowered, program if is_done else None, run)

    def start(self, lowered: Lowered, program: Any, plain: Any = None) -> Any:
        """Return a function that runs a pass: the `program` that Inductor made, else `plain`."""
        kind, ordinal = lowered.kind, lowered.ordinal
        self.capture.ordinal = ordinal
        record = Pass(kind, set(), "Inductor" if program is not None else "PyTorch's operators")
        self.capture.passes.append(record)
        run: Any = plain
        if program is not None:
            run = inductor.accept_any_layout(program, lowered.strides, lowered.written)
        if not self.options.graphs or ordinal is None:
            record.reasons.add("without a GPU" if ordinal is None else "as graphs=False")
            run = converting(run, lowered.dtypes)
        else:
            memory = memory_of_inference(ordinal) if kind == "inference" else self.memory
            run = make_replayable(
                lowered.why, run, memory=memory, device=ordinal, static=lowered.static,
                written=lowered.written, visible=lowered.visible, kind=kind, reasons=record.reasons,
                dtypes=lowered.dtypes,
            )  # fmt: skip
        record.run = ref(run)
        run.confpred_capture = self.capture  # keeps it alive as long
        return run

    def resume(self, lowered: Lowered, program: Any) -> Any:
        """Return a function that runs a pass of PyTorch's cache, whose layers are as they were."""
        self.sites += lowered.sites
        self.norms += lowered.norms
        layers = (*lowered.sites, *lowered.norms)
        choices = list(dict.fromkeys(layer.choice for layer in layers if layer.choice is not None))
        choosing.announce(*choices)
        if lowered.ordinal is not None:
            self.capture.tuner.note_kept(choices)
            choosing.check_clock(lowered.ordinal, choices)
            self.capture.doing = "confpred loads kernels"
            compile_ahead(choices, lowered.ordinal, self.options.limits)
        return self.start(lowered, program)


def chooser(ordinal: int, options: Options) -> choosing.Choose:
    """Return a function that chooses for CUDA device `ordinal`, and compiles in parallel."""

    def choose(problems: Sequence[Record]) -> Sequence[Choice | None]:
        convolutions = [problem for problem in problems if isinstance(problem, Problem)]
        top = options.verify
        if isinstance(top, int) and top and convolutions:
            with _disable_current_modes():  # AOTAutograd's fake tensors cannot be timed
                how = ordinal, top, options.constraints
                by_problem: dict[Record, Choice | None] = {
                    p: verify.find_best(p, *how) for p in dict.fromkeys(convolutions)
                }
            others = [problem for problem in problems if problem not in by_problem]
            by_problem |= zip(others, choose(others) if others else (), strict=True)
            return [by_problem[problem] for problem in problems]
        choices = choosing.choose_on(problems, ordinal, options.constraints)
        as_loaded = compile_ahead(list(filter(None, choices)), ordinal, options.limits)
        choosing.announce(*set(as_loaded.values()).difference(as_loaded))
        return [choice and as_loaded[choice] for choice in choices]

    return choose


def ordinal_of(graph: fx.Graph) -> int | None:
    """Return the CUDA device of the tensors of `graph`; None where they are elsewhere."""
    vals = map(passes.val_of, graph.nodes)
    devices = (val.device for val in vals if isinstance(val, Tensor))
    return next((device.index or 0 for device in devices if device.type == "cuda"), None)
