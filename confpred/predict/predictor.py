"""From a problem to a choice: what is pinned or measured, else candidates -> cost -> compare.

A device without a model gets the answers of the nearest device's model. A model has learned ratios:
of a config's time to the best config's, and of that to the roofline. Its features are of the
problem, the config, and of how both fill the device at hand, which also decides what is legal.
`benchmarks/model/transfer.py` measures the loss.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from confpred.concurrency import Remembered
from confpred.errors import InvalidInput
from confpred.families.protocol import (
    PYTORCH_OPERATOR,
    Candidate,
    LibraryFamily,
    first_within,
    within,
)
from confpred.families.registry import all_families, kernels_of
from confpred.model.bounds import Trust
from confpred.model.folder import Model, NewestModels, load_model
from confpred.model.rank import Options, rank_by_estimate, rank_families, with_pytorch
from confpred.predict.choice import Choice, Source, check_max_regret, check_top, with_fallback
from confpred.predict.plan import Plan, read_plan
from confpred.problem.device import KNOWN, Device, get_device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.record import Record

#: How many answers are remembered, or up to twice as many: best choices, of 2 kB each, and
#: rankings, of up to 16 kB.
BEST_KEPT = 8_192
RANKINGS_KEPT = 512
#: For how many limits there are answers in memory.
_LIMITS_KEPT = 4
#: How many problems are worked out together at most: more would be no faster, and each takes about
#: 1.4 MB while it is under way.
TOGETHER = 16
_UNKNOWN = Trust(None, False)
_OF_MODELS = ("predicted", "transferred", "measured")
_Asked = tuple[Record, Device, int]  # the problem, for which device, and how many choices


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to compute a problem, before it is spelled out as a `Choice`."""

    source: Source
    candidate: Candidate
    seconds: float | None


@dataclass(frozen=True, slots=True)
class _Found:
    """A prediction for a problem: the options, best first, how far the first of them can be
    trusted, and the seconds that PyTorch's operator is expected to take."""

    options: Sequence[_Option] = ()
    trust: Trust = _UNKNOWN
    pytorch_s: float | None = None


