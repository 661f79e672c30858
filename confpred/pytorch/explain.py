"""`explain`: what a network's step becomes on a device, from a capture on fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from confpred.cuda.epilogue import left_to_pytorch
from confpred.errors import ConfpredError, InvalidInput
from confpred.families.protocol import PYTORCH
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.pytorch.backend import Compiler, Options
from confpred.pytorch.network import as_arguments, own_frame
from confpred.pytorch.rewrite.passes import is_view, val_of
from confpred.pytorch.rewrite.sites import Site
from confpred.pytorch.run import choosing

aten = torch.ops.aten
#: A kernel that is bound by memory takes at least this long, and reaches this share of the
#: bandwidth; a matrix product this share of the tensor cores' rate.
_FLOOR_S, _BANDWIDTH_SHARE, _TENSOR_SHARE = 2e-6, 0.8, 0.6
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_FREE = {operator.getitem, aten._unsafe_view.default}  # of launches, as views are
_CONVOLUTIONS = {
    aten.convolution.default, aten.convolution_backward.default,
    torch.ops.confpred.conv2d.default, torch.ops.confpred.conv2d_backward.default,
}  # fmt: skip
#: Heading and width of the table's columns; numbers are at the right.
_COLUMNS = {
    "": 4, "layer": 24, "input": 15, "computes": 36, "runs": 14, "ms": 7, "PyTorch": 7, "why": 13,
}  # fmt: skip
_NUMBERS = ("", "ms", "PyTorch")


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

    def cells(self) -> tuple[str, ...]:
        """Return a text for each column of the table."""
        p, image = self.problem, ""
        computed = [] if self.direction == "norm" else [self.direction]
        if p is not None:
            image = f"{p.n}x{p.c}x{p.h}x{p.w}"
            groups = "" if p.groups == 1 else f"groups={p.groups} "
            groups = "depthwise " if groups and p.group_width == 1 else groups
            stride = f"/{p.stride[0]}" if p.stride != (1, 1) else ""
            computed = [f"{p.direction} {groups}{p.r}x{p.s}{stride} -> {p.k}"]
        times = ("" if t is None else f"{t:.4f}" for t in (self.expected_ms, self.pytorch_ms))
        return (
            f"{len(self.layers)} x", self.layers[0], image, " + ".join((*computed, *self.fused)),
            self.provider, *times, self.reason.partition(",")[0],
        )  # fmt: skip


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
    """Answer of `explain`, with a row a kind of layer; `str` of it is a table of at most 120
    columns."""

    device: str
    step: Step
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON's types."""
        return asdict(self)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        s = self.step
        gain = f", {s.ms_before / s.ms_after:.2f}x" if s.ms_after else ""
        missing = f"; {s.unpredicted} of them are estimates" if s.unpredicted else ""
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for head, width in _COLUMNS.items():
            table.add_column(
                head, justify="right" if head in _NUMBERS else "left", overflow="ellipsis",
                no_wrap=True, width=width,
            )  # fmt: skip
        for row in self.rows:
            table.add_row(*row.cells())
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(
                f"One step on {self.device}, captured in {s.parts} part{'s' * (s.parts != 1)}: "
                f"{s.launches_before} launches become {s.launches_after}, {s.fused} operators"
                f" fused; expected GPU time {s.ms_before:.3f} -> {s.ms_after:.3f} ms{gain}, of"
                f" which convolutions are {s.convolution_share:.0%} before{missing}."
            )
            console.print(table)
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


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
        model: the network; it is neither run nor changed.
        example_inputs: as of `confpred.optimize`; only shapes, dtypes and layouts matter.
        device: name of a GPU, such as ``"h100"``.
        training: with the gradients.
        dtype: that the network is to run in, in training by autocast; None: as it is.

    Raises:
        InvalidInput: `model`, `example_inputs` or `dtype` is something else.
        UnknownDevice: no description of `device` is known.
        ConfpredError: the forward cannot be captured, for example as it depends on values.
    """
    known = get_device(device)
    return capture(model, example_inputs, known, training=training, dtype=dtype).explanation()


class Recorder(Compiler):
    """Rewrites the graphs of a capture for `device`; compiles and runs nothing of confpred's."""

    def __init__(self, device: Device) -> None:
        super().__init__(Options(inductor=False, graphs=False))
        self._device, self._parts = device, 0
        # Before and after graphs are rewritten: kernels, and seconds of those without convolutions.
        self._launches, self._other_s = [0, 0], [0.0, 0.0]

    def chooser(self, graph: fx.Graph) -> choosing.Choose | None:
        self._count(graph, 0)  # it is asked for before a graph is rewritten
        return lambda problems: choosing.choose_many(problems, self._device)

    def _run(self, gm: fx.GraphModule, *more: Any, **options: Any) -> Any:
        run = super()._run(gm, *more, **options)
        self._count(gm.graph, 1)
        return run

    def _count(self, graph: fx.Graph, when: int) -> None:
        self._parts += when == 0
        launching = [
            node for node in graph.nodes
            if node.op == "call_function" and node.target not in _FREE and not is_view(node)
        ]  # fmt: skip
        self._launches[when] += len(launching)
        others = [node for node in launching if node.target not in _CONVOLUTIONS]
        self._other_s[when] += sum(_node_s(node, self._device) for node in others)

    def explanation(self) -> Explanation:
        """Return what was captured, in rows and as a whole."""
        kinds: dict[Any, list[Site]] = {}
        for site in self.sites:
            kinds.setdefault((site.direction, site.problem, site.fused, site.why), []).append(site)
        rows = [_row(group, self._device) for group in kinds.values()]
        convolutions = [row for row in rows if row.direction != "norm"]
        times = [(len(row.layers), *_seconds(row, self._device)) for row in convolutions]
        before_s = sum(count * before for count, before, _ in times)
        after_s = self._other_s[1] + sum(count * after for count, _, after in times)
        total_s = self._other_s[0] + before_s
        unknown = [r for r in convolutions if r.expected_ms is None or r.pytorch_ms is None]
        step = Step(
            self._parts, self._launches[0], self._launches[1],
            fused=sum(len(row.fused) * len(row.layers) for row in rows),
            ms_before=1e3 * total_s, ms_after=1e3 * after_s,
            convolution_share=before_s / total_s if total_s else 0.0,
            unpredicted=sum(len(row.layers) for row in unknown),
        )  # fmt: skip
        return Explanation(self._device.key, step, tuple(rows))


