"""From a problem to a choice: what is pinned or measured, else candidates -> cost -> compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from confpred.errors import InvalidInput
from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.families.limits import first_within, within
from confpred.families.protocol import Rows
from confpred.families.registry import all_families, families_of
from confpred.files import read_json
from confpred.memory import Remembered
from confpred.model.folder import Model, NewestModels, load_model
from confpred.model.ranking import rank_by_estimate
from confpred.predict import pins as pins_file
from confpred.predict import plans
from confpred.predict.choice import MAX_TOP, Choice, Source, check_top
from confpred.problem.device import Device, get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.record import Record

#: How many answers are remembered, or up to twice as many: best choices, of 1.5 kB each, and
#: rankings, of up to 16 kB.
BEST_KEPT = 8_192
RANKINGS_KEPT = 512
#: For how many limits there are answers in memory.
_LIMITS_KEPT = 4
_Asked = tuple[Record, Device, int]  # the problem, for which device, and how many choices


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to compute a problem, before it is spelled out as a `Choice`."""

    source: Source
    candidate: Candidate
    seconds: float | None


class Predictor:
    """Chooses configs. Immutable after loading; safe to share between threads, and to fork.

    The same problem and device always get the same answer, to the bit; the latest answers are
    remembered, and what several threads ask at once is worked out by one of them.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        pins: Mapping[tuple[Record, Device], Candidate] | None = None,
        plan: plans.Plan | None = None,
    ) -> None:
        """Use `models`, by device key, which are not to change, what the user has pinned, and a
        recorded plan, whose choices are pins too."""
        self._models = MappingProxyType(models)
        self._limits = UNLIMITED
        self._within: dict[Limits, Predictor] = {}
        self._pins = dict(pins or {})
        self._planned: dict[tuple[Record, Device], Choice] = {}
        if plan is not None:
            for choice in plan.choices:
                self._pins[choice.problem, plan.device] = choice.candidate
                planned = replace(choice, source="pinned", model=None)
                self._planned[choice.problem, plan.device] = planned
        self._best = Remembered(self._work_out, BEST_KEPT)
        self._ranking = Remembered(self._work_out, RANKINGS_KEPT)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        pins: str | Path | None = None,
        device: str | Device | None = None,
    ) -> Predictor:
        """Load a model folder, or the newest model of each device that ships with the package.

        Args:
            model: a folder that ``confpred train`` wrote, or one that holds such folders, of which
                each device gets its newest.
            pins: a file of pinned candidates (`confpred.predict.pins`), or a plan
                (`confpred.predict.plans`).
            device: refuse a plan for another device than this. Pins of other devices are never
                refused, as they do not matter.

        Raises:
            ModelError: the folder is missing, damaged or foreign.
            DataError, InvalidInput: the file of pins is not valid, or a plan is for other kernels
                or another device.
        """
        if model is None:
            models: Mapping[str, Model] = NewestModels()
        else:
            found = NewestModels(Path(model)).values() or (load_model(Path(model)),)
            models = {each.device.key: each for each in found}
        if pins is None:
            return cls(models)
        path = Path(pins)
        forms = (pins_file.FORMAT, pins_file.FORMER, plans.FORMAT)
        if read_json(path, "a file of pins or a plan", *forms)["format"] == plans.FORMAT:
            return cls(models, plan=plans.read_plan(path, device))
        return cls(models, pins_file.read_pins(path))

    @property
    def models(self) -> Mapping[str, Model]:
        """The models in use, by device key."""
        return self._models

    def within(self, limits: Limits) -> Predictor:
        """What chooses as this one does, of what keeps within `limits` alone: pins, plans and
        measured configs that do not are passed over.

        Raises:
            InvalidInput: `limits` are none.
        """
        if not isinstance(limits, Limits):
            raise InvalidInput("limits", limits, "a confpred.Limits")
        if limits == self._limits:
            return self
        found = self._within.get(limits)
        if found is None:
            found = Predictor(self._models)
            found._pins, found._planned = self._pins, self._planned
            found._limits = limits
            if len(self._within) >= _LIMITS_KEPT:
                self._within.clear()
            self._within[limits] = found
        return found

    def choose(self, problem: Record, device: str | Device) -> Choice:
        """The best config known for `problem` on `device`; never fails for a valid problem.

        Raises:
            InvalidInput: `problem` is not a `Problem`, or the record of another operation.
            UnknownDevice: no description of `device` is known.
        """
        return self._answer(problem, get_device(device), 1)[0]

    def choose_many(self, problems: Iterable[Record], device: str | Device) -> list[Choice]:
        """`choose` for each of `problems`, in order."""
        known = get_device(device)
        return [self._answer(problem, known, 1)[0] for problem in problems]

    def rank(self, problem: Record, device: str | Device, top: int = 5) -> list[Choice]:
        """The best `top` choices, best first; one ``fallback`` choice if no kernel is legal.

        Raises:
            InvalidInput: `top` is not an integer from 1 to ``MAX_TOP``.
            UnknownDevice: no description of `device` is known.
        """
        return list(self._answer(problem, get_device(device), check_top(top)))

    def expected_ms(
        self, problem: Record, device: str | Device, candidate: Candidate
    ) -> float | None:
        """Milliseconds that `candidate` is expected to take for `problem`; None where nothing
        predicts them, as for PyTorch's operator where none of our kernels is legal.

        Raises:
            UnknownDevice: no description of `device` is known.
        """
        known = get_device(device)
        model = self._models.get(known.key)
        if model is not None and model.operation.problem is not type(problem):
            model = None
        seconds = _expected_s(problem, known, model, candidate)
        return None if seconds is None else seconds * 1e3

    def _answer(self, problem: Record, device: Device, top: int) -> tuple[Choice, ...]:
        if not isinstance(problem, Record):
            raise InvalidInput("problem", problem, "a problem, such as a confpred.Problem")
        remembered = self._best if top == 1 else self._ranking
        return remembered((problem, device, top))

    def _work_out(self, asked: _Asked) -> tuple[Choice, ...]:
        problem, device, top = asked
        problem = _repeatable(problem) if self._limits.deterministic else problem
        planned = self._planned.get((problem, device))
        if planned is not None and not self._keeps_within(problem, planned.candidate):
            planned = None
        if planned is not None and top == 1:
            return (planned,)  # so that a start from a plan loads no model
        model = self._models.get(device.key)
        if model is not None and model.operation.problem is not type(problem):
            model = None
        options = [*self._settled(problem, device, model)]
        settled = {option.candidate for option in options}
        if len(options) < top:
            found = _predicted(problem, device, model, self._limits) if model else []
            found = found or _estimated(problem, device, self._limits)
            options += (option for option in found if option.candidate not in settled)
        if not options:
            options = [_Option("fallback", PYTORCH_OPERATOR, None)]
        calibrated = model and options[0].source == "predicted" and self._limits == UNLIMITED
        bound = model.regret_bound if model and calibrated else None
        choices = tuple(
            _choice(problem, device, option, model, bound if index == 0 else None)
            for index, option in enumerate(options[:top])
        )
        return choices if planned is None else (planned, *choices[1:])

    def _settled(self, problem: Record, device: Device, model: Model | None) -> Iterator[_Option]:
        """What needs no prediction: the user's pin, and the best measured config."""
        pin = self._pins.get((problem, device))
        best = model.measured.get(str(problem)) if model else None
        if pin is not None and self._keeps_within(problem, pin):
            yield _Option("pinned", pin, _expected_s(problem, device, model, pin))
        known = best is not None and best.candidate != pin
        if best is not None and known and self._keeps_within(problem, best.candidate):
            yield _Option("measured", best.candidate, best.time_ms * 1e-3)

    def _keeps_within(self, problem: Record, candidate: Candidate) -> bool:
        if candidate == PYTORCH_OPERATOR:
            return True
        row = np.array([candidate.config_id], np.intp)
        return len(within(all_families()[candidate.provider], problem, row, self._limits)) == 1


