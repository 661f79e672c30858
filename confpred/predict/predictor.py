"""From a problem to a choice: what is pinned or measured, else candidates -> cost -> compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from confpred.errors import InvalidInput
from confpred.families.candidate import PYTORCH_OPERATOR, Candidate
from confpred.families.limits import first_within, within
from confpred.families.protocol import Lister
from confpred.families.registry import all_families, kernels_of
from confpred.files import read_json
from confpred.memory import Remembered
from confpred.model.competition import Ranking, rank_families
from confpred.model.folder import Model, NewestModels, load_model
from confpred.model.ranking import rank_by_estimate
from confpred.predict import pins as pins_file
from confpred.predict import plans
from confpred.predict.choice import Choice, Source, check_top
from confpred.predict.donors import donor_for, widened
from confpred.problem.device import KNOWN, Device, get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.record import Record

#: How many answers are remembered, or up to twice as many: best choices, of 1.5 kB each, and
#: rankings, of up to 16 kB.
BEST_KEPT = 8_192
RANKINGS_KEPT = 512
#: For how many limits there are answers in memory.
_LIMITS_KEPT = 4
#: How many problems are worked out together at most: more would be no faster, and each takes about
#: 200 kB while it is under way.
TOGETHER = 64
_OF_MODELS = ("predicted", "transferred", "measured")
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
        return self._answer(problem, self._device(device), 1)[0]

    def choose_many(self, problems: Iterable[Record], device: str | Device) -> list[Choice]:
        """`choose` for each of `problems`, in order; those that are new are worked out together,
        which is faster."""
        known = self._device(device)
        asked = [(_checked(problem), known, 1) for problem in problems]
        parts = (asked[i : i + TOGETHER] for i in range(0, len(asked), TOGETHER))
        return [choices[0] for part in parts for choices in self._best.many(part)]

    def rank(self, problem: Record, device: str | Device, top: int = 5) -> list[Choice]:
        """The best `top` choices, best first; one ``fallback`` choice if no kernel is legal.

        Raises:
            InvalidInput: `top` is not an integer from 1 to ``MAX_TOP``.
            UnknownDevice: no description of `device` is known.
        """
        return list(self._answer(problem, self._device(device), check_top(top)))

    def knows_libraries(self, device: str | Device) -> bool:
        """Whether algorithms of a library are among what is chosen from on `device`: without them
        the answer for a dense layer is PyTorch's own operator.

        Raises:
            UnknownDevice: no description of `device` is known.
        """
        model = self._models.get(self._device(device).key)
        learned = () if model is None else model.families.values()
        return any(isinstance(each.family, Lister) for each in learned)

    def expected_ms(
        self, problem: Record, device: str | Device, candidate: Candidate
    ) -> float | None:
        """Milliseconds that `candidate` is expected to take for `problem`; None where nothing
        predicts them, as for PyTorch's operator where none of our kernels is legal.

        Raises:
            UnknownDevice: no description of `device` is known.
        """
        known = self._device(device)
        seconds = _expected_s(problem, known, self._model(type(problem), known), candidate)
        return None if seconds is None else seconds * 1e3

    def _answer(self, problem: Record, device: Device, top: int) -> tuple[Choice, ...]:
        remembered = self._best if top == 1 else self._ranking
        return remembered((_checked(problem), device, top))

    def _device(self, name: str | Device) -> Device:
        """The device called `name`; one that no table has may be a model's own, which describes it
        when it is loaded."""
        if isinstance(name, str) and name not in KNOWN and name in self._models:
            return self._models[name].device
        return get_device(name)

    def _own_model(self, kind: type[Record], device: Device) -> Model | None:
        """The model of `device`, if it knows problems of this kind."""
        model = self._models.get(device.key)
        return model if model and model.operation.problem is kind else None

    def _model(self, kind: type[Record], device: Device) -> Model | None:
        """The model that answers for problems of this kind on `device`: its own, or else that of
        the nearest device that has one."""
        return self._own_model(kind, device) or donor_for(self._models, device, kind)

    def _work_out(self, asked: Sequence[_Asked]) -> list[tuple[Choice, ...]]:
        """The answers to questions that are all about one device and number of choices."""
        if self._limits.deterministic:
            asked = [(_repeatable(problem), device, top) for problem, device, top in asked]
        settled = [self._settled(*each) for each in asked]
        short = [i for i, options in enumerate(settled) if len(options) < asked[i][2]]
        found = self._found([asked[i] for i in short])
        for i, options in zip(short, found, strict=True):
            known = {option.candidate for option in settled[i]}
            settled[i] += [option for option in options if option.candidate not in known]
        return [self._choices(*each, options) for each, options in zip(asked, settled, strict=True)]

    def _settled(self, problem: Record, device: Device, top: int) -> list[_Option]:
        """What needs no prediction: the user's pin, and the best measured config."""
        pin = self._pins.get((problem, device))
        planned = self._plan_for(problem, device) if top == 1 else None
        if planned is not None:
            return [_Option("pinned", planned.candidate, None)]
        model = self._own_model(type(problem), device)
        best = model.measured.get(str(problem)) if model else None
        options = []
        if pin is not None and self._keeps_within(problem, pin):
            options.append(_Option("pinned", pin, _expected_s(problem, device, model, pin)))
        known = best is not None and best.candidate != pin
        if best is not None and known and self._keeps_within(problem, best.candidate):
            options.append(_Option("measured", best.candidate, best.time_ms * 1e-3))
        return options

    def _plan_for(self, problem: Record, device: Device) -> Choice | None:
        """What a recorded plan has for a problem, if it keeps within the limits."""
        planned = self._planned.get((problem, device))
        if planned is not None and self._keeps_within(problem, planned.candidate):
            return planned
        return None

    def _keeps_within(self, problem: Record, candidate: Candidate) -> bool:
        if candidate == PYTORCH_OPERATOR:
            return True
        row = np.array([candidate.config_id], np.intp)
        return len(within(all_families()[candidate.provider], problem, row, self._limits)) == 1

    def _found(self, asked: Sequence[_Asked]) -> list[list[_Option]]:
        """What is predicted, or else estimated, for each question."""
        alike: dict[type[Record], list[int]] = {}
        for i, (problem, _, _) in enumerate(asked):
            alike.setdefault(type(problem), []).append(i)
        found: list[list[_Option]] = [[] for _ in asked]
        for kind, places in alike.items():
            _, device, top = asked[places[0]]
            model = self._model(kind, device)
            if model is None:
                continue
            own = model is self._own_model(kind, device)
            alike_ones = [asked[i][0] for i in places]
            options = _predicted(alike_ones, device, model, top, self._limits)
            for i, each in zip(places, options, strict=True):
                found[i] = each if own else [replace(o, source="transferred") for o in each]
        return [
            options or _estimated(problem, device, top, self._limits)
            for options, (problem, device, top) in zip(found, asked, strict=True)
        ]

    def _choices(
        self, problem: Record, device: Device, top: int, options: Sequence[_Option]
    ) -> tuple[Choice, ...]:
        """The first `top` of `options` spelled out; the fallback if there are none."""
        planned = self._plan_for(problem, device)
        if planned is not None and top == 1:
            return (planned,)  # so that a start from a plan loads no model
        model = self._model(type(problem), device)
        options = options or [_Option("fallback", PYTORCH_OPERATOR, None)]
        bound = None
        calibrated = model is not None and self._limits == UNLIMITED
        if model is not None and calibrated and options[0].source == "predicted":
            bound = model.regret_bound
        elif model is not None and calibrated and options[0].source == "transferred":
            bound = widened(model.regret_bound, model, device)
        choices = tuple(
            _choice(problem, device, option, model, bound if index == 0 else None)
            for index, option in enumerate(options[:top])
        )
        return choices if planned is None else (planned, *choices[1:])


