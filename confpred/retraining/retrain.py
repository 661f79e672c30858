"""A model of one's own GPU: measured, trained, compared with what runs today, and published if it
is better.

    measure   what teaches most, for most of the budget            rows/
    train     on that, on earlier sessions' and on given data      model-<n>/
    judge     old and new choose for networks held out for good,
              and what they choose differently is measured         judged-<n>/
    publish   if the new choices are faster by more than chance    the user's models

Each step leaves what it has done, whole, in the session's folder, so a run that is stopped or
killed goes on from there; ``session.json`` there says how much of the budget is spent. Rows to
judge by are never learned from.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import platformdirs
from numpy.typing import NDArray

from confpred.data.measurements import Run
from confpred.data.suites import Entry, Suite
from confpred.errors import DataError
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.families.registry import operation_of
from confpred.files import read_json, write_whole
from confpred.model.card import CARD
from confpred.model.folder import Model, NewestModels, load_model, publish, users_models
from confpred.predict.predictor import Predictor, donor_for
from confpred.problem.device import Device
from confpred.problem.record import Record
from confpred.retraining import offers
from confpred.retraining.drift import times_in
from confpred.retraining.offers import Costs, is_held_out
from confpred.sampler.run import Settings, Tally, sample
from confpred.sampler.tasks import Task
from confpred.training.dataset import Dataset, read_dataset
from confpred.training.fit import Hyperparameters
from confpred.training.train import train

log = logging.getLogger(__name__)
#: Share of the budget that goes to judging; the rest is for learning.
JUDGING = 0.2
#: A measurement of this many seconds is saved in the session, so that a kill loses no more.
_SAVED_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Request:
    """Inputs of a retraining.

    Attributes:
        device: the GPU's description.
        runs: its CUDA number, and what its rows share.
        suite: problems to learn from and to judge by.
        budget_s: seconds of measuring, compilations included.
        data: further measurements to learn from; rows of other devices are left out.
        folder: of the session (`confpred.retraining.retrain`).
        settings: how to sample; its budget and its choice of configs do not count.
        hyper: how trees grow.
    """

    device: Device
    runs: Mapping[int, Run]
    suite: Suite
    budget_s: float
    data: tuple[Path, ...]
    folder: Path
    settings: Settings
    hyper: Hyperparameters | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """How it ended.

    Attributes:
        verdict: old against new; None where the run was stopped before it.
        published: folder of the new model, where it is in use now.
        old: version of the model that was in use; None where there was none.
    """

    verdict: Verdict | None
    published: Path | None
    old: str | None


Show = Callable[[Tally], None]


def retrain(
    request: Request,
    *,
    interrupts: Callable[[], int] = lambda: 0,
    show: Show = lambda tally: None,
    say: Callable[[str], None] = log.info,
) -> Report:
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
    device, models = request.device, NewestModels()
    own = models.get(device.key)
    old = None if own is None else own.version
    session = open_session(request.folder, None if own is None else own.digest)
    log.debug("%s", session)
    session = _learn(request, session, models, interrupts, show, say)
    if interrupts():
        return Report(None, None, old)
    trained = request.folder / f"model-{session.number}"
    if not (trained / CARD).exists():
        _train(request, trained, say)
    session, pairs = _judge(request, session, models, load_model(trained), interrupts, show, say)
    if interrupts():
        return Report(None, None, old)
    verdict = compare(pairs)
    published = publish(trained, users_models()) if verdict.better else None
    save(request.folder, finished(session))
    shutil.rmtree(trained)
    return Report(verdict, published, old)


def _learn(
    request: Request,
    session: Session,
    models: Mapping[str, Model],
    interrupts: Callable[[], int],
    show: Show,
    say: Callable[[str], None],
) -> Session:
    left = request.budget_s * (1 - JUDGING) - session.learning_s
    trained = request.folder / f"model-{session.number}"
    if left <= 0 or (trained / CARD).exists():
        return session
    kind = type(request.suite.entries[0].problem)
    donor = models.get(request.device.key) or donor_for(models, request.device, kind)
    of = "nothing" if donor is None else f"model {donor.version}"
    say(f"session {session.number}: measuring for {left:.0f} s what {of} has most to learn from")
    predictor = Predictor(models)

    def chosen(measured: offers.Have) -> list[Task]:
        return offers.tasks_to_learn(
            request.suite,
            request.device,
            donor,
            predictor,
            measured=measured,
            costs=Costs(processes=request.settings.processes),
            budget_s=left,
            seed=session.number,
            pytorch=request.settings.pytorch,
        )

    def noted(seconds: float) -> Session:
        return replace(session, learning_s=session.learning_s + seconds)

    return _measure(request, "rows", left, chosen, noted, interrupts, show)


def _measure(
    request: Request,
    name: str,
    budget_s: float,
    chosen: Callable[[offers.Have], list[Task]],
    noted: Callable[[float], Session],
    interrupts: Callable[[], int],
    show: Show,
) -> Session:
    """Measure `chosen` into the session's folder `name`, and save what `noted` makes of the seconds
    that it took, now and then and at the end."""
    saved = 0.0
    save(request.folder, noted(0.0))

    def shown(tally: Tally) -> None:
        nonlocal saved
        if tally.elapsed_s - saved > _SAVED_EVERY_S:
            saved = tally.elapsed_s
            save(request.folder, noted(saved))
        show(tally)

    tally = sample(
        request.suite,
        request.folder / name,
        request.runs,
        replace(request.settings, budget_s=budget_s),
        chosen=chosen,
        interrupts=interrupts,
        show=shown,
    )
    session = noted(tally.elapsed_s)
    save(request.folder, session)
    return session


def _train(request: Request, out: Path, say: Callable[[str], None]) -> None:
    dataset = read_dataset([*request.data, request.folder / "rows"], request.device.key)
    networks = {name for t in dataset.timings for name in t.networks}
    held_out = sorted(name for name in networks if is_held_out([name]))
    say(
        f"training on {dataset.rows:,} times of {_problems(dataset):,} problems of "
        f"{len(networks) - len(held_out)} networks"
    )
    regret = train(dataset, out, exclude=held_out, hyper=request.hyper)
    say(f"its regret on networks held out of training: geomean {regret.geomean:.3f}")


def _problems(dataset: Dataset) -> int:
    return len({t.problem for t in dataset.timings})


def _judge(
    request: Request,
    session: Session,
    models: Mapping[str, Model],
    new: Model,
    interrupts: Callable[[], int],
    show: Show,
    say: Callable[[str], None],
) -> tuple[Session, list[Pair]]:
    device, settings = request.device, request.settings
    old_one, new_one = Predictor(models), Predictor({device.key: new})
    entries = offers.to_judge_by(request.suite)
    order = np.random.default_rng(session.number).permutation(len(entries))
    picked = [
        (entry, running(old_one, entry.problem, device), running(new_one, entry.problem, device))
        for entry in (entries[i] for i in order)
    ]
    differing = [(entry, {old, new}) for entry, old, new in picked if old != new]
    say(
        f"judging: of {len(picked)} problems of networks that it has not learned from, the new "
        f"model chooses differently for {len(differing)}"
    )
    left = max(request.budget_s * JUDGING - session.judging_s, 0.0)

    def chosen(measured: offers.Have) -> list[Task]:
        have = {(key.problem, key.provider) for key in measured}
        tasks = [t for entry, both in differing for t in offers.tasks_to_judge(entry, both)]
        if not settings.pytorch:
            tasks = [task for task in tasks if task.provider != PYTORCH_OPERATOR.provider]
        return [task for task in tasks if (task.problem, task.provider) not in have]

    def noted(seconds: float) -> Session:
        return replace(session, judging_s=session.judging_s + seconds)

    name = f"judged-{session.number}"
    after = _measure(request, name, left, chosen, noted, interrupts, show)
    operation = operation_of(request.suite.entries[0].problem)
    return after, pairs_of(picked, times_in(request.folder / name, operation))


def running(predictor: Predictor, problem: Record, device: Device) -> Candidate:
    """Return the choice that PyTorch runs: PyTorch's operator in the place of a guess."""
    choice = predictor.choose(problem, device)
    return PYTORCH_OPERATOR if choice.is_guess else choice.candidate


