"""`status`: which kernels run in a model, and why PyTorch's do elsewhere; `verbose` logs captures.

The backend makes a `Capture` of each graph, which lives as long as the function that runs it. A
capture belongs to the model that `confpred.optimize` made it for, else to the model that has its
parameters and buffers.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch._dynamo import config

from confpred.cudnn.plans import lacks_library
from confpred.errors import InvalidInput, install_command, nearest
from confpred.families.protocol import PYTORCH
from confpred.pytorch.rewrite.sites import Site
from confpred.pytorch.run import choosing, loading
from confpred.pytorch.run.tuning import Tuner

log = logging.getLogger("confpred")
NO_GPU = "not on a GPU, so confpred changes nothing"
LEVELS = ("info", "debug")
_NAMED = 3  # most layers that are named for one reason
SLOW_S = 5.0  # a capture that takes longer says so before its end


@dataclass(eq=False)
class Calls:
    """History of the calls of an optimized model.

    Attributes:
        made: number of calls.
        graphs: number of graphs captured in them.
        seconds: seconds of the calls that captured.
        breaks: where Dynamo cut the first call, and why.
        failed: why the model runs without capture; empty if it is captured.
        outside: name of a part that ran before the model was called; empty for none.
        is_cut: whether a graph break ends one of its graphs.
        is_training: whether the model was in training mode at the last call.
        tuner: measures layers that no model predicts; None before the first capture.
    """

    made: int = 0
    graphs: int = 0
    seconds: float = 0.0
    breaks: tuple[str, ...] = ()
    failed: str = ""
    outside: str = ""
    is_cut: bool = False
    is_training: bool = False
    tuner: Tuner | None = None
    _suppresses: bool = False  # Dynamo's setting before a call

    def outlive_failures(self) -> None:
        """Let Dynamo run what it cannot capture in eager mode, up to the end of the call. The part
        before a graph break has run by then: it would change the model and its inputs twice if the
        whole model ran again."""
        self.is_cut, self._suppresses = True, config.suppress_errors
        config.suppress_errors = True

    def of(self, captured: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `captured`, and record its captures."""
        is_first, graphs = not self.made, self.graphs
        self.made += 1
        before = breaks() if is_first else {}
        begun = time.perf_counter()
        if self.is_cut:
            self.outlive_failures()
        try:
            return captured(*args, **kwargs)
        finally:
            if self.is_cut:
                config.suppress_errors = self._suppresses
            if is_first:
                self.breaks = tuple(_first(reason) for reason in breaks() if reason not in before)
            if self.graphs > graphs:
                self.seconds += time.perf_counter() - begun


@dataclass(eq=False)
class Pass:
    """A pass of a graph: ``inference``, ``forward`` or ``backward``; reasons why calls of it ran
    without a CUDA graph; the compiler of PyTorch's operators in it; and the function that runs it.
    """

    kind: str
    reasons: set[str]
    compiler: str
    run: ref[Any] | None = None

    def replay(self) -> str:
        """Return whether it is replayed, and why not, in words."""
        replays = getattr(self.run and self.run(), "replays", 0)
        texts = [f"CUDA graph, replayed {_counted(replays, 'time')}"] * bool(replays)
        texts += [f"no CUDA graph {reason}" for reason in sorted(self.reasons)]
        return "; ".join(texts) or "CUDA graph, recorded at the second call"


