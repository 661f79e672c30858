"""A model trained on measurements that exist already: the operator's own, and uploads to a service.

    base      the operator's rows; the model is trained on them if there is no model or no upload
    uploads   rows of parts that a service has admitted; they change how the model in use orders the
              configs of a family, and nothing else of it
    hold-out  the operator's rows that decide; no model here is trained on their layers

So uploads can neither remove a family, a direction or a width, nor change an answer of another
family, nor pin one. Without a hold-out, one network in ten of the base, chosen by name, is held
out. Nothing is measured, so this needs no GPU.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from confpred.data.parquet import operation_in, shards_in
from confpred.data.remote import RemoteFolder, folder_at
from confpred.errors import DataError, InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.files import write_folder
from confpred.model.card import CARD, SIGNATURE, read_files
from confpred.model.folder import TAUGHT_TREES, Model, load_model
from confpred.model.rank import FamilyModel, with_pytorch
from confpred.model.trees import Trees
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.record import Record
from confpred.retraining.admission import token_of, uploaded
from confpred.retraining.offers import is_held_out, judged_as
from confpred.retraining.retrain import Pair, Verdict, compare
from confpred.training.dataset import (
    Dataset,
    Timings,
    by_problem,
    data_files,
    read_dataset,
    times_of,
)
from confpred.training.fit import Hyperparameters, teach
from confpred.training.train import train

log = logging.getLogger(__name__)
#: A family's order is not changed if its choices take more than this share of the old time for some
#: group width that has at least so many problems in the hold-out.
OF_WIDTH, LEAST_OF_WIDTH = 1.02, 3
_ID_DIGITS = 64  # of an upload, in the name of its part


class Retrained(NamedTuple):
    """Result of `retrain_from`."""

    device: str  # key of the device that the model is for
    verdict: Verdict  # old against new
    old: str | None  # version of the model in use, if there was one

    @property
    def why(self) -> str:
        """The verdict in words, with the model it was compared with."""
        return f"against {self.old or 'PyTorch'}, {self.verdict.why}"


def retrain_from(
    data: Sequence[Path],
    models: Mapping[str, Path],
    out: Path,
    *,
    holdout: Sequence[Path] = (),
    device: str | None = None,
    hyper: Hyperparameters | None = None,
    say: Callable[[str], None] = log.info,
    facts: Mapping[str, Any] | None = None,
) -> Retrained:
    """Train a model, or improve the one in use by uploads, and judge it by the hold-out.

    Args:
        data: Parquet files of measurements, and folders of them; only those of conv2d are used.
            Files that a service has admitted are uploads, all others the base.
        models: folders of the models in use, by device.
        out: folder of the new model, which is made if it is better.
        holdout: files and folders of the operator's hold-out.
        device: device to train for; None if the base is of one.
        hyper: hyperparameters of the trees.
        say: called with a line at each step.
        facts: further entries of the new model's card.

    Raises:
        DataError: there is no base, it cannot be read, or there is no hold-out problem.
        UnknownDevice: the device has no description.
        ModelError: the model in use is damaged.
    """
    files = [file for file in data_files(data) if _is_readable(file, say)]
    uploads = [file for file in files if token_of(file)]
    if not (own := [file for file in files if file not in uploads]):
        raise DataError(f"no file has measurements of {CONVOLUTION.name} of the operator's own")
    base = read_dataset(own, device)
    networks = {name for t in base.timings for name in t.networks}
    judges = sorted(name for name in networks if is_held_out([name]))
    if holdout:
        held = read_dataset(data_files(holdout), base.device.key)
    elif judges and len(judges) < len(networks):
        held = base.restricted({t.problem for t in base.timings if is_held_out(t.networks)})
    else:
        raise DataError(
            f"of {len(networks)} networks {len(judges)} are held out by their names; there must "
            "be some to judge by, and others to learn from; or give a hold-out of their own"
        )
    layers = {t.problem.layer() for t in held.timings}
    base = base.restricted({t.problem for t in base.everywhere if t.problem.layer() not in layers})
    if not base.timings:
        raise DataError("the base has no layer that the hold-out lacks")
    folder = models.get(base.device.key)
    old = None if folder is None else load_model(folder)
    if folder is None or old is None or not uploads:
        say(f"training on {base.rows:,} times")
        with TemporaryDirectory(prefix="confpred-train-") as made:
            trained = Path(made) / "model"
            train(base, trained, hyper=hyper)
            new = load_model(trained)
            verdict = _covering(old, new, compare([*pairs(held, old, new)]))
            outcome = Retrained(base.device.key, verdict, None if old is None else old.version)
            if verdict.better:
                _write(trained, out, {}, {**(facts or {}), "why": outcome.why})
        return outcome
    hyper = hyper or Hyperparameters()
    orders, verdicts, learned = {}, {}, {}
    for name, timings in sorted(uploaded(uploads, base, old, layers, say).items()):
        widths = Counter(_width(t) for t in held.timings if t.family == name and t.networks)
        timings = [t for t in timings if widths[_width(t)] >= LEAST_OF_WIDTH]
        text = teach(old.families[name], base, timings, hyper)
        new_one = replace(old.families[name], taught=Trees(text.encode(), name))
        verdicts[name] = verdict = judged(held, old.families[name], new_one)
        say(f"{name}, by {sum(len(t.rows) for t in timings):,} uploaded times: {verdict.why}")
        if verdict.better:
            orders[TAUGHT_TREES.format(name)] = text.encode()
            learned[name] = sum(len(t.rows) for t in timings)
    why = "; ".join(f"{name}: {verdict.why}" for name, verdict in verdicts.items())
    verdict = Verdict(bool(orders), why or "no upload has rows that the base lacks", 0, 0)
    outcome = Retrained(base.device.key, verdict, old.version)
    if orders:
        sources = {file.stem.removeprefix("part-"): token_of(file) for file in uploads}
        learned_from = {"why": outcome.why, "taught": learned, "uploads": sources}
        _write(folder, out, orders, {**(facts or {}), **learned_from})
    return outcome


def _is_readable(file: Path, say: Callable[[str], None]) -> bool:
    """Return whether a file has measurements of convolutions; a damaged upload is left out."""
    try:
        return operation_in(file) == CONVOLUTION.name
    except DataError as error:
        if len(file.stem) < _ID_DIGITS:
            raise
        say(f"left out: {error}")
        return False


def _write(model: Path, out: Path, orders: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
    """Write the model of a folder with new `orders` of some families, and `facts` in its card."""
    read = read_files(model)
    files = {name: text for name, text in read.files.items() if name != SIGNATURE} | {**orders}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    card = {**json.loads(files.pop(CARD)), "created": now, **facts}
    card["files"] = {name: sha256(text).hexdigest() for name, text in files.items()}
    write_folder(out, {CARD: json.dumps(card, indent=1) + "\n", **files})


def _covering(old: Model | None, new: Model, verdict: Verdict) -> Verdict:
    """Return the verdict; a new model that lacks a part of the old one is not better."""
    if old is None:
        return verdict
    gone = sorted(_covered(old) - _covered(new))
    return replace(verdict, better=False, why=f"it lacks {', '.join(gone)}") if gone else verdict


def _covered(model: Model) -> set[str]:
    """Return the families of a model with the kinds of layers and directions of each, and the
    measured group widths."""
    kinds = {f"{n} of {kind}" for n, card in model.card.families.items() for kind in card.groupings}
    problems: list[Any] = [model.operation.problem.parse(words) for words in model.measured]
    return kinds | {f"{p.direction} of width {p.group_width}" for p in problems}


def judged(held: Dataset, old: FamilyModel, new: FamilyModel) -> Verdict:
    """Return whether the configs of a family that `new` puts first are faster on the hold-out, and
    slower for no group width."""
    compared: list[Pair] = []
    logs: dict[int, list[float]] = defaultdict(list)
    for t in held.timings:
        if t.family == old.family.name and old.serves(t.problem) and t.networks:
            first, second = (model.rank(t.problem, t.device, t.rows)[0][0] for model in (old, new))
            times = dict(zip(t.rows.tolist(), t.time_ms.tolist(), strict=True))
            compared.append(Pair(judged_as(t.networks), times[int(first)], times[int(second)]))
            logs[_width(t)].append(np.log(compared[-1].new_ms / compared[-1].old_ms))
    verdict = compare(compared)
    for width, of_width in logs.items():
        if len(of_width) >= LEAST_OF_WIDTH and np.mean(of_width) > np.log(OF_WIDTH):
            why = f"its choices take {np.exp(np.mean(of_width)):.3f} of the time at width {width}"
            return replace(verdict, better=False, why=why)
    return verdict


def _width(t: Timings) -> int:
    problem: Any = t.problem
    return int(problem.group_width)


def pairs(data: Dataset, old: Model | None, new: Model) -> Iterator[Pair]:
    """Yield the times of both models' choices among the measured candidates of each problem of a
    network. Without an old model, PyTorch's operator is its choice."""
    for problem, parts in by_problem(t for t in data.timings if t.networks).items():
        times = times_of(parts, data.pytorch_ms.get(problem))
        chosen = [_chosen(model, problem, parts, times) for model in (old, new)]
        if chosen[0] in times and chosen[1] in times:
            name = judged_as(parts[0].networks)
            yield Pair(name, times[chosen[0]], times[chosen[1]])