def capture(
    model: nn.Module, example_inputs: Any, device: Device, *, training: bool = False,
    dtype: torch.dtype | None = None,
) -> Recorder:  # fmt: skip
    """Capture `model` on fake tensors, and rewrite its graphs for `device`; see `explain`."""
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidInput("dtype", dtype, "a torch.dtype, or None")
    args, kwargs = as_arguments(example_inputs)
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder(device)
    cast = None if training else dtype

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        kind = cast if cast is not None and x.is_floating_point() else x.dtype
        with mode:
            # On the CPU, whatever the tensors are on: a PyTorch without CUDA has no other.
            made = torch.empty_strided(x.shape, x.stride(), dtype=kind, device="cpu")
            if isinstance(x, nn.Parameter):
                return nn.Parameter(made, x.requires_grad)
            return made.requires_grad_(x.requires_grad)

    try:
        tensors = (*model.parameters(), *model.buffers())
        copy = deepcopy(model, {id(t): fake(t) for t in tensors}).train(training)
        args, kwargs = _pytree.tree_map(fake, (args, kwargs))
        low = training and dtype is not None
        autocast = torch.autocast("cpu", dtype) if low else nullcontext()
        with mode, autocast, torch.set_grad_enabled(training):
            out = torch.compile(own_frame(copy), backend=recorder.compile)(*args, **kwargs)
            if training:
                leaves = [t for t in _pytree.tree_leaves(out) if isinstance(t, Tensor)]
                heads = [t for t in leaves if t.requires_grad]
                torch.autograd.backward(heads, [torch.empty_like(t) for t in heads])
    except Exception as error:  # whatever a forward may raise
        name = type(model).__name__
        raise ConfpredError(f"{name} cannot be captured: {_reason(error)}") from error
    return recorder


def _reason(error: BaseException) -> str:
    """Return the first line of the error that Dynamo, or its backend, has wrapped; its type where
    it has no text."""
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return " ".join(lines[: 1 + lines[0].endswith(":")]) or type(error).__name__


def _row(group: Sequence[Site], device: Device) -> Row:
    """Return the row of layers of one kind."""
    site, names = group[0], tuple(site.name or "-" for site in group)
    choice = site.choice
    pytorch_ms = None if choice is None else choice.pytorch_ms
    if pytorch_ms is None and site.problem is not None:
        pytorch_ms = choosing.pytorch_ms(site.problem, device)
    problem: Any = site.problem
    first = (names, site.direction, problem, site.fused)
    if choice is not None and site.is_ours:
        config, ms = dict(choice.config or {}), choice.predicted_ms
        return Row(*first, choice.provider, config, ms, pytorch_ms, choice.source)
    reason = site.why or ("no model" if choice is None else choosing.why_pytorch(choice))
    reason = "one kernel" if site.direction == "norm" else str(reason)
    return Row(*first, PYTORCH, {}, pytorch_ms, pytorch_ms, reason)


def _seconds(row: Row, device: Device) -> tuple[float, float]:
    """Return the seconds of one layer's convolution by PyTorch, and of what runs."""
    p = row.problem
    if p is None:
        return 0.0, 0.0
    if row.expected_ms is None or row.pytorch_ms is None:
        moved = p.itemsize * (p.input_elements + p.output_elements)
        return (_bound_s(moved, p.flops, device),) * 2
    # Before, other operators compute all that follows the convolution.
    bare = choosing.pytorch_ms(left_to_pytorch(p), device) if p.has_epilogue else None
    return 1e-3 * (bare or row.pytorch_ms), 1e-3 * row.expected_ms


def _node_s(node: fx.Node, device: Device) -> float:
    """Return the seconds that an operator is expected to take which is no convolution."""
    leaves = _pytree.tree_leaves([val_of(n) for n in (node, *node.all_input_nodes)])
    tensors, flops = [t for t in leaves if isinstance(t, Tensor)], 0.0
    if node.target in _PRODUCTS:
        flops = 2.0 * tensors[0].numel() * val_of(node.all_input_nodes[-2]).shape[-1]
    return _bound_s(sum(t.numel() * t.element_size() for t in tensors), flops, device)


def _bound_s(moved: float, flops: float, device: Device) -> float:
    """Return the seconds of a kernel that moves so many bytes and computes so many operations."""
    return max(
        _FLOOR_S,
        float(moved) / (_BANDWIDTH_SHARE * device.dram_bytes_per_s),
        float(flops) / (_TENSOR_SHARE * device.tensor_flops),
    )
