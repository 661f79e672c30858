"""A model of one's own GPU: measured, trained, compared with the present choices, and published if
it is better.

    measure   the problems of most worth, for most of the budget   rows/
    train     on these, earlier sessions' and the user's data      model-<n>/
    judge     old and new choose for networks held out for good,
              and the choices that differ are measured             judged-<n>/
    publish   if the new choices are faster by more than chance    the user's models

Each step leaves its result, whole, in the session's folder, so a run that is stopped or killed
goes on from there; ``session.json`` there has the part of the budget that is spent. No model is
trained on rows to judge by.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.data.measurements import Run
from confpred.data.suites import Entry, Suite
from confpred.errors import DataError, InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import operation_of
from confpred.files import read_json, user_folder, write_json
from confpred.model.card import CARD
from confpred.model.folder import Model, NewestModels, load_model, publish, users_models
from confpred.predict.predictor import Predictor, nearest_models
from confpred.problem.device import Device
from confpred.problem.record import Record
from confpred.retraining import offers
from confpred.retraining.drift import times_in
from confpred.retraining.offers import Costs, is_held_out, judged_as
from confpred.sampler.run import Here, Sampling, Tally, sample
from confpred.sampler.store import measured_in
from confpred.sampler.tasks import Task
from confpred.training.dataset import read_dataset
from confpred.training.fit import Hyperparameters
from confpred.training.train import train
from confpred.triton.problem import KernelCall

log = logging.getLogger(__name__)
FORMAT = "confpred-retrain/1"
#: Share of the budget for judging; the other part is for rows to train on.
JUDGING = 0.2
#: Seconds between two saves of the session, so that a kill loses no more of the spent budget.
_SAVED_EVERY_S = 5.0
#: Networks and problems that a verdict needs.
LEAST_NETWORKS, LEAST_PROBLEMS = 3, 10
#: Chance that a model which is no better is called better.
RISK = 0.1
#: Above this ratio a choice counts as slower.
SLOWER = 1.05
_RESAMPLES = 2_000
Show = Callable[[Tally], None]


@dataclass(frozen=True, slots=True)
class Request:
    """Inputs of a retraining session."""

    device: Device
    runs: Mapping[int, Run]  # the CUDA number of the GPU, and the columns that its rows share
    suite: Suite  # problems to learn from and to judge by
    budget_s: float  # of measuring, compilations included
    data: tuple[Path, ...]  # further measurements to train on, of this device or another
    folder: Path  # folder of the session
    settings: Sampling  # of the sampler; their budget and choice of configs do not count
    hyper: Hyperparameters | None = None
    kept: tuple[Path, ...] = ()  # what tuning has measured (`confpred.sampler.kept`)


@dataclass(frozen=True, slots=True)
class RetrainingReport:
    """Result of a retraining session."""

    verdict: Verdict | None  # new against old; None if the run was stopped before it
    published: Path | None  # folder of the new model, if it is in use now
    old: str | None  # version of the model that was in use, if there was one


def retrain(
    request: Request,
    *,
    interrupts: Callable[[], int] = lambda: 0,
    show: Show = lambda tally: None,
    say: Callable[[str], None] = log.info,
) -> RetrainingReport:
    """Begin a session, or go on with the one that has no verdict yet.

    Args:
        request: see `Request`.
        interrupts: how often the user asked to stop; once ends it after what is in flight.
        show: called about ten times a second while the GPU measures.
        say: called with a line at each step.

    Raises:
        FolderBusy, StorageError, DataError: the session's folder cannot be used.
        LaunchError: the GPU fails whatever it is given.
        ModelError: the model in use is damaged.
        ConfpredError: the compiler cannot be used.
    """
    models = NewestModels()
    own = models.get(request.device.key)
    old = None if own is None else own.version
    session = open_session(request.folder, None if own is None else own.digest)
    log.debug("%s", session)
    run = _Retraining(request, session, models, interrupts, show, say)
    if not (run.trained / CARD).exists():
        run.learn()
        if interrupts():
            return RetrainingReport(None, None, old)
        run.train()
    pairs = run.judge()
    if interrupts():
        return RetrainingReport(None, None, old)
    verdict = compare(pairs)
    published = publish(run.trained, users_models()) if verdict.better else None
    save(request.folder, replace(run.session, done=True))
    shutil.rmtree(run.trained)
    return RetrainingReport(verdict, published, old)


@dataclass(slots=True)
class _Retraining:
    """The steps of a session, with their shared state."""

    request: Request
    session: Session
    models: Mapping[str, Model]
    interrupts: Callable[[], int]
    show: Show
    say: Callable[[str], None]

    @property
    def trained(self) -> Path:
        return self.request.folder / f"model-{self.session.number}"

    def learn(self) -> None:
        request, number = self.request, self.session.number
        left = request.budget_s * (1 - JUDGING) - self.session.learning_s
        if left <= 0:
            return
        kind, device = type(request.suite.entries[0].problem), request.device
        model = next(nearest_models(self.models, device, kind), None)
        of = "nothing" if model is None else f"model {model.version}"
        self.say(f"session {number}: measuring for {left:.0f} s what {of} has most to learn from")
        predictor = Predictor(self.models)

        def chosen(measured: offers.Have) -> list[Task]:
            measured = self.with_kept(measured)
            what, settings = (request.suite, device, model, predictor), request.settings
            costs = Costs(processes=settings.processes)
            how: dict[str, Any] = {"costs": costs, "seed": number, "pytorch": settings.pytorch}
            return offers.tasks_to_learn(*what, measured=measured, budget_s=left, **how)

        self.measure("rows", "learning_s", left, chosen)

    def with_kept(self, measured: offers.Have) -> offers.Have:
        """Return what is measured, here or by tuning."""
        operation, every = operation_of(self.request.suite.entries[0].problem), dict(measured)
        for folder in self.request.kept:
            for key, configs in measured_in(folder, operation, self.request.device.key).items():
                every[key] = {*every.get(key, ()), *configs}
        return every

    def train(self) -> None:
        rows, kept = self.request.folder / "rows", self.request.kept
        own = [] if kept and not any(rows.glob("*.parquet")) else [rows]  # nothing was left
        data = [*self.request.data, *kept, *own]
        dataset = read_dataset(data, self.request.device.key)
        # A layer to judge by may come from another device, or under the name of no or of another
        # network.
        judging = {entry.problem.layer() for entry in offers.to_judge_by(self.request.suite)}
        judging |= {t.problem.layer() for t in dataset.everywhere if is_held_out(t.networks)}
        learned = {t.problem for t in dataset.everywhere if t.problem.layer() not in judging}
        dataset = dataset.restricted(learned)
        networks = {name for t in dataset.timings for name in t.networks}
        problems = {t.problem for t in dataset.timings}
        self.say(
            f"training on {dataset.rows:,} times of {len(problems):,} problems of "
            f"{len(networks)} networks"
        )
        regret = train(dataset, self.trained, hyper=self.request.hyper)
        self.say(f"its regret on networks held out of training: geomean {regret.geomean:.3f}")

    def judge(self) -> list[Pair]:
        request, device = self.request, self.request.device
        old_one = Predictor(self.models)
        new_one = Predictor({device.key: load_model(self.trained)})
        entries = offers.to_judge_by(request.suite)
        order = np.random.default_rng(self.session.number).permutation(len(entries))
        picked = [
            (e, running(old_one, e.problem, device), running(new_one, e.problem, device))
            for e in (entries[i] for i in order)
        ]
        differing = [(entry, {old, new}) for entry, old, new in picked if old != new]
        self.say(
            f"judging: of {len(picked)} problems of networks that it has not learned from, the new "
            f"model chooses differently for {len(differing)}"
        )

        def chosen(measured: offers.Have) -> list[Task]:
            have = {(key.problem, key.provider) for key in measured}
            if not request.settings.pytorch:
                have |= {(entry.problem, PYTORCH_OPERATOR.provider) for entry, _ in differing}
            tasks = [t for entry, both in differing for t in offers.tasks_to_judge(entry, both)]
            return [task for task in tasks if (task.problem, task.provider) not in have]

        name = f"judged-{self.session.number}"
        left = max(request.budget_s * JUDGING - self.session.judging_s, 0.0)
        self.measure(name, "judging_s", left, chosen)
        operation = operation_of(request.suite.entries[0].problem)
        return pairs_of(picked, times_in(request.folder / name, operation))

    def measure(
        self, name: str, clock: str, budget_s: float, chosen: Callable[[offers.Have], list[Task]]
    ) -> None:
        """Measure the tasks of `chosen` into the session's folder `name`. Add the seconds to the
        session's field `clock`, now and then and at the end."""
        before, saved = self.session, 0.0

        def spend(seconds: float) -> None:
            nonlocal saved
            saved = seconds
            self.session = replace(before, **{clock: getattr(before, clock) + seconds})
            save(self.request.folder, self.session)

        def shown(tally: Tally) -> None:
            if tally.elapsed_s - saved > _SAVED_EVERY_S:
                spend(tally.elapsed_s)
            self.show(tally)

        spend(0.0)
        settings = replace(self.request.settings, budget_s=budget_s)
        here, folder = Here(self.request.runs, settings), self.request.folder / name
        what = (self.request.suite, folder, here, settings)
        tally = sample(*what, chosen=chosen, interrupts=self.interrupts, show=shown)
        spend(tally.elapsed_s)


