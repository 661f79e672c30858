"""From a problem to a choice: a pinned or measured one, else candidates -> cost -> compare.

A device without a model gets the answers of the nearest device's model, which has learned ratios of
times: to a problem's best config, and to the roofline. Legality and features, such as waves, are
those of the device that is asked for. `benchmarks/model/transfer.py` measures the loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from confpred.concurrency import Recent, Remembered
from confpred.errors import InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate, within
from confpred.families.registry import family_of, kernels_of, operation_named
from confpred.model.bounds import Trust
from confpred.model.folder import Model, NewestModels, load_model
from confpred.model.rank import Options, rank_by_estimate, rank_families, with_pytorch
from confpred.predict.choice import (
    Choice,
    Source,
    check_max_regret,
    check_top,
    launch_ms,
    with_fallback,
)
from confpred.predict.plan import Plan, read_plan
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.device import KNOWN, Device, get_device, is_near
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.record import Record

#: How many answers are cached, or up to twice as many: choices of 2 kB, rankings of 16 kB.
BEST_KEPT = 8_192
RANKINGS_KEPT = 512
#: For how many limits predictors, and their cached answers, are kept, or up to twice as many.
_LIMITS_KEPT = 2
#: Most problems that are predicted together: more would be no faster, and each takes about 1.4 MB
#: during the prediction.
TOGETHER = 16
#: Choices of an answer that need no prediction, at most: the plan's and the best measured.
_MOST_SETTLED = 2
_Asked = tuple[Record, Device, int]  # the problem, for which device, and how many choices


class Predictor:
    """Chooses configs. Immutable after loading; safe to share between threads, and to fork.

    The same problem and device always get the same answer, to the bit. The latest answers are
    cached, and of several threads with the same question one computes the answer.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        plan: Plan | None = None,
        *,
        further: Mapping[type[Record], Mapping[str, Model]] = MappingProxyType({}),
    ) -> None:
        """Use `models`, by device key, which must not change, and follow `plan` first.

        Args:
            models: models of one operation, by device key.
            plan: choices that are taken as they are.
            further: models of further operations, by device key, for each class of problems.
        """
        self._models, self._further = MappingProxyType(models), further
        #: The limits that all choices keep within.
        self.limits = UNLIMITED
        self._within: Recent[Limits, Predictor] = Recent(_LIMITS_KEPT)
        self._planned = {(c.problem, c.device): c for c in (plan.choices if plan else ())}
        self._best = Remembered(self._answer_all, BEST_KEPT)
        self._ranking = Remembered(self._answer_all, RANKINGS_KEPT)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        plan: str | Path | Plan | None = None,
        device: str | Device | None = None,
        operation: str = CONVOLUTION.name,
        further: Iterable[str] = (),
    ) -> Predictor:
        """Load a model folder, or the newest model of each device that ships with the package.

        Args:
            model: a folder that ``confpred train`` wrote, or one that holds such folders, of which
                each device gets its newest.
            plan: choices that are taken as they are (`confpred.predict.plan`): a `Plan`, a file, or
                a folder, whose compiled kernels are not loaded here.
            device: refuse a plan whose choices are all for other devices.
            operation: the operation of the package's models, where `model` is None.
            further: further operations, for whose problems the package's models of them choose.

        Raises:
            ModelError: the folder is missing, damaged or foreign.
            DataError, InvalidInput: the plan is not valid, or for other kernels or devices.
        """
        if model is None:
            models: Mapping[str, Model] = NewestModels(operation=operation)
        else:
            loaded = NewestModels(Path(model)).values() or (load_model(Path(model)),)
            models = {loaded_model.device.key: loaded_model for loaded_model in loaded}
        if isinstance(plan, str | Path):
            plan = read_plan(Path(plan), device)
        others = {operation_named(n).problem: NewestModels(operation=n) for n in further}
        return cls(models, plan, further=others)

    @property
    def models(self) -> Mapping[str, Model]:
        """The models in use, by device key, without those of further operations."""
        return self._models

    @property
    def planned(self) -> tuple[Choice, ...]:
        """Choices of the plan that is followed; empty without one."""
        return tuple(self._planned.values())

    def following(self, plan: Plan) -> Predictor:
        """Return a predictor that follows `plan`, and else the plan and the models of this one."""
        followed = Predictor(self._models, plan, further=self._further)
        followed._planned = self._planned | followed._planned
        followed.limits = self.limits
        return followed

    def within(self, limits: Limits) -> Predictor:
        """Return a predictor that chooses as this one does among candidates within `limits` and its
        own; a plan's choices and measured configs outside of them are skipped.

        Raises:
            InvalidInput: `limits` is not a confpred.Limits.
        """
        if not isinstance(limits, Limits):
            raise InvalidInput("limits", limits, "a confpred.Limits")
        if (limits := limits & self.limits) == self.limits:
            return self
        limited = self._within.get(limits)
        if limited is None:
            limited = Predictor(self._models, further=self._further)
            limited._planned, limited.limits = self._planned, limits
            self._within.put(limits, limited)
        return limited

    def choose(
        self, problem: Record, device: str | Device, *, max_regret: float | None = None
    ) -> Choice:
        """Return the best config known for `problem` on `device`; never fails for a valid problem.

        Args:
            problem: the layer, such as a `confpred.Problem`.
            device: the GPU that runs it.
            max_regret: where the bound on the choice's regret is above it, or there is none, the
                answer is PyTorch's own operator, as a ``fallback``: measure then, or pin a config.

        Raises:
            InvalidInput: `problem` is not a `Problem`, or the record of another operation, or
                `max_regret` is below 1.
            UnknownDevice: no description of `device` is known.
            ModelError: trees of the model are damaged, though their digests are right.
        """
        return _limit_regret(self._answer(problem, self._device(device), 1), max_regret)[0]

    def choose_many(
        self,
        problems: Iterable[Record],
        device: str | Device,
        *,
        max_regret: float | None = None,
    ) -> list[Choice]:
        """Return the `choose` of each of `problems`, in order; new ones are predicted together."""
        target = self._device(device)
        asked = [(_checked(problem), target, 1) for problem in problems]
        parts = (asked[i : i + TOGETHER] for i in range(0, len(asked), TOGETHER))
        answers = (choices for part in parts for choices in self._best.many(part))
        return [_limit_regret(choices, max_regret)[0] for choices in answers]

    def rank(
        self,
        problem: Record,
        device: str | Device,
        top: int = 5,
        *,
        max_regret: float | None = None,
    ) -> list[Choice]:
        """Return the best `top` choices, best first; one ``fallback`` choice if no kernel is legal.
        With `max_regret`, the first one is what `choose` says, and predictions follow.

        Raises:
            InvalidInput: `top` is not an integer from 1 to ``MAX_TOP``; others as of `choose`.
            UnknownDevice: no description of `device` is known.
        """
        choices = self._answer(problem, self._device(device), check_top(top))
        return list(_limit_regret(choices, max_regret))

    def expected_ms(
        self, problem: Record, device: str | Device, candidate: Candidate
    ) -> float | None:
        """Return the milliseconds that `candidate` is expected to take for `problem`; None if no
        model predicts them, as for PyTorch's operator where no confpred kernel is legal.

        Raises:
            UnknownDevice: no description of `device` is known.
        """
        target = self._device(device)
        if candidate == PYTORCH_OPERATOR:
            remembered = self._best((_checked(problem), target, 1))[0].pytorch_ms
            if remembered is not None:
                return remembered
        return _expected_ms(problem, target, self._answering(type(problem), target), candidate)

    def _answer(self, problem: Record, device: Device, top: int) -> tuple[Choice, ...]:
        remembered = self._best if top == 1 else self._ranking
        return remembered((_checked(problem), device, top))

    def _device(self, name: str | Device) -> Device:
        """Return the device called `name`; one that no table has may be described by a model."""
        if isinstance(name, str) and name not in KNOWN and name in self._models:
            return self._models[name].device
        return get_device(name)

    def own_model(self, kind: type[Record], device: Device) -> Model | None:
        """Return the model of `device` for problems of this class; None if it has none."""
        model = self._further.get(kind, self._models).get(device.key)
        return model if model and model.operation.problem is kind else None

    def _answering(self, kind: type[Record], device: Device) -> Iterator[Model]:
        """Yield the models that answer for `device` about problems of this kind, one after the
        other where those before serve none: its own or the nearest device's, then those of devices
        of its architecture, which may know more families."""
        models = nearest_models(self._further.get(kind, self._models), device, kind)
        yield from itertools.islice(models, 1)
        yield from itertools.takewhile(lambda model: is_near(device, model.device), models)

    def _answer_all(self, asked: Sequence[_Asked]) -> list[tuple[Choice, ...]]:
        """Return the answers to questions of `asked`, which are all about one device and the same
        number of choices."""
        if self.limits.deterministic:
            asked = [(_ask_repeatable(problem), device, top) for problem, device, top in asked]
        choices = [self._choices_before_model(*one) for one in asked]
        short = [i for i, (_, _, top) in enumerate(asked) if len(choices[i]) < top]
        for i, predicted in zip(short, self._predict([asked[i] for i in short]), strict=True):
            if choices[i]:  # these follow them, and a bound is of a first choice alone
                predicted = [replace(c, regret_bound=None, extrapolated=False) for c in predicted]
            listed = {choice.candidate for choice in choices[i]}
            choices[i] += [choice for choice in predicted if choice.candidate not in listed]
        return [
            self._with_pytorch_ms(mine[:top] or [Choice(problem, device.key, "fallback")], device)
            for (problem, device, top), mine in zip(asked, choices, strict=True)
        ]

    def _choices_before_model(self, problem: Record, device: Device, top: int) -> list[Choice]:
        """Return the choices that need no prediction: the plan's, and the best measured config."""
        planned = self._plan_for(problem, device)
        if planned is not None and top == 1:
            return [planned]  # so that a start from a plan loads no model
        settled = [] if planned is None else [planned]
        model = self.own_model(type(problem), device)
        best = model.measured.get(str(problem)) if model else None
        if model is None or best is None or not self._keeps_within(problem, best.candidate):
            return settled
        if planned is None or planned.candidate != best.candidate:
            ms = best.time_ms * 1e-3 * 1e3  # rounded as predictions are, which are in seconds
            one = Choice(problem, device.key, "measured", best.candidate, ms, model=model.version)
            settled.append(one)
        return settled

    def _plan_for(self, problem: Record, device: Device) -> Choice | None:
        """Return the plan's choice for a problem, if it is within the limits; with the expected
        time where the plan has none."""
        planned = self._planned.get((problem, device.key))
        if planned is None or not self._keeps_within(problem, planned.candidate):
            return None
        time_ms = planned.predicted_ms
        if planned.source == "pinned" and time_ms is None:
            model = self.own_model(type(problem), device)
            time_ms = _expected_ms(problem, device, [model] if model else [], planned.candidate)
        return replace(planned, source="pinned", model=None, predicted_ms=time_ms)

    def _keeps_within(self, problem: Record, candidate: Candidate) -> bool:
        if candidate == PYTORCH_OPERATOR:
            return True
        row = np.array([candidate.config_id], np.intp)
        return len(within(family_of(candidate), problem, row, self.limits)) == 1

    def _predict(self, asked: Sequence[_Asked]) -> list[list[Choice]]:
        """Predict, or else estimate, choices for each question, best first; the first has the
        bound. They fill the answer, even if some are the choices that need no prediction."""
        ranked: dict[Record, list[Choice]] = {}
        for kind in {type(problem): None for problem, _, _ in asked}:
            _, device, top = asked[0]
            problems = [problem for problem, _, _ in asked if type(problem) is kind]
            for model in self._answering(kind, device):
                ranked |= self._predict_by(model, problems, device, top)
                problems = [problem for problem in problems if not ranked[problem]]
                if not problems:
                    break
        return [ranked.get(one[0]) or _rank_by_estimate(*one, self.limits) for one in asked]

    def _predict_by(
        self, model: Model, problems: Sequence[Record], device: Device, top: int
    ) -> dict[Record, list[Choice]]:
        """Return the choices of `model` for each of `problems`, best first; none where it serves
        no config."""
        own = model.device.key == device.key
        source: Source = "predicted" if own else "transferred"
        ranked: dict[Record, list[Choice]] = {}
        predicted = _rank_by_model(problems, device, model, top, self.limits)
        trusts = self._trusts(problems, device, model, top, predicted)
        for problem, options, trust in zip(problems, predicted, trusts, strict=True):
            one = Choice(
                *(problem, device.key, source),
                model=model.version,
                pytorch_ms=_ms_of(PYTORCH_OPERATOR, options),
                donor=None if own else model.device.key,
                is_near=not own and is_near(device, model.device),
            )
            ranked[problem] = choices = [
                replace(one, candidate=candidate, predicted_ms=launch_ms(seconds))
                for seconds, candidate in options[: top + _MOST_SETTLED]
            ]
            bound, extrapolated = trust
            choices[:1] = [  # none if nothing is legal
                replace(first, regret_bound=bound, extrapolated=extrapolated)
                for first in choices[:1]
            ]
        return ranked

    def _trusts(
        self,
        problems: Sequence[Record],
        device: Device,
        model: Model,
        top: int,
        predicted: Sequence[Options],
    ) -> list[Trust]:
        """Return how far the first prediction for each problem can be trusted.

        Args:
            problems: problems of the model's operation.
            device: the device that is asked for.
            model: the model that predicted, perhaps of another device.
            top: how many choices are asked for; for several, the trust is that of the single one.
            predicted: the candidates for each problem, in the order of the answer.
        """
        if top > 1:
            best = (self._best((problem, device, 1))[0] for problem in problems)
            return [Trust(choice.regret_bound, choice.extrapolated) for choice in best]
        trusts = [Trust(None, False)] * len(problems)
        served = [i for i, options in enumerate(predicted) if options]
        if self.limits != UNLIMITED or not served:
            return trusts  # bounds are calibrated without limits alone
        calibrated = model.bounds.of(
            [problems[i] for i in served], model.device, [predicted[i] for i in served]
        )
        # No bound is calibrated for a device without a model of its own.
        own = model.device.key == device.key
        for i, (bound, extrapolated) in zip(served, calibrated, strict=True):
            trusts[i] = Trust(bound if own else None, extrapolated)
        return trusts

    def _with_pytorch_ms(self, choices: list[Choice], device: Device) -> tuple[Choice, ...]:
        """Return `choices` with the time of PyTorch's operator, if one of them is measured: as it
        was predicted, else as measured, else by its predicted ratio to the best measured config."""
        first = choices[0]
        if all(choice.source != "measured" for choice in choices):
            return tuple(choices)
        ms = next((c.pytorch_ms for c in choices if c.source == "predicted"), None)
        if ms is None and first.source == "measured" and first.predicted_ms is not None:
            model = self.own_model(type(first.problem), device)
            if first.candidate == PYTORCH_OPERATOR:
                ms = first.predicted_ms
            elif model is not None and model.pytorch is not None:
                (slowdown, _), *_ = model.pytorch.slowdowns([first.problem], device)
                best = model.measured[str(first.problem)]
                ms = best.time_ms * 1e-3 * slowdown * 1e3
        return tuple(c if c.source == "pinned" else replace(c, pytorch_ms=ms) for c in choices)