@dataclass(eq=False)
class Capture:
    """One captured graph.

    Attributes:
        inputs: sizes and dtypes of the inputs that are no parameters or buffers.
        tensors: the parameters and buffers, unless `calls` tells the model: PyTorch swaps no tensor
            that has a weak reference.
        is_training: whether it is of the optimized model's training mode.
        frame: number of its frame in Dynamo.
        ended: where a graph break ends it, and why; empty if it covers its forward to the end.
        calls: history of the optimized model's calls, or None.
        limits: limits of its launches.
        sites: its convolutions and, in inference, batch norms, a site for each direction; other
            norms are not counted.
        ordinal: the CUDA device; None where its tensors are elsewhere.
        passes: its passes that run.
        seconds: time of compilation.
        doing: the present step of compilation, in words; empty before and after.
        was_slow: whether a slow capture was logged.
        kept: with ``verify="network"``, why it runs with confpred's choices or without; else empty.
        is_rejected: whether it runs without confpred's choices.
        tuner: measures its layers where no model knows the GPU, from its compilation on.
        number: its number in the order of captures.
    """

    inputs: str
    tensors: list[ref[Tensor]]
    is_training: bool
    frame: int
    ended: str
    calls: Calls | None
    limits: Any
    sites: list[Site]
    ordinal: int | None = None
    passes: list[Pass] = field(default_factory=list)
    seconds: float = 0.0
    doing: str = ""
    was_slow: bool = False
    kept: str = ""
    is_rejected: bool = False
    tuner: Tuner = field(default_factory=Tuner)
    number: int = field(default_factory=itertools.count().__next__)

    @contextmanager
    def compiling(self, first: str) -> Iterator[None]:
        """Count the seconds of the block, whose first step is `first`, and log once if it is slow;
        a nested block is part of the outer one."""
        if self.doing:
            yield
            return
        begun, self.doing = time.perf_counter(), first
        timer = threading.Timer(SLOW_S, self._say_slow)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.doing = ""
            self.seconds += time.perf_counter() - begun

    def end(self) -> None:
        """Record that the graph is compiled: a part that cannot be captured may follow."""
        if self.ended and self.calls is not None and not self.calls.is_cut:
            self.calls.outlive_failures()

    def _say_slow(self) -> None:
        if self.doing and not self.was_slow:
            self.was_slow = True
            text = "capturing %s takes longer than %g s: %s"
            log.info(text, self.inputs, SLOW_S, self.doing)

    def reason(self, site: Site) -> str:
        """Return why PyTorch computes a layer; empty where a confpred kernel does."""
        if site.choice is None or not site.is_lowered or self.ordinal is None:
            return site.reason
        if self.is_rejected:
            return "slower in the whole network"
        if not loading.was_refused(site.choice, self.ordinal, self.limits):
            return ""
        if lacks_library(site.choice.provider):
            return "cuDNN's front end is missing, or finds no cuDNN"
        return "its kernel cannot be had"

    def __str__(self) -> str:
        kinds = " and ".join(p.kind for p in self.passes)
        layers = NO_GPU if self.ordinal is None else "; ".join(_layers([self])) or "no convolution"
        cut = f"; cut {self.ended}" if self.ended else ""
        return f"captured {kinds} of {self.inputs} in {self.seconds:.1f} s: {layers}{cut}"


_captures: WeakSet[Capture] = WeakSet()


def capture_of(
    gm: Any, inputs: Sequence[Any], calls: Calls | None, limits: Any, sites: list[Site]
) -> Capture:
    """Return the record of `gm`, a graph of Dynamo's with these inputs, and count it in `calls`;
    the other arguments are attributes of `Capture`."""
    from torch._guards import CompileContext

    tensors = [x for x in inputs if isinstance(x, Tensor)]
    fixed = [x for x in tensors if isinstance(x, nn.Parameter) or _is_buffer(x)]
    texts = [_describe(x) for x in tensors if x.dim() and not any(x is t for t in fixed)]
    sizes = " with open sizes" if len(tensors) < len(inputs) else ""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    ended = f"{_place(reason.user_stack)}: {_first(reason.reason)}" if _is_break(reason) else ""
    frame = getattr(CompileContext.current_compile_id(), "frame_id", None) or 0
    made = Capture(
        " and ".join(texts) + sizes or "no tensors",
        [ref(t) for t in fixed] if calls is None else [],
        calls is not None and calls.is_training, frame, ended, calls, limits, sites,
    )  # fmt: skip
    if calls is not None:
        calls.graphs += 1
    _captures.add(made)
    return made


def _is_buffer(x: Tensor) -> bool:
    return getattr(x, "_dynamo_static_input_type", None) is not None


def _is_break(reason: Any) -> bool:
    return bool(getattr(reason, "graph_break", False))


def _place(stack: Sequence[Any]) -> str:
    return f"at {stack[-1].filename}:{stack[-1].lineno}" if stack else "somewhere"


def _first(text: str) -> str:
    """Return the first line of `text`."""
    return text.strip().partition("\n")[0]


