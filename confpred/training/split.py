"""Splitting measurements by network, so that a model is judged on networks it has never seen.

Networks share layers, and a suite has a layer at several batch sizes, dtypes and epilogues, and in
several directions. So every problem that has the same *layer* as a problem of a held-out network is
held out of training, wherever else that layer occurs.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from confpred.errors import DataError, InvalidInput
from confpred.training.dataset import Dataset, Timings


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One split.

    Attributes:
        networks: held out.
        train: timings without any layer of those networks, of other devices too.
        test: timings to judge by, of families that `train` has timings of. Over all folds, each
            problem that some network has is judged once: in the fold that holds out the first of
            its networks.
    """

    networks: tuple[str, ...]
    train: tuple[Timings, ...]
    test: tuple[Timings, ...]


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

    Args:
        timings: a whole dataset's.
        folds: at least 2; at most one a network is made.
        seed: of the order in which equally large networks are dealt out.
        others: timings of other devices, to train on only.

    Raises:
        DataError: the data has fewer than two networks, or no family that two of them share.
    """
    of_network: dict[str, list[Timings]] = {}  # each problem under the first of its networks
    for t in timings:
        for network in t.networks:
            of_network.setdefault(network, [])
        if t.networks:
            of_network[t.networks[0]].append(t)
    if len(of_network) < 2:
        raise DataError(
            f"splitting by network needs problems of at least 2 networks; found {len(of_network)}"
        )
    names = sorted(of_network)
    random.Random(seed).shuffle(names)
    names.sort(key=lambda name: -len(of_network[name]))
    parts: list[list[str]] = [[] for _ in range(min(folds, len(names)))]
    sizes = [0] * len(parts)
    for name in names:
        smallest = sizes.index(min(sizes))
        parts[smallest].append(name)
        sizes[smallest] += len(of_network[name])
    made = [_fold(part, of_network, [*timings, *others]) for part in parts]
    if not any(fold.test for fold in made):
        raise DataError("splitting by network needs a family that problems of 2 networks have")
    return tuple(made)


def _fold(
    networks: Sequence[str], of_network: Mapping[str, Sequence[Timings]], every: Sequence[Timings]
) -> Fold:
    train = without_networks(every, networks)
    learnt = {t.family for t in train}  # after a short run perhaps not all
    test = (t for name in sorted(networks) for t in of_network[name] if t.family in learnt)
    return Fold(tuple(sorted(networks)), train, tuple(test))