def _repeatable(problem: Record) -> Record:
    """`problem`, to be computed to the same bit at every call, if it can ask for that."""
    asked = getattr(problem, "deterministic", True)
    if asked or getattr(problem, "direction", "wgrad") != "wgrad":
        return problem  # what is asked for, or always so
    strict: Record = replace(problem, deterministic=True)  # type: ignore[call-arg]
    return strict


def _predicted(
    problem: Record, device: Device, model: Model, limits: Limits = UNLIMITED
) -> list[_Option]:
    """The finalists of the families that `model` knows, fastest first. PyTorch's own operator comes
    before those that do not beat it even if its time is overestimated. Empty if nothing is
    legal."""
    found = _ranked(problem, device, model, limits)
    options = [_Option("predicted", candidate, seconds) for seconds, candidate in found]
    if found and model.pytorch is not None:
        # PyTorch's operator was compared with the fastest config of all.
        every = found if limits == UNLIMITED else _ranked(problem, device, model, UNLIMITED)
        best = every[0][0]
        expected, least = (best * times for times in model.pytorch.slowdown(problem, device))
        place = sum(seconds <= least for seconds, _ in found)
        options.insert(place, _Option("predicted", PYTORCH_OPERATOR, expected))
    return options


def _ranked(
    problem: Record, device: Device, model: Model, limits: Limits
) -> list[tuple[float, Candidate]]:
    ranked = {}
    for name, learned in model.families.items():
        offered = learned.candidates(problem, device)
        candidates = within(learned.family, problem, offered, limits)
        if len(offered) and not len(candidates):  # the portfolio was chosen without limits
            legal = np.flatnonzero(learned.family.legal(problem, device))
            candidates = within(learned.family, problem, legal, limits)
        if len(candidates):
            ranked[name] = learned.rank(problem, device, candidates)
    return _fastest(ranked)


