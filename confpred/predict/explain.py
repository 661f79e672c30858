"""`explain_layers`: why a layer gets the config that it gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from confpred.families.protocol import PYTORCH_OPERATOR
from confpred.model.folder import Model
from confpred.predict.choice import MAX_TOP, Choice, check_top
from confpred.predict.contributions import Comparison, compare, middling
from confpred.predict.explain_text import page
from confpred.predict.nearest import NearestLayers, Neighbour
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device, get_device
from confpred.problem.record import Record

NEAREST = 5  # measured layers that an explanation names


@dataclass(frozen=True, slots=True)
class Roofline:
    """What no kernel can beat.

    Attributes:
        bytes: that must cross device memory.
        flops: multiplications plus additions.
        memory_ms, arithmetic_ms: milliseconds of each alone.
    """

    bytes: int
    flops: int
    memory_ms: float
    arithmetic_ms: float

    @property
    def floor_ms(self) -> float:
        """Milliseconds below which no kernel can go: the larger of the two."""
        return max(self.memory_ms, self.arithmetic_ms)

    @property
    def limit(self) -> str:
        """Which of the two it is: ``memory`` or ``arithmetic``."""
        return "memory" if self.memory_ms >= self.arithmetic_ms else "arithmetic"

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "flops": self.flops,
            "memory_ms": self.memory_ms,
            "arithmetic_ms": self.arithmetic_ms,
            "floor_ms": self.floor_ms,
            "limit": self.limit,
        }


@dataclass(frozen=True, slots=True)
class LayerExplanation:
    """Why a layer gets the config that it gets. ``str()`` of it is a page for people.

    Attributes:
        problem: the layer.
        device: key of the device that was asked about.
        choices: the choice, and after it the runners-up; their `Choice.regret_bound` and
            `Choice.predicted_ms` say what is expected of them.
        roofline: what no kernel can beat.
        pytorch_ms: expected time of PyTorch's own operator; None where nothing predicts it.
        comparisons: the choice beside the next best config of its family, and beside a middling one
            of those that are offered; with what makes the difference. Empty where no model has
            learned of the family, and where PyTorch's operator is chosen.
        model: version of the model that was asked, or None.
        nearest: the measured layers that this one is most like; empty without a model.
    """

    problem: Record
    device: str
    choices: tuple[Choice, ...]
    roofline: Roofline
    pytorch_ms: float | None
    comparisons: tuple[Comparison, ...]
    model: str | None
    nearest: tuple[Neighbour, ...]

    @property
    def choice(self) -> Choice:
        """What is chosen."""
        return self.choices[0]

    @property
    def roofline_share(self) -> float | None:
        """The part of the roofline that the choice is expected to reach; None without a time."""
        ms = self.choice.predicted_ms
        return self.roofline.floor_ms / ms if ms else None

    def to_json(self) -> dict[str, Any]:
        """The one JSON form of an explanation, printed by ``confpred explain --json``."""
        return {
            "problem": self.problem.to_json(),
            "device": self.device,
            "choices": [choice.to_json() for choice in self.choices],
            "regret_bound": self.choice.regret_bound,
            "roofline": self.roofline.to_json() | {"share": self.roofline_share},
            "pytorch_ms": self.pytorch_ms,
            "model": self.model,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "nearest": [neighbour.to_json() for neighbour in self.nearest],
        }

    def __str__(self) -> str:
        return "\n".join(page(self))


def explain_layer(
    problem: Record,
    device: str | Device = "h100",
    *,
    top: int = 5,
    predictor: Predictor | None = None,
) -> LayerExplanation:
    """Why `problem` gets the config that it gets on `device`; needs no GPU.

    Args:
        problem: the layer.
        device: name of a GPU, such as ``"h100"``.
        top: how many choices to tell of, the best one included.
        predictor: whose choice is explained; None: that of the newest models.

    Raises:
        InvalidInput: `problem` is no problem, or `top` is not from 1 to 32.
        UnknownDevice: no description of `device` is known.
        ModelError: a model is damaged.
    """
    return next(explain_layers([problem], device, top=top, predictor=predictor))


def explain_layers(
    problems: Iterable[Record],
    device: str | Device = "h100",
    *,
    top: int = 5,
    predictor: Predictor | None = None,
) -> Iterator[LayerExplanation]:
    """`explain_layer` for each of `problems`, in order."""
    known, asked = get_device(device), Predictor.load() if predictor is None else predictor
    check_top(top)
    layers: dict[str, NearestLayers] = {}
    for problem in problems:
        ranked = asked.rank(problem, known, MAX_TOP)
        model = asked.models.get(known.key)
        if model is not None and model.operation.problem is not type(problem):
            model = None
        if model is not None and model.version not in layers:
            layers[model.version] = NearestLayers(model)
        yield LayerExplanation(
            problem=problem,
            device=known.key,
            choices=tuple(ranked[:top]),
            roofline=Roofline(
                bytes=problem.minimum_bytes,
                flops=problem.flops,
                memory_ms=known.memory_s(problem) * 1e3,
                arithmetic_ms=known.arithmetic_s(problem) * 1e3,
            ),
            pytorch_ms=asked.expected_ms(problem, known, PYTORCH_OPERATOR),
            comparisons=tuple(_comparisons(problem, known, model, ranked)),
            model=None if model is None else model.version,
            nearest=layers[model.version].nearest(problem, NEAREST) if model else (),
        )


def _comparisons(
    problem: Record, device: Device, model: Model | None, ranked: list[Choice]
) -> Iterator[Comparison]:
    chosen = ranked[0].candidate
    learned = model.families.get(chosen.provider) if model else None
    if learned is None:
        return
    others = [c.candidate for c in ranked[1:] if c.provider == chosen.provider][:1]
    others.append(middling(learned, problem, device))
    for other in dict.fromkeys(others):
        if other != chosen:
            yield compare(learned, problem, device, chosen, other)