class Predictor:
    """Chooses configs. Immutable after loading; safe to share between threads, and to fork.

    The same problem and device always get the same answer, to the bit; the latest answers are
    remembered, and what several threads ask at once is worked out by one of them.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        plan: Plan | None = None,
    ) -> None:
        """Use `models`, by device key, which are not to change, and follow `plan` first."""
        self._models = MappingProxyType(models)
        self._limits = UNLIMITED
        self._within: dict[Limits, Predictor] = {}
        self._planned = {(c.problem, c.device): c for c in (plan.choices if plan else ())}
        self._best = Remembered(self._work_out, BEST_KEPT)
        self._ranking = Remembered(self._work_out, RANKINGS_KEPT)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        plan: str | Path | Plan | None = None,
        device: str | Device | None = None,
    ) -> Predictor:
        """Load a model folder, or the newest model of each device that ships with the package.

        Args:
            model: a folder that ``confpred train`` wrote, or one that holds such folders, of which
                each device gets its newest.
            plan: choices that are taken as they are (`confpred.predict.plan`): a `Plan`, a file, or
                a folder, whose compiled kernels are not loaded here. For other problems the models
                answer.
            device: refuse a plan whose choices are all for other devices.

        Raises:
            ModelError: the folder is missing, damaged or foreign.
            DataError, InvalidInput: the plan is not valid, or for other kernels or devices.
        """
        if model is None:
            models: Mapping[str, Model] = NewestModels()
        else:
            found = NewestModels(Path(model)).values() or (load_model(Path(model)),)
            models = {each.device.key: each for each in found}
        if isinstance(plan, str | Path):
            plan = read_plan(Path(plan), device)
        return cls(models, plan)

    @property
    def models(self) -> Mapping[str, Model]:
        """The models in use, by device key."""
        return self._models

    def identity(self, device: str | Device) -> str | None:
        """A text that is the same for predictors whose choices for `device` are the same, in any
        process of this release; None where only time can tell, as for a service's or a subclass's.
        """
        if type(self) is not Predictor:
            return None
        here = get_device(device)
        own = self._models.get(here.key)
        models = self._models.values() if own is None else (own,)  # of others it is transferred
        planned = sorted(
            repr((problem, choice.candidate))
            for (problem, on), choice in self._planned.items()
            if on == here.key
        )
        facts = (sorted(model.digest for model in models), planned, self._limits)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def within(self, limits: Limits) -> Predictor:
        """Return a predictor that chooses as this one does among what keeps within `limits`: a
        plan's choices and measured configs that do not are passed over.

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
            found._planned = self._planned
            found._limits = limits
            if len(self._within) >= _LIMITS_KEPT:
                self._within.clear()
            self._within[limits] = found
        return found

    def choose(
        self, problem: Record, device: str | Device, *, max_regret: float | None = None
    ) -> Choice:
        """The best config known for `problem` on `device`; never fails for a valid problem.

        Args:
            problem: what is asked.
            device: where it is to run.
            max_regret: where the bound on the choice's regret is above it, or there is none, the
                answer is PyTorch's own operator, as a ``fallback``: measure then, or pin a config.

        Raises:
            InvalidInput: `problem` is not a `Problem`, or the record of another operation, or
                `max_regret` is below 1.
            UnknownDevice: no description of `device` is known.
            ModelError: trees of the model are damaged, though their digests are right.
        """
        choices = self._answer(problem, self._device(device), 1)
        return choices[0] if max_regret is None else _accepted(choices, max_regret)[0]

    def choose_many(
        self,
        problems: Iterable[Record],
        device: str | Device,
        *,
        max_regret: float | None = None,
    ) -> list[Choice]:
        """`choose` for each of `problems`, in order; those that are new are worked out together,
        which is faster."""
        known = self._device(device)
        asked = [(_checked(problem), known, 1) for problem in problems]
        parts = (asked[i : i + TOGETHER] for i in range(0, len(asked), TOGETHER))
        found = (choices for part in parts for choices in self._best.many(part))
        return [c[0] if max_regret is None else _accepted(c, max_regret)[0] for c in found]

    def rank(
        self,
        problem: Record,
        device: str | Device,
        top: int = 5,
        *,
        max_regret: float | None = None,
    ) -> list[Choice]:
        """The best `top` choices, best first; one ``fallback`` choice if no kernel is legal. With
        `max_regret`, the first one is what `choose` says, and predictions follow.

        Raises:
            InvalidInput: `top` is not an integer from 1 to ``MAX_TOP``; others as of `choose`.
            UnknownDevice: no description of `device` is known.
        """
        choices = self._answer(problem, self._device(device), check_top(top))
        return list(choices) if max_regret is None else _accepted(choices, max_regret)

    def knows_libraries(self, device: str | Device) -> bool:
        """Whether algorithms of a library, or a plan's of dense layers, are among what is chosen
        from on `device`: without them the answer for a dense layer is PyTorch's own operator.

        Raises:
            UnknownDevice: no description of `device` is known.
        """
        known = self._device(device)
        model = self._models.get(known.key)
        learned = () if model is None else model.families.values()
        return any(isinstance(each.family, LibraryFamily) for each in learned) or any(
            where == known.key and problem.grouping == "dense" and choice.family is not None
            for (problem, where), choice in self._planned.items()
        )

    def expected_ms(
        self, problem: Record, device: str | Device, candidate: Candidate
    ) -> float | None:
        """Milliseconds that `candidate` is expected to take for `problem`; None where nothing
        predicts them, as for PyTorch's operator where none of our kernels is legal.

        Raises:
            UnknownDevice: no description of `device` is known.
        """
        known = self._device(device)
        if candidate == PYTORCH_OPERATOR:
            remembered = self._best((_checked(problem), known, 1))[0].pytorch_ms
            if remembered is not None:
                return remembered
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
        planned = [self._plan_for(problem, device) for problem, device, _ in asked]
        settled = [self._settled(*each, p) for each, p in zip(asked, planned, strict=True)]
        found = [_Found()] * len(asked)
        short = [i for i, options in enumerate(settled) if len(options) < asked[i][2]]
        for i, predicted in zip(short, self._found([asked[i] for i in short]), strict=True):
            listed = {option.candidate for option in settled[i]}
            settled[i] += [option for option in predicted.options if option.candidate not in listed]
            found[i] = predicted
        return [
            self._choices(*each, p, options, predicted)
            for each, p, options, predicted in zip(asked, planned, settled, found, strict=True)
        ]

    def _settled(
        self, problem: Record, device: Device, top: int, planned: Choice | None
    ) -> list[_Option]:
        """Return the options that need no prediction: the plan's choice, and the best measured
        config."""
        if planned is not None and top == 1:
            return [_Option("pinned", planned.candidate, None)]
        model = self._own_model(type(problem), device)
        best = model.measured.get(str(problem)) if model else None
        options = []
        if planned is not None:
            options.append(_Option("pinned", planned.candidate, None))
        known = best is not None and (planned is None or best.candidate != planned.candidate)
        if best is not None and known and self._keeps_within(problem, best.candidate):
            options.append(_Option("measured", best.candidate, best.time_ms * 1e-3))
        return options

    def _plan_for(self, problem: Record, device: Device) -> Choice | None:
        """Return the plan's choice for a problem, if it keeps within the limits; with the time that
        is expected where a person wrote it, who gives none."""
        planned = self._planned.get((problem, device.key))
        if planned is None or not self._keeps_within(problem, planned.candidate):
            return None
        time_ms = planned.predicted_ms
        if planned.source == "pinned" and time_ms is None:
            model = self._own_model(type(problem), device)
            seconds = _expected_s(problem, device, model, planned.candidate)
            time_ms = None if seconds is None else seconds * 1e3
        return replace(planned, source="pinned", model=None, predicted_ms=time_ms)

    def _keeps_within(self, problem: Record, candidate: Candidate) -> bool:
        if candidate == PYTORCH_OPERATOR:
            return True
        row = np.array([candidate.config_id], np.intp)
        return len(within(all_families()[candidate.provider], problem, row, self._limits)) == 1

    def _found(self, asked: Sequence[_Asked]) -> list[_Found]:
        """Predict, or else estimate, for each question."""
        alike: dict[type[Record], list[int]] = {}
        for i, (problem, _, _) in enumerate(asked):
            alike.setdefault(type(problem), []).append(i)
        found = [_Found()] * len(asked)
        for kind, places in alike.items():
            _, device, top = asked[places[0]]
            model = self._model(kind, device)
            if model is None:
                continue
            own = model is self._own_model(kind, device)
            source: Source = "predicted" if own else "transferred"
            problems = [asked[i][0] for i in places]
            predicted = _predicted(problems, device, model, top, self._limits)
            trusts = self._trusts(problems, device, model, top, predicted)
            for i, options, known in zip(places, predicted, trusts, strict=True):
                own_options = [_Option(source, c, seconds) for seconds, c in options]
                found[i] = _Found(own_options, known, _seconds_of(PYTORCH_OPERATOR, options))
        return [
            each if each.options else _Found(_estimated(problem, device, top, self._limits))
            for each, (problem, device, top) in zip(found, asked, strict=True)
        ]

    def _trusts(
        self,
        problems: Sequence[Record],
        device: Device,
        model: Model,
        top: int,
        predicted: Sequence[Options],
    ) -> list[Trust]:
        """How far the first prediction for each problem can be trusted, which does not depend on
        how many were asked for."""
        if top > 1:
            best = (self._best((problem, device, 1))[0] for problem in problems)
            return [Trust(choice.regret_bound, choice.extrapolated) for choice in best]
        found = [_UNKNOWN] * len(problems)
        served = [i for i, options in enumerate(predicted) if options]
        if self._limits != UNLIMITED or not served:
            return found  # nothing was calibrated for what is left within limits
        # Nothing was calibrated for a device without a model of its own.
        trusts = model.bounds.of(
            [problems[i] for i in served], model.device, [predicted[i] for i in served]
        )
        for i, (bound, extrapolated) in zip(served, trusts, strict=True):
            found[i] = Trust(bound if model.device.key == device.key else None, extrapolated)
        return found

    def _choices(
        self,
        problem: Record,
        device: Device,
        top: int,
        planned: Choice | None,
        options: Sequence[_Option],
        found: _Found,
    ) -> tuple[Choice, ...]:
        """Spell out the first `top` of `options`, or the fallback if there are none."""
        if planned is not None and top == 1:
            return (planned,)  # so that a start from a plan loads no model
        model = self._model(type(problem), device)
        options = options or [_Option("fallback", PYTORCH_OPERATOR, None)]
        first = found.trust if options[0].source in ("predicted", "transferred") else _UNKNOWN
        trusts = [first, *[_UNKNOWN] * (len(options) - 1)]
        pytorch_s = found.pytorch_s
        if pytorch_s is None and options[0].source == "measured" and model is not None:
            pytorch_s = _pytorch_beside(problem, device, model, options[0])
        choices = [
            _choice(problem, device, option, model, trust, pytorch_s)
            for option, trust in zip(options[:top], trusts, strict=False)
        ]
        return tuple(choices) if planned is None else (planned, *choices[1:])