def running(predictor: Predictor, problem: Record, device: Device) -> Candidate:
    """Return the choice that PyTorch runs: PyTorch's operator if the choice is not launched."""
    choice = predictor.choose(problem, device)
    return choice.candidate if choice.is_launched else PYTORCH_OPERATOR


def pairs_of(
    picked: Sequence[tuple[Entry, Candidate, Candidate]],
    times: Mapping[tuple[Record, Candidate], float],
) -> list[Pair]:
    """Return old and new times of each problem that has both. Where both choices are the same, no
    time is needed; as large a share of these problems counts as of the others, which the budget may
    cut short."""
    same = [Pair(judged_as(entry.networks), 1.0, 1.0) for entry, old, new in picked if old == new]
    differing = [
        (
            judged_as(entry.networks),
            times.get((entry.problem, old)),
            times.get((entry.problem, new)),
        )
        for entry, old, new in picked
        if old != new
    ]
    timed = [Pair(name, a, b) for name, a, b in differing if a is not None and b is not None]
    return same if not differing else timed + same[: round(len(same) * len(timed) / len(differing))]


def check_suite(suite: Suite) -> None:
    """Check that `suite` has problems to train on and problems to judge by.

    Raises:
        DataError: it has no problem of a held-out network, or none that only others have.
        InvalidInput: it is of a Triton kernel, whose model lies beside the kernel, where retraining
            writes nothing.
    """
    # All problems of a suite are of one operation.
    if isinstance(suite.entries[0].problem, KernelCall):
        allowed = "a suite of layers; of a Triton kernel, sample more into its folder, then train"
        raise InvalidInput("suite", suite.name, allowed)
    if not offers.to_judge_by(suite) or not offers.to_learn_from(suite):
        raise DataError(
            f"suite {suite.name}: retraining holds about one network in ten out, by its name, and "
            "needs problems of these and of others; give a suite of more networks"
        )


