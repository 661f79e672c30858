"""`explain`: predicts a network's step on a device, from a capture on fake tensors."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from confpred.cuda import driver
from confpred.cuda.epilogue import left_to_pytorch
from confpred.cudnn.plans import lacks_library
from confpred.errors import ConfpredError, InvalidInput, install_command
from confpred.families.protocol import PYTORCH
from confpred.problem.conv import ConvNd
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.problem.norm import DIRECTIONS
from confpred.problem.record import Record
from confpred.pytorch.backend import Compiler
from confpred.pytorch.network import as_arguments, own_frame
from confpred.pytorch.rewrite.passes import is_view, val_of
from confpred.pytorch.rewrite.sites import (
    CONVOLUTION,
    Site,
    arguments_of,
    convolution_s,
    directions_of,
    is_convolution,
    name_of,
    node_s,
)
from confpred.pytorch.rewrite.sites import CONVOLUTION_BACKWARD as BACKWARD
from confpred.pytorch.run import choosing
from confpred.pytorch.run.options import Options
from confpred.pytorch.status import status

aten = torch.ops.aten
_FREE = {operator.getitem, aten._unsafe_view.default}  # of launches, as views are
_CONVOLUTIONS = {
    aten.convolution.default, aten.convolution_backward.default,
    torch.ops.confpred.conv2d.default, torch.ops.confpred.conv2d_backward.default,
}  # fmt: skip
#: Headings of the table's columns, those of numbers, and those whose words may be on several lines.
_COLUMNS = ("", "layer", "input", "computes", "runs", "ms", "PyTorch", "why")
_NUMBERS, _WRAPPED = ("", "ms", "PyTorch"), ("layer", "computes", "why")
#: Operators that stand for others.
_NORMS = ("confpred.batch_norm", "confpred.norm")
_INSTEAD = ("confpred.conv2d", "confpred.scale_shift", *_NORMS)
#: A gain below this is called poor, and compared with half precision, channels last.
_POOR = 1.1
_HALF = (torch.float16, torch.bfloat16)
#: Errors of a forward that depends on values.
_OF_VALUES = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


@dataclass(frozen=True, slots=True)
class Row:
    """Layers of one kind in one direction, or calls of one operator.

    Attributes:
        layers: names of the modules.
        direction: ``fprop``, ``dgrad`` or ``wgrad``; of a norm ``forward``, ``backward`` or, where
            it is folded, ``norm``; the name of another operator.
        problem: of one layer; None where confpred has no kernels for it.
        fused: operators that are fused into it.
        provider: the kernel family that runs, or ``pytorch``.
        config: the family's config; empty for PyTorch's operator.
        expected_ms: expected time of one layer, milliseconds; None if no model predicts it.
        pytorch_ms: the same by PyTorch's operators.
        reason: source of the choice, such as ``predicted``, or why PyTorch's operator runs.
        sizes: of the input; empty for other operators.
        is_estimate: whether the times are estimates by bytes and operations, without a model.
    """

    layers: tuple[str, ...]
    direction: str
    problem: Record | None
    fused: tuple[str, ...]
    provider: str
    config: dict[str, int]
    expected_ms: float | None
    pytorch_ms: float | None
    reason: str
    sizes: tuple[int, ...] = ()
    is_estimate: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return a text for each column of the table."""
        p, computed = self.problem, [] if self.direction == "norm" else [self.direction]
        if is_convolution(p):
            groups = "" if p.groups == 1 else f"groups={p.groups} "
            groups = "depthwise " if groups and p.group_width == 1 else groups
            window = p.filter_shape[-p.rank :] if isinstance(p, ConvNd) else (p.r, p.s)
            steps = p.stride[-len(window) :]
            stride = f"/{max(steps)}" if max(steps) > 1 else ""
            computed = [f"{p.direction} {groups}{'x'.join(map(str, window))}{stride} -> {p.k}"]
        elif p is not None:
            computed = [getattr(p, "kind", self.direction)]
        about = "~" * self.is_estimate
        both = (self.expected_ms, self.pytorch_ms)
        return (
            f"{len(self.layers)} x", self.layers[0], "x".join(map(str, self.sizes)),
            " + ".join((*computed, *self.fused)), self.provider,
            *("" if t is None else f"{about}{t:.4f}" for t in both), self.reason,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NetworkStep:
    """One step of the network, before and after confpred.

    Attributes:
        parts: graphs that Dynamo captured; 1 where the forward is captured whole.
        launches_before, launches_after: kernels of a step.
        fused: how many operators became part of another one.
        ms_before, ms_after: expected GPU time, milliseconds: convolutions by the model, other
            operators by the bytes that they move, which is rough.
        convolution_share: of `ms_before`.
        unpredicted: convolutions that no model predicts; both times have an estimate of them, by
            bytes and operations.
        added: operators that rewriting added, by name.
    """

    parts: int
    launches_before: int
    launches_after: int
    fused: int
    ms_before: float
    ms_after: float
    convolution_share: float
    unpredicted: int
    added: dict[str, int]

    @property
    def gain(self) -> float:
        """How many times as fast the step is expected to be."""
        return self.ms_before / self.ms_after if self.ms_after else 1.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Answer of `explain`, with a row a kind of layer; `str` of it is a table of at most 120
    columns. `remarks` are sentences about the answer."""

    device: str
    step: NetworkStep
    rows: tuple[Row, ...]
    training: bool = False
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON's types."""
        return asdict(self)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        s = self.step
        missing = f"; {s.unpredicted} of them are estimates (~)" if s.unpredicted else ""
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for head in _COLUMNS:
            side: Any = "right" if head in _NUMBERS else "left"
            table.add_column(head, justify=side, overflow="fold", no_wrap=head not in _WRAPPED)
        for row in self.rows:
            table.add_row(*row.cells())
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(
                f"One step of {'training' if self.training else 'inference'} on {self.device},"
                f" captured in {s.parts} part{'s' * (s.parts != 1)}:"
                f" {s.launches_before} launches become {s.launches_after}, {s.fused} operators"
                f" fused; expected GPU time {s.ms_before:.3f} -> {s.ms_after:.3f} ms,"
                f" {s.gain:.2f}x, of which convolutions are {s.convolution_share:.0%}"
                f" before{missing}.", highlight=False,
            )  # fmt: skip
            for remark in self.remarks:
                console.print(remark, highlight=False, markup=False)
            console.print(table)
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def explain(
    model: nn.Module,
    example_inputs: Any,
    device: str | Device | None = None,
    *,
    training: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Predict a step of `model` on `device` after `confpred.optimize`; needs no GPU.

    The network is captured as `optimize` captures it, on tensors without values. A forward that
    reads values, as ``.item()`` does, is run on the CPU. Only the GPU's cuDNN knows its plans for a
    layer: where it lacks the one that is named here, the next one in the ranking runs.

    Args:
        model: the network; it is neither run nor changed.
        example_inputs: as of `confpred.optimize`; only shapes, dtypes and layouts matter.
        device: name of a GPU, such as ``"h100"``; None: this machine's, else the H100.
        training: with the gradients; None: as the model's mode is.
        dtype: that the network is to run in, in training by autocast; None: as it is.

    Raises:
        InvalidInput: `model`, `example_inputs` or `dtype` is something else.
        UnknownDevice: no description of `device` is known.
        ConfpredError: the forward cannot be captured.
    """
    gpu, remarks = _device_here() if device is None else (get_device(device), [])
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    training = model.training if training is None else training
    now = _as_it_runs(gpu, remarks) if device is None else gpu
    captured = capture(model, example_inputs, gpu, now, training=training, dtype=dtype)
    step, rows = captured.explanation()
    remarks += [f"Timed here, {text}." for text in status(model).verified]
    if step.gain < _POOR:
        remarks += _in_half(model, example_inputs, (gpu, now), dtype, step, training)
    return Explanation(gpu.key, step, rows, training, (*remarks, *_remarks(step, rows, gpu)))


def _device_here() -> tuple[Device, list[str]]:
    """Return this machine's GPU, or an assumed one with a sentence that says so."""
    if torch.cuda.is_available():
        try:
            return driver.device_of(torch.cuda.current_device()), []
        except ConfpredError as error:
            return get_device("h100"), [f"An H100 is assumed, as {error}."]
    text = "An H100 is assumed, as this machine has no GPU: device= names another one."
    return get_device("h100"), [text]


def _as_it_runs(device: Device, remarks: list[str]) -> Device:
    """Return this machine's GPU with the rates that it has now, where it has a model; `remarks` get
    what is slow."""
    if not torch.cuda.is_available() or device.key not in choosing.current_predictor().models:
        return device
    ordinal = torch.cuda.current_device()
    now = choosing.as_it_runs(ordinal, device)
    remarks += filter(None, [choosing.slow_now(ordinal)])
    return now


def _in_half(
    model: nn.Module, inputs: Any, devices: tuple[Device, Device], dtype: torch.dtype | None,
    step: NetworkStep, training: bool,
) -> Iterator[str]:  # fmt: skip
    """Yield the gain in half precision, channels last, if it is larger than that of `step`."""
    halves = [dtype, *(t.dtype for t in model.parameters())]
    half = next((kind for kind in halves if kind in _HALF), None)
    how: dict[str, Any] = {"dtype": half or torch.float16, "channels_last": True}
    try:
        other, rows = capture(model, inputs, *devices, training=training, **how).explanation()
    except ConfpredError:
        return
    if other.gain > step.gain and any(row.provider != PYTORCH for row in rows):
        way = "autocast to float16 and " if training else "model.half() and "
        yield (
            f"With {'' if half else way}model.to(memory_format=torch.channels_last), which confpred"
            f" is for: {other.ms_before:.3f} -> {other.ms_after:.3f} ms, {other.gain:.2f}x."
        )


def _remarks(step: NetworkStep, rows: Sequence[Row], device: Device) -> Iterator[str]:
    if any(row.reason.startswith("no model for this device") for row in rows):
        yield f"confpred has no model of the {device.key}, so PyTorch's operators stay, fused."
    # Gains from 0.995 on are printed as 1.00x.
    if step.gain < 0.995 or step.launches_after > step.launches_before:
        names = ", ".join(f"{count} {name}" for name, count in step.added.items())
        slower = "As it is, it gets slower. " if step.gain < 0.995 else ""
        yield f"{slower}Rewriting adds {f'{names}: {_ADDED}' if names else 'no operator'}."
    plans = [row for row in rows if lacks_library(row.provider)]
    if plans:
        saved = sum(len(r.layers) * ((r.pytorch_ms or 0) - (r.expected_ms or 0)) for r in plans)
        yield (
            f"{saved:.3f} ms of the gain are of cuDNN's plans, which need its front end:"
            f" {install_command('gpu')}"
        )


_ADDED = "copies bring channels-first tensors into channels last, folds join batch norms to filters"


class Recorder(Compiler):
    """Rewrites the graphs of a capture for `device`; compiles and runs no confpred kernels. `now`
    has the rates of its times."""

    def __init__(self, device: Device, now: Device | None = None) -> None:
        super().__init__(Options(inductor=False, graphs=False))
        self._device, self._now, self._parts = device, now or device, 0
        # Before and after graphs are rewritten: operators, and seconds of those without
        # convolutions; the operators that run, with the modules that they are of.
        self._operators: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._other_s = [0.0, 0.0]
        self._others: dict[str, list[tuple[str, float]]] = {}
        # Sizes and estimates of convolutions, by name and direction.
        self._known: dict[tuple[str, str], list[tuple[tuple[int, ...], float]]] = {}

    def chooser(self, graph: fx.Graph) -> choosing.Choose | None:
        self._count(graph, 0)  # it is asked for before a graph is rewritten
        for node in graph.nodes:
            if node.target in (CONVOLUTION, BACKWARD):
                self._note(node)
        return lambda problems: choosing.choose_many(problems, self._device)

    def device_of(self, graph: fx.Graph) -> Device | None:
        return self._device

    def _note(self, node: fx.Node) -> None:
        """Record the sizes of a convolution, and how long it takes by an estimate."""
        image = val_of(arguments_of(node).image)
        sizes = tuple(s if isinstance(s, int) else int(s.node.hint or 0) for s in image.shape)
        for direction in directions_of(node):
            estimates = self._known.setdefault((name_of(node), direction), [])
            estimates.append((sizes, convolution_s(node, self._now)))

    def _run(self, gm: fx.GraphModule, *more: Any, **options: Any) -> Any:
        run = super()._run(gm, *more, **options)
        self._count(gm.graph, 1)
        return run

    def _count(self, graph: fx.Graph, when: int) -> None:
        self._parts += when == 0
        for node in graph.nodes:
            if node.op != "call_function" or node.target in _FREE or is_view(node):
                continue
            name = str(node.target).removesuffix(".default")
            self._operators[when][name] += 1
            if node.target not in _CONVOLUTIONS:
                seconds = node_s(node, self._now)
                self._other_s[when] += seconds
                if when and not name.startswith(_NORMS):
                    self._others.setdefault(name, []).append((name_of(node), seconds))

    def explanation(self) -> tuple[NetworkStep, tuple[Row, ...]]:
        """Return the captured step, as a whole and in rows."""
        remaining = {key: list(values) for key, values in self._known.items()}
        kinds: dict[Any, list[Site]] = {}
        sizes: dict[Any, tuple[tuple[int, ...], float]] = {}
        for site in (*self.sites, *self.norms):
            values = remaining.get((site.name, site.direction))
            noted = values.pop(0) if values else (site.sizes, 0.0)
            key = (site.direction, site.problem, site.fused, site.why, noted)
            kinds.setdefault(key, []).append(site)
            sizes[key] = noted
        rows = [_row(group, self._device, *sizes[key]) for key, group in kinds.items()]
        rows = [_slowed(row, self._device, self._now) for row in rows]
        convolutions = [row for row in rows if row.sizes and row.direction not in DIRECTIONS]
        times = [(len(row.layers), *_seconds(row, self._device, self._now)) for row in convolutions]
        before_s = sum(count * before for count, before, _ in times)
        after_s = self._other_s[1] + sum(count * after for count, _, after in times)
        total_s = self._other_s[0] + before_s
        before, after = self._operators
        step = NetworkStep(
            self._parts, before.total(), after.total(),
            fused=sum(len(row.fused) * len(row.layers) for row in rows),
            ms_before=1e3 * total_s, ms_after=1e3 * after_s,
            convolution_share=before_s / total_s if total_s else 0.0,
            unpredicted=sum(len(row.layers) for row in convolutions if row.is_estimate),
            added={n: count for n, count in (after - before).items() if not n.startswith(_INSTEAD)},
        )  # fmt: skip
        others = sorted(self._others.items(), key=lambda item: -sum(s for _, s in item[1]))
        return step, (*rows, *(_other_row(name, calls) for name, calls in others))


def capture(
    model: nn.Module, example_inputs: Any, device: Device, now: Device | None = None, *,
    training: bool = False, dtype: torch.dtype | None = None, channels_last: bool = False,
) -> Recorder:  # fmt: skip
    """Capture `model` on fake tensors, or on real ones where its forward reads values, and rewrite
    its graphs for `device`, which has the rates of `now`; see `explain`."""
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidInput("dtype", dtype, "a torch.dtype, or None")
    inputs = as_arguments(example_inputs)
    cast = None if training else dtype

    def run(mode: FakeTensorMode | None, is_captured: bool = True) -> Recorder:
        def made(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            kind = cast if cast is not None and x.is_floating_point() else x.dtype
            with mode or nullcontext():
                # On the CPU, whatever the tensors are on: a PyTorch without CUDA has no other.
                if mode is None:
                    new = x.detach().to("cpu", kind, copy=True)
                else:
                    new = torch.empty_strided(x.shape, x.stride(), dtype=kind, device="cpu")
                if channels_last and new.dim() == 4:
                    new = new.contiguous(memory_format=torch.channels_last)
                if isinstance(x, nn.Parameter):
                    return nn.Parameter(new, x.requires_grad)
                return new.requires_grad_(x.requires_grad)

        recorder = Recorder(device, now)
        tensors = (*model.parameters(), *model.buffers())
        copy = deepcopy(model, {id(t): made(t) for t in tensors}).train(training)
        args, kwargs = _pytree.tree_map(made, inputs)
        low = training and dtype is not None
        autocast = torch.autocast("cpu", dtype) if low else nullcontext()
        with mode or nullcontext(), autocast, torch.set_grad_enabled(training):
            frame = own_frame(copy)
            call = torch.compile(frame, backend=recorder.compile) if is_captured else frame
            out = call(*args, **kwargs)
            if training:
                leaves = [t for t in _pytree.tree_leaves(out) if isinstance(t, Tensor)]
                heads = [t for t in leaves if t.requires_grad]
                if heads:
                    torch.autograd.backward(heads, [torch.empty_like(t) for t in heads])
        return recorder

    try:
        try:
            return run(FakeTensorMode(allow_non_fake_inputs=True))
        except Exception as error:
            if not isinstance(_inner(error), _OF_VALUES):
                raise
        return run(None)
    except Exception as error:  # whatever a forward may raise
        reason = _reason(error)
        try:
            run(FakeTensorMode(allow_non_fake_inputs=True), is_captured=False)
        except Exception as plain:  # eager mode says it in fewer words
            reason = _reason(plain)
        raise ConfpredError(f"{type(model).__name__} cannot be captured: {reason}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of the error that Dynamo, or its backend, has wrapped; its type where
    it has no text."""
    error = _inner(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return " ".join(lines[: 1 + lines[0].endswith(":")]) or type(error).__name__


def _inner(error: BaseException) -> BaseException:
    """Return the error that Dynamo, or its backend, has wrapped."""
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        error = inner
    return error


def _row(group: Sequence[Site], device: Device, sizes: tuple[int, ...], estimate_s: float) -> Row:
    """Return the row of layers of one kind."""
    site, names = group[0], tuple(site.name or "-" for site in group)
    choice = site.choice
    pytorch_ms = None if choice is None else choice.pytorch_ms
    if pytorch_ms is None and is_convolution(site.problem):
        pytorch_ms = choosing.pytorch_ms(site.problem, device)
    is_estimate = pytorch_ms is None and estimate_s > 0.0
    pytorch_ms = 1e3 * estimate_s if is_estimate else pytorch_ms
    problem: Any = site.problem
    first = (names, site.direction, problem, site.fused)
    if choice is not None and site.is_lowered:
        config, ms = dict(choice.config or {}), choice.predicted_ms
        reason = choice.source + f" from {choice.donor}" * bool(choice.donor)
        reason += ", out of distribution" * choice.extrapolated
        more = (config, pytorch_ms if ms is None else ms, pytorch_ms, reason)
        return Row(*first, choice.provider, *more, sizes, is_estimate)
    reason = "one kernel" if site.direction == "norm" else site.reason
    return Row(*first, PYTORCH, {}, pytorch_ms, pytorch_ms, reason, sizes, is_estimate)


def _slowed(row: Row, device: Device, now: Device) -> Row:
    """Return `row` with the times that a model predicts for `device` as long as they are with the
    rates of `now`, by what bounds the layer."""
    if row.problem is None or row.is_estimate:
        return row
    slow = now.roofline_s(row.problem) / device.roofline_s(row.problem)
    expected_ms, pytorch_ms = (ms and slow * ms for ms in (row.expected_ms, row.pytorch_ms))
    return replace(row, expected_ms=expected_ms, pytorch_ms=pytorch_ms)


def _other_row(name: str, calls: Sequence[tuple[str, float]]) -> Row:
    """Return the row of an operator that is no convolution."""
    ms = 1e3 * sum(seconds for _, seconds in calls) / len(calls)
    names = tuple(module or "-" for module, _ in calls)
    return Row(names, name, None, (), PYTORCH, {}, ms, ms, "no convolution", (), True)


def _seconds(row: Row, device: Device, now: Device) -> tuple[float, float]:
    """Return the seconds of one layer's convolution by PyTorch, and as it runs."""
    p, before, after = row.problem, row.pytorch_ms or 0.0, row.expected_ms or 0.0
    # Before, other operators compute all that follows the convolution.
    if isinstance(p, Problem) and p.has_epilogue and not row.is_estimate:
        bare = left_to_pytorch(p)
        slow = now.roofline_s(bare) / device.roofline_s(bare)
        before = slow * (choosing.pytorch_ms(bare, device) or 0.0) or before
    return 1e-3 * before, 1e-3 * after