def _checked(problem: object) -> Record:
    if not isinstance(problem, Record):
        raise InvalidInput("problem", problem, "a problem, such as a confpred.Problem")
    return problem


def _accepted(choices: Sequence[Choice], max_regret: float) -> list[Choice]:
    return with_fallback(choices, check_max_regret(max_regret))


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
) -> list[Options]:
    """For each of `problems` at least `top` candidates within `limits`, if the families that
    `model` knows have them, and PyTorch's own operator, in the order of the answer, with their
    seconds. Empty where nothing is legal."""
    found = rank_families(model.families, model.gate, problems, device, top, limits)
    served = [i for i, options in enumerate(found) if options]
    if served and model.pytorch is not None:
        asked = [problems[i] for i in served]
        slowdowns = model.pytorch.slowdowns(asked, device)
        # PyTorch's operator was compared with the fastest config of all.
        every = [found[i] for i in served]
        if limits != UNLIMITED:
            every = rank_families(model.families, model.gate, asked, device, top)
        for i, options, slowdown in zip(served, every, slowdowns, strict=True):
            found[i] = with_pytorch(found[i], slowdown, (options or found[i])[0][0])
    return found


def _estimated(problem: Record, device: Device, top: int, limits: Limits) -> list[_Option]:
    """The configs of all families by their own estimates, fastest first; empty if none is legal.

    Estimates are too rough to be compared with anything but one another.
    """
    found: Options = []
    for name, family in kernels_of(problem).items():
        rows, seconds = rank_by_estimate(family, problem, device)
        kept = np.isin(rows, first_within(family, problem, rows, limits, top))
        first = zip(seconds[kept][:top].tolist(), rows[kept].tolist(), strict=False)
        found += [(value, Candidate(name, row)) for value, row in first]
    return [_Option("heuristic", candidate, seconds) for seconds, candidate in sorted(found)]