def _checked(problem: object) -> Record:
    if not isinstance(problem, Record):
        raise InvalidInput("problem", problem, "a problem, such as a confpred.Problem")
    return problem


def _repeatable(problem: Record) -> Record:
    """`problem`, to be computed to the same bit at every call, if it can ask for that."""
    asked = getattr(problem, "deterministic", True)
    if asked or getattr(problem, "direction", "wgrad") != "wgrad":
        return problem  # what is asked for, or always so
    strict: Record = replace(problem, deterministic=True)  # type: ignore[call-arg]
    return strict


def _predicted(
    problems: Sequence[Record],
    device: Device,
    model: Model,
    top: int = 1,
    limits: Limits = UNLIMITED,
) -> list[list[_Option]]:
    """For each of `problems` at least `top` candidates within `limits`, if the families that
    `model` knows have them, fastest first. PyTorch's own operator comes before those that do not
    beat it even if its time is overestimated. Empty where nothing is legal."""
    rankings = rank_families(model.families, model.gate, problems, device, top, limits)
    found = [
        [_Option("predicted", candidate, seconds) for seconds, candidate in ranking]
        for ranking in rankings
    ]
    served = [i for i, ranking in enumerate(rankings) if ranking]
    if served and model.pytorch is not None:
        asked = [problems[i] for i in served]
        slowdowns = model.pytorch.slowdowns(asked, device)
        # PyTorch's operator was compared with the fastest config of all.
        every = [rankings[i] for i in served]
        if limits != UNLIMITED:
            every = rank_families(model.families, model.gate, asked, device, top)
        for i, fastest, slowdown in zip(served, every, slowdowns, strict=True):
            expected, least = ((fastest or rankings[i])[0][0] * times for times in slowdown)
            place = sum(seconds <= least for seconds, _ in rankings[i])
            found[i].insert(place, _Option("predicted", PYTORCH_OPERATOR, expected))
    return found


def _estimated(problem: Record, device: Device, top: int, limits: Limits) -> list[_Option]:
    """The configs of all families by their own estimates, fastest first; empty if none is legal.

    Estimates are too rough to be compared with anything but one another.
    """
    found: Ranking = []
    for name, family in kernels_of(problem).items():
        rows, seconds = rank_by_estimate(family, problem, device)
        kept = np.isin(rows, first_within(family, problem, rows, limits, top))
        pairs = zip(seconds[kept].tolist(), rows[kept].tolist(), strict=True)
        found += [(value, Candidate(name, row)) for value, row in pairs]
    return [_Option("heuristic", candidate, seconds) for seconds, candidate in sorted(found)]


def _expected_s(
    problem: Record, device: Device, model: Model | None, candidate: Candidate
) -> float | None:
    """Seconds that `candidate` is expected to take."""
    if candidate == PYTORCH_OPERATOR:
        predicted = _predicted([problem], device, model)[0] if model else []
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
        model=model.version if model and option.source in _OF_MODELS else None,
    )