def pairs_of(
    picked: Sequence[tuple[Entry, Candidate, Candidate]],
    times: Mapping[tuple[Record, Candidate], float],
) -> list[Pair]:
    """Old and new times of each problem that both have a time for. Where they choose the same, no
    time is needed; of these, as many count as of the others, in proportion, because the others may
    be cut short by the budget."""
    found, same = [], []
    differing = 0
    for entry, old, new in picked:
        network = entry.networks[0]
        if old == new:
            same.append(Pair(network, 1.0, 1.0))
            continue
        differing += 1
        mine, theirs = times.get((entry.problem, new)), times.get((entry.problem, old))
        if mine is not None and theirs is not None:
            found.append(Pair(network, theirs, mine))
    if not differing:
        return same
    return found + same[: round(len(same) * len(found) / differing)]


def check_suite(suite: Suite) -> None:
    """Check that `suite` can be learned from and judged by.

    Raises:
        DataError: it has no problem of a network that is held out, or none of the others.
    """
    if not offers.to_judge_by(suite) or not offers.to_learn_from(suite):
        raise DataError(
            f"suite {suite.name}: retraining holds about one network in ten out, by its name, and "
            "needs problems of these and of others; give a suite of more networks"
        )


FORMAT = "confpred-retrain/1"


@dataclass(frozen=True, slots=True)
class Session:
    """One retraining.

    Attributes:
        number: 1 for the first in this folder. It seeds what is drawn, so that each session draws
            anew and a resumed one draws the same.
        old: digest of the model that is to be beaten; None where the device has none.
        learning_s, judging_s: seconds of measuring so far, of both kinds.
        done: whether it came to a verdict.
    """

    number: int
    old: str | None
    learning_s: float = 0.0
    judging_s: float = 0.0
    done: bool = False


