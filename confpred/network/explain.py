"""`explain`: what is chosen for each layer of a network, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from confpred.errors import InvalidInput
from confpred.families.candidate import PYTORCH_OPERATOR
from confpred.network.problems import CHANNELS_FIRST, LayerCall, network_problems
from confpred.predict.choice import Choice
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem
from confpred.problem.device import Device, get_device
from confpred.pytorch.choosing import current_predictor, why_not_ours
from confpred.pytorch.layouts import channels_first_ms, converting_pays, copies_ms


@dataclass(frozen=True, slots=True)
class Row:
    """One convolution of one call of a layer.

    Attributes:
        layer: the module's name.
        problem: what is computed; None where no `Problem` describes it.
        direction: ``fprop``, ``dgrad`` or ``wgrad``.
        provider: the kernel family that runs, or ``pytorch``.
        config: the family's config in words; empty for PyTorch's operator.
        expected_ms: expected time of what runs, milliseconds; None if there is no prediction.
        pytorch_ms: expected time of PyTorch's operator; None if there is no prediction.
        reason: why this runs: ``predicted``, ``measured`` or ``pinned``, or what keeps our kernels
            from running.
    """

    layer: str
    problem: Problem | None
    direction: str
    provider: str
    config: str
    expected_ms: float | None
    pytorch_ms: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "problem": None if self.problem is None else self.problem.to_json(),
            "direction": self.direction,
            "provider": self.provider,
            "config": self.config,
            "expected_ms": self.expected_ms,
            "pytorch_ms": self.pytorch_ms,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A row for each convolution of a network, in the order of its forward.

    Attributes:
        device: key of the device that was asked about.
        rows: see `Row`.
    """

    device: str
    rows: tuple[Row, ...]

    @property
    def total_ms(self) -> float:
        """Expected milliseconds of the layers that have a prediction of both times."""
        return sum(row.expected_ms or 0.0 for row in self._predicted())

    @property
    def pytorch_total_ms(self) -> float:
        """Those of the same layers with PyTorch's operator alone."""
        return sum(row.pytorch_ms or 0.0 for row in self._predicted())

    @property
    def unpredicted(self) -> int:
        """How many rows are in neither sum."""
        return len(self.rows) - len(self._predicted())

    def _predicted(self) -> list[Row]:
        return [
            row for row in self.rows if row.expected_ms is not None and row.pytorch_ms is not None
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "rows": [row.to_json() for row in self.rows],
            "total_ms": self.total_ms,
            "pytorch_total_ms": self.pytorch_total_ms,
            "unpredicted": self.unpredicted,
        }

    def __str__(self) -> str:
        """The rows as a table for people, and the sums."""
        head = ("layer", "direction", "problem", "runs", "ms", "PyTorch ms", "reason")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(head) - 1)]
        lines = [
            "  ".join(
                (
                    *(
                        text.rjust(width) if 4 <= i <= 5 else text.ljust(width)
                        for i, (text, width) in enumerate(zip(line[:-1], widths, strict=True))
                    ),
                    line[-1],
                )
            ).rstrip()
            for line in cells
        ]
        known = len(self.rows) - self.unpredicted
        lines.append(
            f"sum of {known} on {self.device}: {self.total_ms:.4f} ms, PyTorch's operators alone"
            f" {self.pytorch_total_ms:.4f} ms; {self.unpredicted} without a prediction"
        )
        return "\n".join(lines)


def explain(
    model: nn.Module,
    example_inputs: Any,
    device: str | Device = "h100",
    *,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """What is chosen for each convolution of `model` on `device`; needs no GPU.

    For inference, the network is as `confpred.optimize` would fuse it. Which plans cuDNN has for a
    layer is known on the GPU alone: where the one that is named here is not there, the next one in
    the ranking runs.

    Args:
        model: the network, optimized or not; it is not changed, nothing is computed.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dictionary of
            arguments by name; only shapes, dtypes and layouts matter.
        device: name of a GPU, such as ``"h100"``.
        training: whether a training step is asked about, with its gradients.
        dtype: as if the network ran in this dtype; None: as model, inputs and autocast have it.

    Raises:
        InvalidInput: `model` is no module, `example_inputs` are no arguments, or `dtype` is none.
        UnknownDevice: no description of `device` is known.
        ConfpredError: the forward depends on the values of its inputs.
    """
    known = get_device(device)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidInput("dtype", dtype, "a torch.dtype, or None")
    calls = network_problems(model, example_inputs, training=training, dtype=dtype)
    return Explanation(known.key, tuple(_rows(calls, known, current_predictor(), training)))


def _rows(
    calls: Iterable[LayerCall], device: Device, predictor: Predictor, training: bool
) -> Iterable[Row]:
    calls = list(calls)
    problems = {call.problem: None for call in calls if call.problem is not None}
    choices = dict(zip(problems, predictor.choose_many(problems, device), strict=True))
    pytorch = {p: predictor.expected_ms(p, device, PYTORCH_OPERATOR) for p in problems}
    for call in calls:
        if call.problem is None:
            yield Row(
                call.name, None, call.direction, PYTORCH_OPERATOR.provider, "", None, None,
                call.hindrance or "no problem describes it",
            )  # fmt: skip
            continue
        choice, theirs = choices[call.problem], pytorch[call.problem]
        reason = call.hindrance or why_not_ours(choice)
        converted = None if training else _converted(call, choice, theirs, device)
        if converted is not None:
            yield converted
        elif reason is None:
            words = " ".join(f"{k}={v}" for k, v in (choice.config or {}).items())
            yield Row(
                call.name, call.problem, call.direction, choice.provider, words,
                choice.predicted_ms, theirs, choice.source,
            )  # fmt: skip
        else:
            yield Row(
                call.name, call.problem, call.direction, PYTORCH_OPERATOR.provider, "",
                theirs, theirs, reason,
            )  # fmt: skip


def _converted(
    call: LayerCall, choice: Choice, theirs_ms: float | None, device: Device
) -> Row | None:
    """The row of a layer whose tensors have their channels first, where `confpred.enable` converts
    them; None where it does not."""
    problem = call.problem
    if call.hindrance != CHANNELS_FIRST or not isinstance(problem, Problem):
        return None
    ours_ms = choice.predicted_ms
    if why_not_ours(choice) is not None or ours_ms is None or theirs_ms is None:
        return None
    if not converting_pays(problem, ours_ms, theirs_ms, device):
        return None
    words = " ".join(f"{k}={v}" for k, v in (choice.config or {}).items())
    return Row(
        call.name, problem, call.direction, choice.provider, words,
        ours_ms + copies_ms(problem, device), channels_first_ms(problem, theirs_ms),
        "converted from NCHW",
    )  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    runs = f"{row.provider} {row.config}".strip()
    times = ["-" if ms is None else f"{ms:.4f}" for ms in (row.expected_ms, row.pytorch_ms)]
    problem = "-" if row.problem is None else str(row.problem)
    return (row.layer or "-", row.direction, problem, runs, *times, row.reason)