@dataclass(frozen=True, slots=True)
class Session:
    """State of a retraining session, as ``session.json`` has it."""

    #: Number of the session in its folder, from 1. It seeds random draws, so that each session
    #: draws anew and a resumed one draws the same.
    number: int
    old: str | None  # digest of the model to beat, if the device has one
    learning_s: float = 0.0  # seconds of measuring so far, to train on ...
    judging_s: float = 0.0  # ... and to judge by
    done: bool = False  # whether it has a verdict


def default_folder(device: str) -> Path:
    """Return the folder of the sessions for the device with this key."""
    return user_folder("data") / "retrain" / device


def open_session(folder: Path, old: str | None) -> Session:
    """Return the session to continue: the last one of `folder` if it has no verdict and was begun
    against the same model, else a new one.

    Raises:
        DataError: the folder's ``session.json`` is damaged.
    """
    path = folder / "session.json"
    if not path.exists():
        return Session(1, old)
    content = read_json(path, "a retraining", FORMAT)
    content.pop("format")
    try:
        last = Session(**content)
        started = int(last.number)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    return Session(started + 1, old) if last.done or last.old != old else last


def save(folder: Path, session: Session) -> None:
    """Write `session` to ``session.json``.

    Raises:
        StorageError: the file system refused.
    """
    write_json(folder / "session.json", {"format": FORMAT, **asdict(session)})