def default_folder(device: str) -> Path:
    """Where the sessions for the device with this key are kept."""
    return Path(platformdirs.user_data_dir("confpred")) / "retrain" / device


def open_session(folder: Path, old: str | None) -> Session:
    """Return the session to go on with: the last one of `folder` if it has no verdict and was begun
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
    if last.done or last.old != old:
        return Session(started + 1, old)
    return last


def save(folder: Path, session: Session) -> None:
    """Write what `session` says.

    Raises:
        StorageError: the file system refused.
    """
    content = {"format": FORMAT, **dataclasses.asdict(session)}
    text = json.dumps(content, indent=1) + "\n"
    write_whole(folder / "session.json", lambda file: file.write(text.encode()))


def finished(session: Session) -> Session:
    """`session` with its verdict reached."""
    return replace(session, done=True)


#: Fewer networks or problems tell nothing.
LEAST_NETWORKS, LEAST_PROBLEMS = 3, 10
#: The chance that a model which is no better is taken for one that is.
RISK = 0.1
#: Above this ratio a choice counts as slower.
SLOWER = 1.05
_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Pair:
    """A hold-out problem.

    Attributes:
        network: one that it is of.
        old_ms: measured time of what runs today.
        new_ms: measured time of what the new model chooses.
    """

    network: str
    old_ms: float
    new_ms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison.

    Attributes:
        better: whether the new model is to be used.
        why: in words.
        problems, networks: how many were compared.
        ratio: geometric mean of (new time / old time); None where too little was compared.
        at_most: upper bound on that ratio at a confidence of ``1 - RISK``, over networks drawn
            anew.
        slower, faster: problems on which the new choice is more than ``SLOWER`` times as slow, or
            as fast.
    """

    better: bool
    why: str
    problems: int
    networks: int
    ratio: float | None = None
    at_most: float | None = None
    slower: int = 0
    faster: int = 0


def compare(pairs: Sequence[Pair], seed: int = 0) -> Verdict:
    """Whether the new choices are faster, by more than chance could explain.

    Networks are drawn anew as a whole, because the layers of one are alike. Whoever chooses the
    same has a ratio of one there, which is as good as measured.
    """
    names = sorted({pair.network for pair in pairs})
    counts = {"problems": len(pairs), "networks": len(names)}
    if len(pairs) < LEAST_PROBLEMS or len(names) < LEAST_NETWORKS:
        why = (
            f"too little was compared: {len(pairs)} problems of {len(names)} networks, and it takes"
            f" {LEAST_PROBLEMS} of {LEAST_NETWORKS}; a larger budget measures more"
        )
        return Verdict(False, why, **counts)
    logs = np.log([pair.new_ms / pair.old_ms for pair in pairs])
    network = np.array([names.index(pair.network) for pair in pairs])
    ratio, at_most = float(np.exp(logs.mean())), _upper(logs, network, seed)
    slower = int((logs > np.log(SLOWER)).sum())
    faster = int((logs < -np.log(SLOWER)).sum())
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
    return Verdict(
        better, why, **counts, ratio=ratio, at_most=at_most, slower=slower, faster=faster
    )


def _upper(logs: NDArray[np.float64], network: NDArray[np.intp], seed: int) -> float:
    """Return the quantile ``1 - RISK`` of the geometric mean over networks drawn with
    replacement."""
    count = int(network.max()) + 1
    sums = np.bincount(network, logs, count)
    sizes = np.bincount(network, minlength=count)
    drawn = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return float(np.exp(np.quantile(means, 1 - RISK)))