def _checked(problem: object) -> Record:
    if not isinstance(problem, Record):
        raise InvalidInput("problem", problem, "a problem, such as a confpred.Problem")
    return problem


def _limit_regret(choices: Sequence[Choice], max_regret: float | None) -> Sequence[Choice]:
    if max_regret is None:
        return choices
    return with_fallback(choices, check_max_regret(max_regret))


def _ask_repeatable(problem: Record) -> Record:
    """Return `problem` with ``deterministic`` set, if its results may differ from call to call."""
    asked = getattr(problem, "deterministic", True)
    if asked or getattr(problem, "direction", "wgrad") != "wgrad":
        return problem  # deterministic already
    strict: Record = replace(problem, deterministic=True)  # type: ignore[call-arg]
    return strict


def _rank_by_model(
    problems: Sequence[Record],
    device: Device,
    model: Model,
    top: int = 1,
    limits: Limits = UNLIMITED,
) -> list[Options]:
    """Return for each of `problems` at least `top` candidates within `limits`, if there are so
    many, and PyTorch's own operator, in the order of the answer; empty where none is legal."""
    ranked = rank_families(model.families_for(problems), model.gate, problems, device, top, limits)
    served = [i for i, options in enumerate(ranked) if options]
    if served and model.pytorch is not None:
        asked = [problems[i] for i in served]
        slowdowns = model.pytorch.slowdowns(asked, device)
        # The model compares PyTorch's operator with the fastest config without limits.
        unlimited = [ranked[i] for i in served]
        if limits != UNLIMITED:
            unlimited = rank_families(model.families_for(asked), model.gate, asked, device, top)
        for i, options, slowdown in zip(served, unlimited, slowdowns, strict=True):
            ranked[i] = with_pytorch(ranked[i], slowdown, (options or ranked[i])[0][0])
    return ranked