def _chosen(
    model: Model | None, problem: Record, parts: Sequence[Timings], times: Mapping[Candidate, float]
) -> Candidate:
    """Return the candidate among `times` that a model puts first, without its measured configs."""
    if model is None:
        return PYTORCH_OPERATOR
    options = []
    for t in parts:
        learned = model.families.get(t.family)
        if learned is not None and learned.serves(problem):
            rows, seconds = learned.rank(problem, t.device, t.rows)
            options.append((float(seconds[0]), Candidate(t.family, int(rows[0]))))
    options.sort()
    if model.pytorch is not None and PYTORCH_OPERATOR in times:
        (slowdown,) = model.pytorch.slowdowns([problem], parts[0].device)
        options = with_pytorch(options, slowdown)
    return options[0][1] if options else PYTORCH_OPERATOR


@contextmanager
def measurements_at(source: str) -> Iterator[Path]:
    """Yield a folder of the measurements at `source`: a folder or its URL, or the address of a
    service. Remote rows are fetched, and removed when the block ends.

    Raises:
        InvalidInput: `source` is none of these.
        DataError: `source` has no measurements.
        MissingExtra: a service needs httpx.
        ServiceError: the service does not answer, or takes no measurements.
        StorageError: the object store refused.
    """
    with TemporaryDirectory(prefix="confpred-rows-") as name:
        rows = Path(name)
        if source.startswith(("http://", "https://")):
            from confpred.client import transfer  # httpx is no part of the extra train

            transfer.fetch_rows(source, rows)
        elif isinstance(folder := folder_at(source), RemoteFolder):
            for shard in shards_in(folder):
                (rows / shard.name).write_bytes(shard.read_bytes() or b"")
        elif folder.is_dir():
            rows = folder
        else:
            raise InvalidInput("from", source, "a folder or its URL, or the address of a service")
        if not any(rows.glob("*.parquet")):
            raise DataError(f"{source} has no measurements (*.parquet)")
        yield rows
