"""Times a network's step as PyTorch runs it and as confpred does, in turns in one process.

All ways take their turns in random order, in rounds. A turn is one step that is not timed, a
synchronisation, and as many steps as take its seconds, until the device is done with the last. A
figure is the median over the rounds, a ratio the median of the rounds' ratios. ``again`` is eager
PyTorch once more: its ratio is the noise. The first result of a way, in training its gradients, is
compared with float32.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree

from confpred.errors import ConfpredError, InvalidInput, first_line

Step = Callable[[], Any]
#: Returns a function that is called instead of a model, which belongs to the way alone.
Start = Callable[[nn.Module], Callable[..., Any]]
#: A way may be this many times as far from float32 as eager PyTorch in half precision is, in the
#: 2-norm, and this much more: networks with random weights magnify rounding, each by another
#: factor.
TIMES_AS_FAR, SLACK = 3.0, 0.01
#: Largest factor of a loss, as gradient scalers begin with it, and about the largest gradient that
#: it leaves: float16 holds 65,504, and those of large images are too small for it without one.
MOST_SCALED, LARGEST = 2.0**16, 2.0**12
WARM_UPS = 4
LEAST_STEPS = 3  # of a turn
ROUNDS, TURN_S = 9, 0.05


def optimized(**options: Any) -> Start:
    """Return the way of `confpred.optimize` with `options`."""

    def start(model: nn.Module) -> nn.Module:
        import confpred

        return confpred.optimize(model, **options)

    return start


#: The ways that can be asked for by name.
WAYS: Mapping[str, Start] = {
    "eager": lambda model: model,
    "again": lambda model: model,
    "optimize": optimized(),
    "inductor=False": optimized(inductor=False),
    "freeze": optimized(freeze=True),
    "compile": torch.compile,
    "reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
}


def mean_square(out: Any) -> Tensor:
    """Return a loss of whatever a network returns: the mean square of its floating numbers."""
    numbers = [x for x in _pytree.tree_leaves(out) if _is_float(x)]
    return torch.stack([x.float().square().mean() for x in numbers]).sum()


@dataclass(frozen=True)
class Subject:
    """A network's step, to be timed in several ways.

    Attributes:
        model: in float32 and training mode, on the device that it runs on; it stays as it is.
        inputs: positional arguments; floating ones in float32.
        training: a step is forward under autocast to `half`, backward, and SGD with momentum
            (``foreach``); else it is the model in `half` under ``torch.no_grad``.
        loss: from the results of a forward to what backward begins with.
        half: the dtype of half precision.
        checked: number of images whose results are compared in inference; None for all.
        scale: factor of the gradients.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    training: bool = False
    loss: Callable[[Any], Tensor] = mean_square
    half: torch.dtype = torch.float16
    checked: int | None = None
    scale: float = 1.0

    @property
    def device(self) -> torch.device:
        """Return where the inputs are."""
        return next(x.device for x in self.inputs if isinstance(x, Tensor))

    def copy_of_model(self) -> nn.Module:
        """Return a copy of the model as its mode wants it; every way gets its own."""
        model = copy.deepcopy(self.model)
        return model.train() if self.training else model.eval().to(self.half)

    def arguments(self) -> tuple[Any, ...]:
        """Return the inputs as the mode wants them."""
        return self.inputs if self.training else self._in(self.half)

    def _in(self, dtype: torch.dtype, count: int | None = None) -> tuple[Any, ...]:
        def converted(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x[:count] if x.dim() else x
            return x.to(dtype) if x.is_floating_point() else x

        return tuple(map(converted, self.inputs))

    def step_of(self, model: nn.Module, forward: Callable[..., Any]) -> Step:
        """Return a function that runs one step of `model` by `forward`, the model itself or its
        compiled form. It returns the results, or the loss in training."""
        arguments = self.arguments()

        def infer() -> Any:
            with torch.no_grad():  # and without autocast, as the model is in half precision
                return forward(*arguments)

        if not self.training:
            return infer
        # A small rate: the figures are of time, and the loss must stay finite however many steps.
        rate = 1e-5 / self.scale
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, foreach=True)
        of_loss = torch.tensor(self.scale, device=self.device)

        def train() -> Tensor:
            optimizer.zero_grad(set_to_none=True)  # first: `answer` reads gradients after a step
            with self._autocast():
                out = forward(*arguments)
            loss = self.loss(out)
            loss.backward(of_loss)
            optimizer.step()
            return loss.detach()

        return train

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.half is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.half)

    def answer(self, model: nn.Module, out: Any) -> Tensor:
        """Return the numbers that a step computed, flat: its results `out`, or in training the
        gradients of the parameters."""
        if self.training:
            named = sorted(model.named_parameters())
            return _flat([p.grad for _, p in named if p.grad is not None])
        return _flat([x[: self.checked] for x in _pytree.tree_leaves(out) if _is_float(x)])

    def reference(self) -> tuple[Tensor, Subject]:
        """Return the answer in float32, without TF32, and this step with a scale for `half`."""
        flags = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=False, allow_tf32=False
        )
        model = self.copy_of_model().float()
        with flags:
            if self.training:
                with largest_gradients() as largest:
                    self.loss(model(*self.inputs)).backward()
                # Autocast computes gradients of filters in half precision, too: sums of many.
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                most = max(map(float, [*largest, *(grad.abs().max() for grad in grads)]), default=0)
                power = math.floor(math.log2(LARGEST / most)) if 0 < most < math.inf else 0
                subject = replace(self, scale=min(2.0**power, MOST_SCALED))
                return self.answer(model, None) * subject.scale, subject
            with torch.inference_mode():
                return self.answer(model, model(*self._in(torch.float32, self.checked))), self

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def largest_gradients() -> Iterator[list[Tensor]]:
    """Collect the largest gradient of each result of a module in the block."""
    maxima: list[Tensor] = []

    def watch(module: nn.Module, inputs: Any, out: Any) -> None:
        for x in _pytree.tree_leaves(out):
            if _is_float(x) and x.requires_grad:
                x.register_hook(lambda grad: maxima.append(grad.abs().max()))

    with register_module_forward_hook(watch):
        yield maxima