def _estimated(problem: Record, device: Device, limits: Limits) -> list[_Option]:
    """The configs of all families by their own estimates, fastest first; empty if none is legal.

    Estimates are too rough to be compared with anything but one another.
    """
    families = families_of(problem).items()
    ranked = {}
    for name, family in families:
        rows, seconds = rank_by_estimate(family, problem, device)
        kept = np.isin(rows, first_within(family, problem, rows, limits, MAX_TOP))
        ranked[name] = rows[kept], seconds[kept]
    found = _fastest(ranked)
    return [_Option("heuristic", candidate, seconds) for seconds, candidate in found]


def _fastest(
    ranked: Mapping[str, tuple[Rows, NDArray[np.float64]]],
) -> list[tuple[float, Candidate]]:
    """The first ``MAX_TOP`` rows of each family in one order, with their seconds; `ranked` holds
    each family's rows and their rising seconds."""
    return sorted(
        (value, Candidate(name, row))
        for name, (rows, seconds) in ranked.items()
        for row, value in zip(rows[:MAX_TOP].tolist(), seconds[:MAX_TOP].tolist(), strict=True)
    )


def _expected_s(
    problem: Record, device: Device, model: Model | None, candidate: Candidate
) -> float | None:
    """Seconds that `candidate` is expected to take."""
    if candidate == PYTORCH_OPERATOR:
        predicted = _predicted(problem, device, model) if model else []
        return next((o.seconds for o in predicted if o.candidate == candidate), None)
    row = np.array([candidate.config_id], np.intp)
    learned = model.families.get(candidate.provider) if model else None
    if learned is None:
        family = all_families()[candidate.provider]
        return float(family.estimate_s(problem, device, row)[0])
    return float(learned.rank(problem, device, row)[1][0])


def _choice(
    problem: Record, device: Device, option: _Option, model: Model | None, bound: float | None
) -> Choice:
    return Choice(
        problem,
        device.key,
        option.source,
        option.candidate,
        predicted_ms=None if option.seconds is None else option.seconds * 1e3,
        regret_bound=bound,
        model=model.version if model and option.source in ("predicted", "measured") else None,
    )
