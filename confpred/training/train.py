"""Training: cross-validate, fit on all data, write the model folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from confpred._version import __version__
from confpred.errors import InvalidInput, nearest
from confpred.families.protocol import PYTORCH_OPERATOR, Candidate, Family
from confpred.families.registry import all_families
from confpred.files import write_folder
from confpred.model.card import (
    CARD,
    Card,
    DataCard,
    FamilyCard,
    FeatureDigest,
    GateCard,
    PytorchCard,
)
from confpred.model.features import configs_digest, examples_of, family_card, operation_card
from confpred.model.folder import (
    BOUND_TREES,
    GATE_TREES,
    MEASURED,
    ORDER_TREES,
    PYTORCH_TREES,
    REGISTERS,
    TIME_TREES,
)
from confpred.problem.device import KNOWN
from confpred.problem.record import Record
from confpred.training import Said, unsaid
from confpred.training.calibrate import fit_bounds, fit_gate, fit_pytorch
from confpred.training.cross_validate import (
    best_ms,
    cross_validate,
    family_models,
    part_of,
    without_networks,
)
from confpred.training.dataset import Dataset, Timings
from confpred.training.evaluate import Summary, folds_of, whole
from confpred.training.fit import Fitted, Hyperparameters, fit_families, usual

FOLDS = 5
COMPARING = "comparing with PyTorch's operator"
_MIN_MEASURED = 32  # configs that must be measured, or all legal ones, to keep the best one


def train(
    dataset: Dataset, out: Path, *, seed: int = 0, exclude: Collection[str] = (),
    families: Collection[str] = (), problems: int | None = None,
    hyper: Hyperparameters | None = None, say: Said = unsaid,
) -> Summary:  # fmt: skip
    """Write a model folder; the same data and seed give the same files, except for the date.

    Args:
        dataset: measurements to train on.
        out: the folder to make; its name is the model's version.
        seed: seed of the trees, of the cross-validation's split and of the choice of `problems`.
        exclude: networks whose layers are left out of the data.
        families: kernel families to train; empty for all of the data.
        problems: how many problems to train on, chosen at random; None for all.
        hyper: hyperparameters of the trees.
        say: called with each step.

    Returns:
        The regret on held-out networks, as in the card.

    Raises:
        InvalidInput: `out` exists, or the data has no network of a name in `exclude`, or no family
            of a name in `families`.
        DataError: the data is of fewer than two networks, or fewer than two problems are judged.
        StorageError: the disk refused a write; then `out` does not exist.
    """
    hyper = hyper or usual(dataset.operation)
    if out.exists():
        raise InvalidInput("out", str(out), "a folder that does not exist yet")
    dataset = part_of(_without(dataset, exclude), families, problems, seed)
    operation, device = dataset.operation, dataset.device
    scores, held_out = cross_validate(dataset, folds_of(dataset, FOLDS, seed), hyper, seed, say)
    regret = Summary.of_scores(scores)
    bound, bounds = fit_bounds(held_out.answers, dataset, seed)
    fitted = fit_families(dataset.everywhere, device, hyper, seed, say)
    pytorch_ms = dataset.pytorch_everywhere
    say(COMPARING, 0, 1)
    ours_ms = best_ms(family_models(fitted), dataset.everywhere, pytorch_ms.keys())
    pytorch = fit_pytorch(ours_ms, pytorch_ms, operation, device, hyper, seed)
    say(COMPARING, 1, 1)
    learned = {family.name: f for f in fitted for family in f.pool.families}
    gate = fit_gate([t for t in dataset.everywhere if t.family in learned], operation, seed)
    files = {
        **{ORDER_TREES.format(f.pool.name): f.order for f in fitted},
        **{TIME_TREES.format(f.pool.name): f.time for f in fitted},
        GATE_TREES: gate.lag if gate else None,
        **{REGISTERS.format(name): text for f in fitted for name, text in f.registers.items()},
        PYTORCH_TREES: pytorch,
        BOUND_TREES: bound,
        MEASURED: _measured(dataset),
    }
    texts = {name: text for name, text in files.items() if text is not None}

    def digest_of(problems: Iterable[Record]) -> FeatureDigest:
        return operation_card(operation, device, examples_of(problems))

    card = Card(
        operation=operation.name,
        device=device.key,
        # The description of a device that is in no table, so that the folder can be used elsewhere.
        board=None if device.key in KNOWN else asdict(device),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seed=seed,
        data=DataCard(
            digest=dataset.digest,
            rows=dataset.rows,
            problems=len(dataset.timings),
            networks=len({name for t in dataset.timings for name in t.networks}),
            excluded_networks=sorted(exclude),
            other_devices={other.device.key: other.rows for other in dataset.others},
            statuses=dict(dataset.statuses),
        ),
        families={
            name: _family_card(all_families()[name], f, dataset) for name, f in learned.items()
        },
        gate=GateCard(list(gate.families), digest_of(gate.problems)) if gate else None,
        pytorch=PytorchCard(held_out.margins, digest_of(dataset.pytorch_ms)) if pytorch else None,
        hyperparameters=asdict(hyper),
        measured_with={name: list(versions) for name, versions in dataset.measured_with.items()},
        metrics={
            "folds": FOLDS,
            "regret": asdict(regret),
            "whole": asdict(judged) if (judged := whole(held_out.answers)) else None,
        },
        bounds=bounds,
        libraries={
            "confpred": __version__,
            **{name: version(name) for name in ("lightgbm", "numpy", "scikit-learn")},
        },
        files={name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    )
    write_folder(out, {CARD: json.dumps(card.to_json(), indent=1) + "\n", **texts})
    return regret


def _without(dataset: Dataset, networks: Collection[str]) -> Dataset:
    names = {name for t in dataset.everywhere for name in t.networks}
    for name in networks:
        if name not in names:
            raise InvalidInput("exclude-network", name, nearest(name, sorted(names)))
    return dataset.restricted({t.problem for t in without_networks(dataset.everywhere, networks)})


def _family_card(family: Family, fitted: Fitted, dataset: Dataset) -> FamilyCard:
    measured = [
        d for d in (dataset, *dataset.others) if any(t.family == family.name for t in d.timings)
    ]
    first = measured[0]  # this device, or the one whose measurements the family is fitted to
    rows = {t.problem: t.rows.tolist() for t in first.timings if t.family == family.name}
    problem = next(iter(rows))
    return FamilyCard(
        devices=[d.device.key for d in measured],
        source=family.launch(problem, rows[problem][0]).source,
        source_digests=list(first.kernels[family.name]),
        configs=configs_digest(family),
        groupings=sorted({p.grouping for p in rows}),
        features=family_card(family, dataset.device, [(p, rows[p]) for p in examples_of(rows)]),
        pool=fitted.pool.name,
    )


def _measured(dataset: Dataset) -> str:
    """Return the text of ``measured.json``: the fastest measured candidate of each problem of which
    enough configs were measured."""
    best: dict[Record, tuple[float, Candidate]] = {}
    for t in dataset.timings:
        if len(t.rows) < _MIN_MEASURED and not _complete(t):
            continue
        i = int(t.time_ms.argmin())
        timed = (float(t.time_ms[i]), Candidate(t.family, int(t.rows[i])))
        best[t.problem] = min(best.get(t.problem, timed), timed)
        theirs = dataset.pytorch_ms.get(t.problem)
        if theirs is not None and theirs < best[t.problem][0]:
            best[t.problem] = (theirs, PYTORCH_OPERATOR)
    return best_text({str(problem): timed for problem, timed in best.items()})


def best_text(best: Mapping[str, tuple[float, Candidate]]) -> str:
    """Return the text of ``measured.json``: milliseconds and candidate by the problem's words, a
    JSON list with one entry a line, so that versions compare well."""
    lines = (
        json.dumps({"problem": problem, **asdict(candidate), "time_ms": time_ms})
        for problem, (time_ms, candidate) in best.items()
    )
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _complete(t: Timings) -> bool:
    return len(t.rows) == int(all_families()[t.family].legal(t.problem, t.device).sum())