def device_named(name: str) -> torch.device:
    """Return a device, made the current one where it is a GPU; raise a `ConfpredError` where it is
    not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput("device", name, "cuda, cuda:1, ... or cpu") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfpredError(
            "a benchmark needs a CUDA GPU and a PyTorch that sees it; without one, "
            "confpred.explain(model, inputs, device='h100') in Python predicts a step"
        )
    device, count = torch.device("cuda", device.index or 0), torch.cuda.device_count()
    if device.index >= count:
        raise InvalidInput("device", name, f"cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    return device


def versions(device: torch.device) -> dict[str, str]:
    """Return the version of PyTorch, and the name of the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"torch": torch.__version__, "device": name}


def subject_on(
    device: torch.device, model: Any, shapes: Sequence[Sequence[int]], dtype: str, *,
    training: bool, channels_last: bool,
) -> Subject:  # fmt: skip
    """Return the step of `model` on random inputs of `shapes`, after one was run by PyTorch.

    Raises:
        InvalidInput: `model` is no ``torch.nn.Module``.
        ConfpredError: the step fails, or is out of memory.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput("network", type(model).__name__, "a factory of a torch.nn.Module")

    def laid_out(x: Tensor) -> Tensor:
        wanted = channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if wanted else x

    model = model.to(device).train()
    for parameter in model.parameters():
        parameter.data = laid_out(parameter.data)
    inputs = tuple(laid_out(torch.randn(tuple(shape), device=device)) for shape in shapes)
    subject = Subject(model, inputs, training=training, half=getattr(torch, dtype))
    sizes = " and ".join("x".join(map(str, shape)) for shape in shapes)
    try:
        first = subject.copy_of_model()
        subject.step_of(first, first)()
    except torch.OutOfMemoryError as error:
        text = f"a step on inputs of {sizes} is out of memory in PyTorch itself"
        raise ConfpredError(f"{text}; give a smaller --shape") from error
    except Exception as error:
        text = f"a step on inputs of {sizes} (--shape) fails: {first_line(error)}"
        raise ConfpredError(text) from error
    return subject


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().float().flatten() for x in tensors])


@dataclass
class Way:
    """A way of running the network that is ready to be timed.

    Attributes:
        step: one step.
        first_s: seconds of the first step, compilation included.
        peak_mb: most device memory that PyTorch reserves in a step, beyond what it held before the
            way was started; weights and the pools of CUDA graphs are in it. MiB.
        difference: from float32, relative, in the 2-norm.
        graph: one CUDA graph of the step, or None.
        times_ms, graph_ms: of a step, one a round.
    """

    model: nn.Module
    step: Step
    first_s: float
    difference: float
    peak_mb: float | None = None
    graph: Step | None = None
    times_ms: list[float] = field(default_factory=list)
    graph_ms: list[float] = field(default_factory=list)


def measure(
    subject: Subject, ways: Mapping[str, Start], *, rounds: int = ROUNDS, turn_s: float = TURN_S,
    say: Callable[[str, str], None] = lambda way, what: None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return the figures of each way, or its ``error``. GPU time is that of one CUDA graph of the
    step; ``reduce-overhead`` makes graphs of its own, and gets none.

    Args:
        subject: the step.
        ways: by name; ``eager``, the first, says how far from float32 another may be.
        rounds, turn_s: as above.
        say: called with the name of a way and the step that begins.
    """
    try:
        expected, subject = subject.reference()
    except torch.OutOfMemoryError as error:
        text = "the step in float32, which results are compared with, is out of memory"
        raise ConfpredError(f"{text}; give a smaller --shape") from error
    ready: dict[str, Way] = {}
    results: dict[str, dict[str, Any]] = {}
    allowed = math.inf
    for name, start in ways.items():
        say(name, "first steps")
        try:
            way = _start_way(start, subject, expected, name != "reduce-overhead")
            if name == "eager":
                allowed = TIMES_AS_FAR * way.difference + SLACK
            if not math.isfinite(way.difference):
                raise ValueError(f"its numbers are not finite in {subject.half}")
            if way.difference > allowed:
                raise ValueError(f"{way.difference:.3g} away from float32, allowed: {allowed:.3g}")
            ready[name] = way
        except Exception as error:  # of one way; the others still count
            results[name] = {"error": _words(error)}
            say(name, results[name]["error"])
            del error
            _free()
    say("all", "in turns")
    _time_rounds(ready, subject, rounds, turn_s)
    for name, way in ready.items():
        results[name] = {
            "ms": statistics.median(way.times_ms),
            "graph_ms": statistics.median(way.graph_ms) if way.graph_ms else None,
            "first_s": way.first_s,
            "peak_mb": way.peak_mb,
            "difference": way.difference,
        }
        for other in ("eager", "compile", "reduce-overhead"):
            if other in ready:
                baseline = ready[other]
                results[name][f"over_{other}"] = ratio(baseline.times_ms, way.times_ms)
                if baseline.graph_ms:
                    results[name][f"graph_over_{other}"] = ratio(baseline.graph_ms, way.graph_ms)
    return {name: results[name] for name in ways}