def _rank_by_estimate(problem: Record, device: Device, top: int, limits: Limits) -> list[Choice]:
    """Return the best `top` configs within `limits`, and a few more, by the families' own
    estimates, which are too rough to be compared with anything but one another."""
    options: Options = []
    for name, family in kernels_of(problem).items():
        rows, seconds = rank_by_estimate(family, problem, device)
        kept = np.isin(rows, within(family, problem, rows, limits, top))
        first = zip(seconds[kept][:top].tolist(), rows[kept].tolist(), strict=False)
        options += [(value, Candidate(name, row)) for value, row in first]
    return [
        Choice(problem, device.key, "heuristic", candidate, launch_ms(seconds))
        for seconds, candidate in sorted(options)[: top + _MOST_SETTLED]
    ]


def _ms_of(candidate: Candidate, options: Options) -> float | None:
    return next((launch_ms(seconds) for seconds, option in options if option == candidate), None)


def _expected_ms(
    problem: Record, device: Device, models: Iterable[Model], candidate: Candidate
) -> float | None:
    """Return the milliseconds that `candidate` is expected to take, by the first of `models` that
    knows; None if no model says."""
    if candidate == PYTORCH_OPERATOR:
        ranked = (_rank_by_model([problem], device, model)[0] for model in models)
        return _ms_of(candidate, next(filter(None, ranked), []))
    row = np.array([candidate.config_id], np.intp)
    for model in models:
        if (learned := model.families.get(candidate.provider)) is not None:
            return launch_ms(float(learned.rank(problem, device, row)[1][0]))
    return launch_ms(float(family_of(candidate).estimate_s(problem, device, row)[0]))


def distance(one: Device, other: Device) -> float:
    """Return the distance of two devices: the largest ratio of their sizes and rates, as log2."""
    sizes = ("sm_count", "smem_per_sm", "warps_per_sm")
    rates = ("dram_bytes_per_s", "tensor_flops", "simt_flops")
    ratios = (getattr(one, name) / getattr(other, name) for name in (*sizes, *rates))
    return max(abs(math.log2(ratio)) for ratio in ratios)


def nearest_models(models: Mapping[str, Model], device: Device, problem: type) -> Iterator[Model]:
    """Yield the models of `models` (by device key) for problems of the class `problem`: that of
    `device`, then the nearest devices'; one of the same architecture is nearer than all others."""

    def order(key: str) -> tuple[bool, bool, float, str]:
        described = KNOWN.get(key) or models[key].device  # which may have to be loaded
        far = not is_near(device, described)
        return key != device.key, far, distance(described, device), key

    for key in sorted(models, key=order):
        if models[key].operation.problem is problem:
            yield models[key]