@dataclass(frozen=True, slots=True)
class Pair:
    """Old and new time of a hold-out problem."""

    network: str  # a network that has it
    old_ms: float  # measured time of the present choice
    new_ms: float  # measured time of the new model's choice


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison."""

    better: bool  # whether the new model should be used
    why: str
    problems: int  # problems that were compared
    networks: int
    ratio: float | None = None  # geometric mean of (new time / old time), if enough was compared
    #: Upper bound on that ratio at a confidence of ``1 - RISK``, over networks drawn anew.
    at_most: float | None = None
    slower: int = 0  # problems on which the new choice is more than ``SLOWER`` times as slow ...
    faster: int = 0  # ... or as fast


def compare(pairs: Sequence[Pair], seed: int = 0) -> Verdict:
    """Return whether the new choices are faster, by more than chance could explain.

    Networks are resampled as a whole, because the layers of one are similar. If both models choose
    the same config, the ratio is 1 without a measurement.
    """
    names = sorted({pair.network for pair in pairs})
    if len(pairs) < LEAST_PROBLEMS or len(names) < LEAST_NETWORKS:
        why = (
            f"too little was compared: {len(pairs)} problems of {len(names)} networks, and it takes"
            f" {LEAST_PROBLEMS} of {LEAST_NETWORKS}; a larger budget measures more"
        )
        return Verdict(False, why, len(pairs), len(names))
    logs = np.log([pair.new_ms / pair.old_ms for pair in pairs])
    network = np.array([names.index(pair.network) for pair in pairs])
    ratio, at_most = float(np.exp(logs.mean())), _upper(logs, network, seed)
    slower, faster = (int((sign * logs > np.log(SLOWER)).sum()) for sign in (1, -1))
    better = at_most < 1.0
    if better:
        why = f"its choices take {ratio:.3f} of the time, at most {at_most:.3f}"
    elif ratio < 1.0:
        why = (
            f"its choices take {ratio:.3f} of the time, which may be chance (up to {at_most:.3f}): "
            "a larger budget tells more"
        )
    else:
        why = f"its choices are no faster: {ratio:.3f} of the time"
    why += f" ({faster} of {len(pairs)} problems faster, {slower} slower, by more than 5 %)"
    return Verdict(better, why, len(pairs), len(names), ratio, at_most, slower, faster)


def _upper(logs: NDArray[np.float64], network: NDArray[np.intp], seed: int) -> float:
    """Return the quantile ``1 - RISK`` of the geometric mean over networks drawn with
    replacement."""
    count = int(network.max()) + 1
    sums = np.bincount(network, logs, count)
    sizes = np.bincount(network, minlength=count)
    drawn = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return float(np.exp(np.quantile(means, 1 - RISK)))
