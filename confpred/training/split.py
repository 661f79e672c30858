"""Splitting measurements by network, so that a model is judged on networks it has never seen.

Networks share layers, and a suite has a layer at several batch sizes, dtypes and epilogues, and in
several directions. So every problem that has the same *layer* as a problem of a held-out network is
held out of training, wherever else that layer occurs.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.model_selection import GroupKFold

from confpred.errors import DataError, InvalidInput
from confpred.training.dataset import Dataset, Timings


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One split.

    Attributes:
        networks: held out; those that are the first of some problem's networks.
        train: timings without any layer of those networks, of other devices too.
        test: timings to judge by, of families that `train` has timings of. Over all folds, each
            problem that some network has is judged once: in the fold that holds out the first of
            its networks.
        elsewhere: timings of other devices that are kept out of `train` too, of the same families.
    """

    networks: tuple[str, ...]
    train: tuple[Timings, ...]
    test: tuple[Timings, ...]
    elsewhere: tuple[Timings, ...]


def without_networks(timings: Sequence[Timings], networks: Collection[str]) -> tuple[Timings, ...]:
    """The timings of problems that share no layer with any of `networks`."""
    held_out = {t.problem.layer() for t in timings if not set(networks).isdisjoint(t.networks)}
    return tuple(t for t in timings if t.problem.layer() not in held_out)


def part_of(
    dataset: Dataset, families: Collection[str], problems: int | None, seed: int
) -> Dataset:
    """What `dataset` has of some `families`, or of all if none is named, and of at most so many
    `problems`, which `seed` chooses, or of all if it is None.

    Raises:
        InvalidInput: the data has no family of a name in `families`.
    """
    known = sorted({t.family for t in dataset.everywhere})
    for name in families:
        if name not in known:
            raise InvalidInput("family", name, f"one of {', '.join(known)}")
    if families:
        dataset = dataset.of_families(families)
    every = sorted({t.problem for t in dataset.timings}, key=str)
    if problems is None or problems >= len(every):
        return dataset
    return dataset.restricted(set(random.Random(seed).sample(every, problems)))


def split_by_network(
    timings: Sequence[Timings], folds: int, seed: int, others: Sequence[Timings] = ()
) -> tuple[Fold, ...]:
    """Divide the networks into `folds` parts of about as many problems each.

    Joining networks that share a layer would leave one group of most of them: 512 of the 659 that
    are measured. So a problem is judged with the first of its networks, and the layers of a fold's
    networks are left out of what the fold learns from.

    Args:
        timings: a whole dataset's.
        folds: at least 2; at most one a network is made.
        seed: of the order in which equally large networks are dealt out.
        others: timings of other devices, to train on only.

    Raises:
        DataError: the problems are judged with fewer than two networks, or with no family that two
            of them share.
    """
    judged = [t for t in timings if t.networks]
    first = [t.networks[0] for t in judged]
    names = sorted(set(first))
    if len(names) < 2:
        raise DataError(
            f"splitting by network needs problems of at least 2 networks; found {len(names)}"
        )
    dealt = dict(zip(names, np.random.default_rng(seed).permutation(len(names)), strict=True))
    parts = GroupKFold(min(folds, len(names))).split(judged, groups=[dealt[name] for name in first])
    made = tuple(_fold([judged[i] for i in part], timings, others) for _, part in parts)
    if not any(fold.test for fold in made):
        raise DataError("splitting by network needs a family that problems of 2 networks have")
    return made


def _fold(part: Sequence[Timings], timings: Sequence[Timings], others: Sequence[Timings]) -> Fold:
    networks = sorted({t.networks[0] for t in part})
    train = without_networks([*timings, *others], networks)
    learnt, layers = {t.family for t in train}, {t.problem.layer() for t in train}
    return Fold(
        networks=tuple(networks),
        train=train,
        test=tuple(t for t in part if t.family in learnt),  # after a short run perhaps not all
        elsewhere=tuple(
            t for t in others if t.family in learnt and t.problem.layer() not in layers
        ),
    )
