"""A model of measurements that are there already, such as those that were sent to a service.

    read      the rows, less those far from what the model in use expects      trusted
    train     on all but the networks that are held out, by their name         train
    judge     old and new choose among the measured configs of the others      pairs, compare

Nothing is measured, so this needs no GPU. Whoever calls it publishes the model if it is better.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from confpred.data.parquet import operation_in, shards_in
from confpred.data.remote import RemoteFolder, folder_at
from confpred.errors import DataError, InvalidInput
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate
from confpred.model.card import CARD
from confpred.model.folder import MEASURED, Model, load_model
from confpred.model.rank import with_pytorch
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.record import Record
from confpred.retraining.admission import trusted, unbelieved
from confpred.retraining.offers import is_held_out
from confpred.retraining.retrain import Pair, Verdict, compare
from confpred.training.dataset import Dataset, Timings, data_files, read_dataset
from confpred.training.fit import Hyperparameters
from confpred.training.train import best_text, train

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of `retrain_from`."""

    device: str  # key of the device that was trained for
    verdict: Verdict  # old against new
    old: str | None  # version of the model in use, if there was one
    left_out: int  # times that were not learned from


def retrain_from(
    data: Sequence[Path],
    models: Mapping[str, Model],
    out: Path,
    *,
    device: str | None = None,
    hyper: Hyperparameters | None = None,
    say: Callable[[str], None] = log.info,
) -> Outcome:
    """Train a model on measurements, and judge it by those of networks that it does not learn from.

    Args:
        data: Parquet files of measurements, and folders of them; only conv2d is learned from.
        models: those in use, by device.
        out: the folder of the new model, which is made.
        device: to train for; None where the data is of one.
        hyper: how the trees grow.
        say: called with a line at each step.

    Raises:
        DataError: the data cannot be read, or has no network that is held out by its name.
        UnknownDevice: the device has no description.
        ModelError: the model in use is damaged.
    """
    files = [file for file in data_files(data) if operation_in(file) == CONVOLUTION.name]
    if not files:
        raise DataError(
            f"no file has measurements of {CONVOLUTION.name}, which a model learns from"
        )
    dataset, left_out = read_dataset(files, device), 0
    old = models.get(dataset.device.key)
    if old is not None:
        dataset, left_out = trusted(dataset, old)
    networks = {name for t in dataset.timings for name in t.networks}
    held_out = sorted(name for name in networks if is_held_out([name]))
    if not held_out or len(held_out) == len(networks):
        raise DataError(
            f"of {len(networks)} networks {len(held_out)} are held out by their names; there must "
            "be some to judge by, and others to learn from"
        )
    say(
        f"training on {dataset.rows:,} times of {len(networks) - len(held_out)} networks; "
        f"{left_out:,} that are far from what is expected are left out"
    )
    train(dataset, out, exclude=held_out, hyper=hyper)
    keep_known_best(out, dataset, old)
    say(f"judging by {len(held_out)} networks that it has not learned from")
    found = list(pairs(dataset, old, load_model(out)))
    return Outcome(
        dataset.device.key, compare(found), None if old is None else old.version, left_out
    )


def keep_known_best(out: Path, data: Dataset, old: Model | None) -> None:
    """Have the model in `out` look up only best times that it believes, and those of the old model
    that are better or all that is known: a wrong time must not take a good choice back."""
    new, card = load_model(out), json.loads((out / CARD).read_text())
    unbelievable = {
        (str(problem), Candidate(provider, int(row)))
        for (problem, provider), rows in unbelieved(data, new).items()
        for row in rows
    }
    best = {
        words: (found.time_ms, found.candidate)
        for words, found in new.measured.items()
        if (words, found.candidate) not in unbelievable
    }
    for words, found in old.measured.items() if old is not None else ():
        if _same_kernel(found.candidate.provider, old, new):
            best[words] = min(
                best.get(words, (inf, found.candidate)), (found.time_ms, found.candidate)
            )
    text = best_text(best).encode()
    (out / MEASURED).write_bytes(text)
    card["files"][MEASURED] = hashlib.sha256(text).hexdigest()
    (out / CARD).write_text(json.dumps(card, indent=1) + "\n")


def _same_kernel(provider: str, old: Model | None, new: Model) -> bool:
    """Return whether times of `provider` that the old model knows are of the kernels of today."""
    if provider == PYTORCH_OPERATOR.provider or old is None:
        return True
    cards = [model.card.families.get(provider) for model in (old, new)]
    digests = [set(card.source_digests) for card in cards if card is not None]
    return len(digests) == 2 and bool(digests[0] & digests[1])


def pairs(data: Dataset, old: Model | None, new: Model) -> Iterator[Pair]:
    """Yield the times of what both models choose among the measured candidates of each problem of a
    network that is held out. Without an old model PyTorch's operator runs."""
    together: dict[Record, list[Timings]] = {}
    for t in data.timings:
        if is_held_out(t.networks):
            together.setdefault(t.problem, []).append(t)
    for problem, parts in together.items():
        times = {
            Candidate(t.family, int(row)): float(ms)
            for t in parts
            for row, ms in zip(t.rows, t.time_ms, strict=True)
        }
        if problem in data.pytorch_ms:
            times[PYTORCH_OPERATOR] = data.pytorch_ms[problem]
        chosen = [_chosen(model, problem, parts, times) for model in (old, new)]
        if chosen[0] in times and chosen[1] in times:
            name = next(name for name in parts[0].networks if is_held_out([name]))
            yield Pair(name, times[chosen[0]], times[chosen[1]])


def _chosen(
    model: Model | None,
    problem: Record,
    parts: Sequence[Timings],
    times: Mapping[Candidate, float],
) -> Candidate:
    """Return the candidate among `times` that a model puts first, without looking it up."""
    options = []
    for t in parts if model is not None else ():
        learned = model.families.get(t.family) if model is not None else None
        if learned is not None and learned.serves(problem):
            rows, seconds = learned.rank(problem, t.device, t.rows)
            options.append((float(seconds[0]), Candidate(t.family, int(rows[0]))))
    options.sort()
    if model is not None and model.pytorch is not None and PYTORCH_OPERATOR in times:
        (slowdown,) = model.pytorch.slowdowns([problem], parts[0].device)
        options = with_pytorch(options, slowdown)
    return options[0][1] if options else PYTORCH_OPERATOR


@contextmanager
def measurements_at(source: str) -> Iterator[Path]:
    """Yield a folder of the measurements at `source`: a folder or its URL, or the address of a
    service. Rows that are elsewhere are fetched for as long as the block lasts.

    Raises:
        InvalidInput: it is none of these.
        DataError: it has no measurements.
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