def _describe(x: Tensor) -> str:
    return f"{'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def breaks() -> dict[str, int]:
    """Return how often Dynamo has cut a graph so far, by its reasons."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


@dataclass(frozen=True, slots=True)
class Status:
    """Answer of `status`; `str` of it is a page.

    Attributes:
        model: name of its class.
        how: ``confpred.optimize``, ``torch.compile``, or empty.
        captures: number of sets of shapes that were captured.
        parts: number of graphs of a forward; 1 where it is captured whole.
        inputs: sizes and dtypes of each set.
        breaks: where a forward is cut, and why.
        providers: how many layers each provider computes, counted by direction; ``pytorch`` is
            PyTorch's operators.
        left: names of the layers that PyTorch computes, by reason.
        replay: whether each pass is replayed as a CUDA graph, and why not.
        compilers: compilers of PyTorch's operators.
        verified: with ``verify="network"``, why graphs run with confpred's choices or without.
        seconds: time of the calls that captured.
        remarks: further sentences.
    """

    model: str
    how: str
    captures: int
    parts: int
    inputs: tuple[str, ...]
    breaks: tuple[str, ...]
    providers: dict[str, int]
    left: dict[str, tuple[str, ...]]
    replay: tuple[str, ...]
    compilers: tuple[str, ...]
    verified: tuple[str, ...]
    seconds: float
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON's types."""
        return asdict(self)

    @property
    def short(self) -> str:
        """One line of it."""
        if not self.how:
            return "not optimized"
        if not self.captures:
            return f"{self.how}, not captured"
        counts = [f"{count} {provider}" for provider, count in self.providers.items()]
        first = ", ".join(counts) or (self.remarks or ("no convolution",))[0]
        often = "once" if self.captures == 1 else f"{self.captures} times"
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{self.how}, captured {often}{parts}: {first}"

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.short}"]
        facts: dict[str, Iterable[str]] = {
            "inputs": self.inputs,
            "cut": self.breaks,
            "PyTorch": (
                f"{len(names)} {reason}: {_some(names)}" for reason, names in self.left.items()
            ),
            "replay": self.replay,
            "compiler": self.compilers,
            "verify": self.verified,
            "seconds": [f"{self.seconds:.1f} in calls that captured"] if self.captures else (),
            "note": self.remarks,
        }
        lines += [f"  {name:8}  {text}" for name, texts in facts.items() for text in texts]
        return "\n".join(lines)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def status(model: nn.Module) -> Status:
    """Report what confpred does in `model`: whether it is optimized, captured and replayed, which
    kernels compute its layers, and why PyTorch computes the others.

    Captures by `confpred.optimize`, and by ``torch.compile`` with the backend, are reported while
    they are alive. Nothing is run or compiled.

    Raises:
        InvalidInput: `model` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", model, "a torch.nn.Module")
    calls = getattr(model._compiled_call_impl, "calls", None)
    captures = sorted(_captures_of(model, calls), key=lambda c: (c.frame, c.number))
    modes: dict[bool, dict[int, list[Capture]]] = {}
    for capture in captures:
        frames = modes.setdefault(capture.is_training, {})
        frames.setdefault(capture.frame, []).append(capture)
    of_modes = [max(frames.values(), key=len) for frames in modes.values()]
    most = sorted((c for captures in of_modes for c in captures), key=lambda c: c.number)
    left: dict[str, tuple[str, ...]] = {}
    for name, _, reason in _rows(captures):
        if reason:
            left[reason] = (*left.get(reason, ()), name)
    how = "confpred.optimize" if calls else "torch.compile" if captures else ""
    cuts = [capture.ended for capture in captures if capture.ended]
    reasons = [cut.partition(": ")[2] for cut in cuts]
    cuts += [text for text in (calls.breaks if calls else ()) if _first(text) not in reasons]
    passes = [p for capture in captures for p in capture.passes]
    return Status(
        type(getattr(model, "_orig_mod", model)).__name__, how, len(most),
        max(map(len, modes.values()), default=0),
        tuple(dict.fromkeys(capture.inputs for capture in most)), tuple(dict.fromkeys(cuts)),
        _providers(captures), {k: tuple(dict.fromkeys(v)) for k, v in left.items()},
        tuple(dict.fromkeys(f"{p.kind}: {p.replay()}" for p in passes)),
        tuple(dict.fromkeys(p.compiler for p in passes)),
        tuple(dict.fromkeys(capture.kept for capture in captures if capture.kept)),
        calls.seconds if calls else sum(capture.seconds for capture in captures),
        tuple(_remarks(model, calls, captures, max(map(len, of_modes), default=0))),
    )  # fmt: skip


def _captures_of(model: nn.Module, calls: Calls | None) -> list[Capture]:
    """Return the captures of an optimized model. For another model, return those that read its
    tensors, and those without tensors whose frames are between them, cut from the same forward.
    """
    if calls is not None:
        return [capture for capture in list(_captures) if capture.calls is calls]
    others = [capture for capture in list(_captures) if capture.calls is None]
    tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
    own = [
        capture for capture in others
        if any(id(t) in tensors for t in (weak() for weak in capture.tensors) if t is not None)
    ]  # fmt: skip
    frames = [capture.frame for capture in own]
    cut = [capture for capture in others if not capture.tensors and frames]
    return own + [capture for capture in cut if min(frames) < capture.frame < max(frames)]


def _rows(captures: Sequence[Capture]) -> Iterator[tuple[str, str, str]]:
    """Yield name, provider, and why PyTorch computes it, of each layer in each direction."""
    for capture in captures:
        for site in capture.sites:
            reason = capture.reason(site)
            provider = PYTORCH if reason or site.choice is None else site.choice.provider
            yield f"{site.name or 'a layer'} ({site.direction})", provider, reason


def _providers(captures: Sequence[Capture]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, provider, _ in _rows(captures):
        counts[provider] = counts.get(provider, 0) + 1
    return counts


def _layers(captures: Sequence[Capture]) -> Iterator[str]:
    """Yield how many layers each provider computes, and why PyTorch computes some."""
    counts = ", ".join(f"{count} {provider}" for provider, count in _providers(captures).items())
    yield from [counts] * bool(counts)
    reasons = [reason for _, _, reason in _rows(captures) if reason]
    yield from (f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))


def _remarks(
    model: nn.Module, calls: Calls | None, captures: Sequence[Capture], most: int
) -> Iterator[str]:
    """Yield the remarks of a status; `most` is the number of captures of the frame with most."""
    from confpred.pytorch import eager

    if captures and all(capture.ordinal is None for capture in captures):
        yield NO_GPU
    slow = [choosing.slow_now(capture.ordinal) for capture in captures]
    yield from dict.fromkeys(filter(None, slow))
    notes = dict.fromkeys(capture.tuner.note for capture in captures)
    yield from (f"tune: {note}" for note in notes if note)
    chosen = [s.choice for c in captures for s in c.sites if s.choice and not c.reason(s)]
    donors = Counter(choice.donor for choice in chosen if choice.source == "transferred")
    for donor, count in donors.items():
        yield f"{_counted(count, 'choice')} transferred from {donor}: not measured on this device"
    if calls is not None and calls.failed:
        yield f"it runs in eager mode: {calls.failed}"
    elif calls is not None and not captures:
        yield "its calls were not captured" if calls.made else "it was not called yet"
    if calls is not None and calls.outside:
        yield f"its part {calls.outside} ran outside of its call, as in eager mode"
    if most >= config.recompile_limit:
        yield f"Dynamo captures at most {config.recompile_limit} sets; others run as in eager mode"
    if any("front end is missing" in c.reason(site) for c in captures for site in c.sites):
        yield f"cuDNN's plans need: {install_command('gpu')}"
    if eager.is_enabled():
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        layers = [m for m in model.modules() if type(m) in kinds and getattr(m, "groups", 1) > 1]
        yield (
            f"confpred.enable is on: {_counted(len(layers), 'grouped layer')} of it are chosen for"
            " at each new size of an eager call on a GPU"
        )


def show_in_repr() -> None:
    """Let ``repr`` of optimized models end with their status, from the first one on.

    It patches the class, because attributes of a module go with its copies and pickles.
    """
    plain = nn.Module.__repr__
    if hasattr(plain, "confpred"):
        return

    def shown(self: nn.Module) -> str:
        text = plain(self)
        on = getattr(self._compiled_call_impl, "calls", None) is not None
        return f"{text}  # {status(self).short}" if on else text

    shown.confpred = True  # type: ignore[attr-defined]
    nn.Module.__repr__ = shown  # type: ignore[method-assign]


def verbose(level: str = "info") -> None:
    """Log what confpred does in PyTorch to standard error: a line a capture, and why a pass has no
    CUDA graph.

    ``CONFPRED_LOG=info`` in the environment does the same.

    Args:
        level: ``"info"``, or ``"debug"``, which also says what runs in each layer.

    Raises:
        InvalidInput: `level` is another one.
    """
    if level not in LEVELS:
        raise InvalidInput("level", level, nearest(level, LEVELS))
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