def _seconds_of(candidate: Candidate, options: Options) -> float | None:
    return next((seconds for seconds, found in options if found == candidate), None)


def _pytorch_beside(
    problem: Record, device: Device, model: Model, measured: _Option
) -> float | None:
    """Seconds that PyTorch's operator is expected to take beside the best that was measured."""
    if measured.candidate == PYTORCH_OPERATOR or measured.seconds is None:
        return measured.seconds
    if model.pytorch is None:
        return None
    return measured.seconds * model.pytorch.slowdowns([problem], device)[0][0]


def _expected_s(
    problem: Record, device: Device, model: Model | None, candidate: Candidate
) -> float | None:
    """Seconds that `candidate` is expected to take."""
    if candidate == PYTORCH_OPERATOR:
        predicted = _predicted([problem], device, model)[0] if model else []
        return _seconds_of(candidate, predicted)
    row = np.array([candidate.config_id], np.intp)
    learned = model.families.get(candidate.provider) if model else None
    if learned is None:
        family = all_families()[candidate.provider]
        return float(family.estimate_s(problem, device, row)[0])
    return float(learned.rank(problem, device, row)[1][0])


def _choice(
    problem: Record,
    device: Device,
    option: _Option,
    model: Model | None,
    known: Trust,
    pytorch_s: float | None,
) -> Choice:
    return Choice(
        problem,
        device.key,
        option.source,
        option.candidate,
        predicted_ms=None if option.seconds is None else option.seconds * 1e3,
        pytorch_ms=None if pytorch_s is None else pytorch_s * 1e3,
        regret_bound=known.bound,
        extrapolated=known.extrapolated,
        model=model.version if model and option.source in _OF_MODELS else None,
        donor=model.device.key if model and option.source == "transferred" else None,
    )


def distance(one: Device, other: Device) -> float:
    """How unlike two devices are: the largest ratio among their sizes and rates, in doublings."""
    pairs = (
        (one.sm_count, other.sm_count),
        (one.smem_per_sm, other.smem_per_sm),
        (one.warps_per_sm, other.warps_per_sm),
        (one.dram_bytes_per_s, other.dram_bytes_per_s),
        (one.tensor_flops, other.tensor_flops),
        (one.simt_flops, other.simt_flops),
    )
    return max(abs(math.log2(a / b)) for a, b in pairs)


def donor_for(models: Mapping[str, Model], device: Device, problem: type) -> Model | None:
    """The model that is to answer for `device`, which has none: of those of `models` (by device
    key) that know problems of the class `problem`, the nearest device's; None if none does."""
    described = {key: KNOWN.get(key) or models[key].device for key in models}
    for key in sorted(described, key=lambda key: (distance(described[key], device), key)):
        if models[key].operation.problem is problem:
            return models[key]
    return None
