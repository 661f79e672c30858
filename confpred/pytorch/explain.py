"""`explain`: what a network's step becomes on a device, from a capture on fake tensors."""

from __future__ import annotations

import io
import operator
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from confpred.cuda.epilogue import left_to_pytorch
from confpred.errors import ConfpredError, InvalidInput
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.predict.choice import Choice
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.pytorch import choosing
from confpred.pytorch.backend import Compiler, Options
from confpred.pytorch.network import as_arguments, own_frame
from confpred.pytorch.rewrite import Choose, Site, is_view

aten = torch.ops.aten
#: A kernel that is bound by memory takes at least this long, and reaches this share of the
#: bandwidth; a matrix product this share of the tensor cores' rate.
_FLOOR_S, _BANDWIDTH_SHARE, _TENSOR_SHARE = 2e-6, 0.8, 0.6
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_FREE = {operator.getitem, aten.view.default, aten._unsafe_view.default, aten.t.default}
_CONVOLUTIONS = {
    aten.convolution.default, aten.convolution_backward.default,
    torch.ops.confpred.conv2d.default, torch.ops.confpred.conv2d_backward.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """Layers of one kind in one direction.

    Attributes:
        layers: names of the modules.
        direction: ``fprop``, ``dgrad`` or ``wgrad``; ``norm`` for a norm that follows no layer.
        problem: of one layer; None where confpred has no kernels for it.
        fused: operators that are computed with it.
        provider: the kernel family that runs, or ``pytorch``.
        config: the family's config; empty for PyTorch's operator.
        expected_ms: expected time of one layer, milliseconds; None if nothing predicts it.
        pytorch_ms: the same by PyTorch's operators.
        reason: ``predicted``, ``measured`` or ``pinned``, or why PyTorch's operator runs.
    """

    layers: tuple[str, ...]
    direction: str
    problem: Problem | None
    fused: tuple[str, ...]
    provider: str
    config: dict[str, int]
    expected_ms: float | None
    pytorch_ms: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the network, before and after confpred.

    Attributes:
        parts: graphs that Dynamo captured; 1 where the forward is captured whole.
        launches_before, launches_after: kernels of a step.
        fused: how many operators became part of another one.
        ms_before, ms_after: expected GPU time, milliseconds: convolutions by the model, other
            operators by the bytes that they move, which is rough.
        convolution_share: of `ms_before`.
        unpredicted: convolutions that no model predicts: an estimate by their bytes and operations
            is in both times.
    """

    parts: int
    launches_before: int
    launches_after: int
    fused: int
    ms_before: float
    ms_after: float
    convolution_share: float
    unpredicted: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Answer of `explain`; `str` of it is a table of at most 120 columns.

    Attributes:
        device: key of the device that was asked about.
        step: the whole step.
        rows: one a kind of layer, in the order of the network.
    """

    device: str
    step: Step
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON's types."""
        rows = [
            asdict(replace(row, problem=None))
            | {"problem": None if row.problem is None else row.problem.to_json()}
            for row in self.rows
        ]
        return {"device": self.device, "step": asdict(self.step), "rows": rows}

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        s = self.step
        gain = f", {s.ms_before / s.ms_after:.2f}x" if s.ms_after else ""
        missing = f"; {s.unpredicted} of them are estimates" if s.unpredicted else ""
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        widths = {
            "": 4,
            "layer": 24,
            "input": 15,
            "computes": 36,
            "runs": 14,
            "ms": 7,
            "PyTorch": 7,
        }
        for head, width in widths.items():
            right = head in ("", "ms", "PyTorch")
            table.add_column(
                head, justify="right" if right else "left", overflow="ellipsis", no_wrap=True,
                width=width,
            )  # fmt: skip
        table.add_column("why", overflow="ellipsis", no_wrap=True, width=13)
        for row in self.rows:
            times = ["" if t is None else f"{t:.4f}" for t in (row.expected_ms, row.pytorch_ms)]
            computes = " + ".join((*_geometry(row), *row.fused))
            image = "" if row.problem is None else _image(row.problem)
            table.add_row(
                f"{len(row.layers)} x", row.layers[0], image, computes, row.provider, *times,
                row.reason.partition(",")[0],
            )  # fmt: skip
        out = io.StringIO()
        console = Console(file=out, width=120, color_system=None)
        console.print(
            f"One step on {self.device}, captured in {s.parts} part{'s' * (s.parts != 1)}: "
            f"{s.launches_before} launches become {s.launches_after}, {s.fused} operators fused;"
            f" expected GPU time {s.ms_before:.3f} -> {s.ms_after:.3f} ms{gain}, of which"
            f" convolutions are {s.convolution_share:.0%} before{missing}.",
            highlight=False,
        )
        console.print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def explain(
    model: nn.Module,
    example_inputs: Any,
    device: str | Device = "h100",
    *,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Say what a step of `model` becomes on `device` after `confpred.optimize`; needs no GPU.

    The network is captured as `optimize` captures it, on tensors without values. Which plans cuDNN
    has for a layer is known on the GPU alone: where it lacks the one that is named here, the next
    one in the ranking runs.

    Args:
        model: the network; it is not changed, nothing is computed.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dictionary of
            arguments by name; only shapes, dtypes and layouts matter.
        device: name of a GPU, such as ``"h100"``.
        training: whether a training step is asked about, with its gradients.
        dtype: as if the network ran in this dtype, in training under autocast to it; None: as
            model and inputs are.

    Raises:
        InvalidInput: `model` is not a ``torch.nn.Module``, `example_inputs` are no arguments, or
            `dtype` is not a ``torch.dtype``.
        UnknownDevice: no description of `device` is known.
        ConfpredError: the forward cannot be captured, for example as it depends on values.
    """
    known = get_device(device)
    recorder = capture(model, example_inputs, known, training=training, dtype=dtype)
    rows = _rows(recorder.all_sites, known)
    return Explanation(known.key, _step(recorder, known, rows), tuple(rows))


class Recorder(Compiler):
    """Rewrites the graphs of a capture for `device`, and runs nothing of confpred's.

    Attributes:
        before, after: operators of all graphs, by what they call and the bytes that they move.
        parts: graphs that Dynamo captured.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(Options(graphs=False))
        self._device = device
        self.all_sites: list[Site] = []
        self.before: list[fx.Node] = []
        self.after: list[fx.Node] = []
        self.parts = 0

    def chooser(self, graph: fx.Graph) -> Choose | None:
        """Return a function that chooses for the device, without compiling anything."""

        def choose(problems: Sequence[Problem]) -> Sequence[Choice | None]:
            return choosing.choose_many(problems, self._device)

        return choose

    def inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.parts += 1
        self.before += _launching(deepcopy(gm.graph))
        run = super().inference(gm, inputs)
        self.all_sites += self.sites
        self.after += _launching(gm.graph)
        return run

    def partition(self, joint: fx.GraphModule, inputs: Any, **told: Any) -> Any:
        self.parts += 1
        self.before += _launching(deepcopy(joint.graph))
        cut = super().partition(joint, inputs, **told)
        self.all_sites += self.sites
        return cut

    def _run(self, gm: fx.GraphModule, *more: Any) -> Any:
        if more[-1] != "inference":
            self.after += _launching(gm.graph)
        return super()._run(gm, *more)


def capture(
    model: nn.Module,
    example_inputs: Any,
    device: Device,
    *,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> Recorder:
    """Capture `model` on fake tensors, and rewrite its graphs for `device`.

    Raises:
        InvalidInput, ConfpredError: see `explain`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidInput("dtype", dtype, "a torch.dtype, or None")
    args, kwargs = as_arguments(example_inputs)
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder(device)
    cast = None if training else dtype

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return aot_autograd(
            fw_compiler=recorder.forward, bw_compiler=recorder.backward,
            inference_compiler=recorder.inference, partition_fn=recorder.partition,
            keep_inference_input_mutations=True,
        )(gm, inputs)  # fmt: skip

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        kind = cast if cast is not None and x.is_floating_point() else x.dtype
        with mode:
            # On the CPU, whatever the tensors are on: a PyTorch without CUDA has no other.
            made = torch.empty_strided(x.shape, x.stride(), dtype=kind, device="cpu")
            same = made.requires_grad_(x.requires_grad) if x.is_floating_point() else made
            return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else same

    try:
        tensors = (*model.parameters(), *model.buffers())
        copy = deepcopy(model, {id(t): fake(t) for t in tensors}).train(training)
        args, kwargs = _pytree.tree_map(fake, (args, kwargs))

        low = training and dtype is not None
        autocast = torch.autocast("cpu", dtype) if low else nullcontext()
        with mode, autocast, torch.set_grad_enabled(training):
            out = torch.compile(own_frame(copy), backend=backend)(*args, **kwargs)
            if training:
                leaves = [t for t in _pytree.tree_leaves(out) if isinstance(t, Tensor)]
                heads = [t for t in leaves if t.requires_grad]
                torch.autograd.backward(heads, [torch.empty_like(t) for t in heads])
    except Exception as error:  # whatever a forward may raise
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfpredError(f"{type(model).__name__} cannot be captured: {why}") from error
    return recorder


def problems_of(recorder: Recorder) -> list[Problem]:
    """Return the problems of a capture, in the order of the network."""
    return [site.problem for site in recorder.all_sites if site.problem is not None]


def _rows(sites: Iterable[Site], device: Device) -> list[Row]:
    """Return one row a kind of layer."""
    kinds: dict[Any, list[Site]] = {}
    for site in sites:
        key = (site.direction, site.problem, site.fused, site.why)
        kinds.setdefault(key, []).append(site)
    rows = []
    for (direction, problem, fused, why), group in kinds.items():
        choice, theirs = group[0].choice, None
        if problem is not None:
            theirs = choosing.pytorch_ms(problem, device)
        reason = why or "no model" if choice is None else choosing.why_pytorch(choice)
        names = tuple(readable(site.name) or "-" for site in group)
        if choice is not None and reason is None:
            rows.append(
                Row(
                    names,
                    direction,
                    problem,
                    fused,
                    choice.provider,
                    dict(choice.config or {}),
                    choice.predicted_ms,
                    theirs,
                    choice.source,
                )
            )
        else:
            own = PYTORCH_OPERATOR.provider
            plain = "one kernel" if direction == "norm" else reason or "predicted slower"
            rows.append(Row(names, direction, problem, fused, own, {}, theirs, theirs, plain))
    return rows


def readable(name: str) -> str:
    """Return a module's name as ``named_modules`` has it, from the way that Dynamo writes it."""
    text = re.sub(r"^[A-Z]\[[^]]*\]\.?(_modules)?", "", name)
    text = re.sub(r"\._modules", "", text)
    text = re.sub(r"\['([^']*)'\]|\[(\d+)\]", lambda m: "." + (m[1] or m[2]), text)
    return re.sub(r"^(copy|model)\.", "", text.strip("."))


def _step(recorder: Recorder, device: Device, rows: Sequence[Row]) -> Step:
    before = sum(_other_s(n, device) for n in recorder.before if n.target not in _CONVOLUTIONS)
    after = sum(_other_s(n, device) for n in recorder.after if n.target not in _CONVOLUTIONS)
    convolutions, ours, unpredicted = 0.0, 0.0, 0
    for row in rows:
        if row.direction == "norm":
            continue
        if row.expected_ms is None or row.pytorch_ms is None:
            unpredicted += len(row.layers)
            if row.problem is not None:
                guess = _estimate_s(row.problem, device) * len(row.layers)
                convolutions, ours = convolutions + guess, ours + guess
            continue
        bare = row.pytorch_ms
        if row.problem is not None and row.problem.has_epilogue:  # other operators, before
            bare = choosing.pytorch_ms(left_to_pytorch(row.problem), device) or bare
        convolutions += 1e-3 * bare * len(row.layers)
        ours += 1e-3 * row.expected_ms * len(row.layers)
    total = before + convolutions
    fused = sum(len(row.fused) * len(row.layers) for row in rows)
    return Step(
        recorder.parts, len(recorder.before), len(recorder.after), fused, 1e3 * total,
        1e3 * (after + ours), convolutions / total if total else 0.0, unpredicted,
    )  # fmt: skip


def _launching(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that launch a kernel."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target not in _FREE and not is_view(node)
    ]


def _other_s(node: fx.Node, device: Device) -> float:
    """Return the seconds that an operator is expected to take which is no convolution."""
    tensors = [t for n in (node, *node.all_input_nodes) for t in _tensors(n.meta.get("val"))]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    seconds = float(moved) / (_BANDWIDTH_SHARE * device.dram_bytes_per_s)
    if node.target in _PRODUCTS:
        out, left = _tensors(node.meta.get("val"))[0], node.all_input_nodes[-2].meta["val"]
        flops = 2.0 * out.numel() * left.shape[-1]
        seconds = max(seconds, flops / (_TENSOR_SHARE * device.tensor_flops))
    return max(_FLOOR_S, seconds)


def _estimate_s(p: Problem, device: Device) -> float:
    """Return the seconds of a convolution that no model predicts, bare."""
    moved = p.itemsize * (p.input_elements + p.output_elements)
    flops = 2.0 * p.output_elements * p.group_width * p.r * p.s
    return max(
        _FLOOR_S,
        moved / (_BANDWIDTH_SHARE * device.dram_bytes_per_s),
        flops / (_TENSOR_SHARE * device.tensor_flops),
    )


def _image(p: Problem) -> str:
    return f"{p.n}x{p.c}x{p.h}x{p.w}"


def _geometry(row: Row) -> tuple[str, ...]:
    """Return what a row computes, in few words; nothing for a norm, which `fused` names."""
    p = row.problem
    if p is None:
        return () if row.direction == "norm" else (row.direction,)
    kind = "depthwise " if p.group_width == 1 and p.groups > 1 else ""
    kind = kind or (f"groups={p.groups} " if p.groups > 1 else "")
    stride = f"/{p.stride[0]}" if p.stride != (1, 1) else ""
    return (f"{p.direction} {kind}{p.r}x{p.s}{stride} -> {p.k}",)


def _tensors(val: Any) -> list[Tensor]:
    values = val if isinstance(val, (tuple, list)) else (val,)
    return [t for t in values if isinstance(t, Tensor)]