def _words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).strip()}"[:500]


def ratio(baseline_ms: Sequence[float], ms: Sequence[float]) -> float | None:
    """Return the median of the rounds' ratios: a CPU that is slow for seconds slows both down."""
    if not baseline_ms or not ms:
        return None
    return statistics.median(a / b for a, b in zip(baseline_ms, ms, strict=True))


def _start_way(start: Start, subject: Subject, expected: Tensor, has_graph: bool) -> Way:
    """Start a way, and run its first steps."""
    subject.synchronize()
    leave_pool()
    _free()
    on_gpu = subject.device.type == "cuda"
    held = torch.cuda.memory_reserved() if on_gpu else 0
    begun = time.perf_counter()
    model = subject.copy_of_model()
    step = subject.step_of(model, start(model))
    answer = subject.answer(model, step())
    subject.synchronize()
    first = time.perf_counter() - begun
    way = Way(model, step, first, float((answer - expected).norm() / expected.norm()))
    for _ in range(WARM_UPS):
        step()
    subject.synchronize()
    if on_gpu:
        _free()  # what only the first steps needed, such as workspaces that were tried
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        way.peak_mb = (torch.cuda.max_memory_reserved() - held) / 2**20
        way.graph = _capture_graph(step) if has_graph else None
    return way


def leave_pool() -> None:
    """Give graphs that are recorded from now on a pool of their own, so that their need is seen."""
    from torch._inductor.cudagraph_trees import local

    from confpred.pytorch.run.graphs import memory_of_inference

    local.tree_manager_containers.clear()
    memory_of_inference.cache_clear()


def _free() -> None:
    """Give back memory that is not in use, cuBLAS's workspaces among it: a way that records a graph
    gives back those of the ways before it, which would look like memory that it saves."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _capture_graph(step: Step) -> Step:
    """Return the step as one CUDA graph, captured after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(kept: Step = step) -> Any:
        """Replay the graph; `kept` holds the model, whose weights it reads at their addresses."""
        graph.replay()
        return out

    return replay


def _time_rounds(ways: Mapping[str, Way], subject: Subject, rounds: int, turn_s: float) -> None:
    """Fill in the times of all ways, whose turns come in random order in each round."""

    def turn(step: Step, steps: int) -> float:
        step()
        subject.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        subject.synchronize()
        return (time.perf_counter() - start) / steps

    turns: list[tuple[Step, list[float]]] = []
    for way in ways.values():
        turns.append((way.step, way.times_ms))
        if way.graph is not None:
            turns.append((way.graph, way.graph_ms))
    counts = [max(LEAST_STEPS, math.ceil(turn_s / turn(step, LEAST_STEPS))) for step, _ in turns]
    order = list(range(len(turns)))
    for _ in range(rounds):
        random.shuffle(order)
        for i in order:
            step, times = turns[i]
            times.append(turn(step, counts[i]) * 1e3)
