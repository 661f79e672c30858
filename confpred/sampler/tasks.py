"""What is left to measure: a suite's problems, their legal configs, less what is in the folder."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from confpred.data.suites import Suite
from confpred.families.candidate import PYTORCH
from confpred.families.kernel_text import source_digest
from confpred.families.protocol import Family
from confpred.families.registry import all_families, config_texts, families_of
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec
from confpred.problem.record import Record

PYTORCH_ROW = -1


@dataclass(frozen=True, slots=True)
class Task:
    """Configs of one family to be measured together on one problem, in one piece.

    Attributes:
        problem: the layer.
        networks: the networks that it comes from.
        family: name of a kernel family, or ``PYTORCH``.
        source_digest: of the family's kernel as it is today; empty for ``PYTORCH``.
        rows: of the family's config table; ``(PYTORCH_ROW,)`` for ``PYTORCH``.
    """

    problem: Record
    networks: tuple[str, ...]
    family: str
    source_digest: str
    rows: tuple[int, ...]

    def kernels(self) -> list[tuple[KernelSpec, ...]]:
        """The kernels of each of `rows`; none for ``PYTORCH``."""
        if self.family == PYTORCH:
            return [() for _ in self.rows]
        family = all_families()[self.family]
        launches = (family.launch(self.problem, row) for row in self.rows)
        return [tuple(step.kernel for step in launch.steps) for launch in launches]


@dataclass(frozen=True, slots=True)
class Measured:
    """What rows in the folder have in common; a kernel that has changed since is measured again."""

    problem: Record
    family: str
    source_digest: str


def plan(
    suite: Suite,
    device: Device,
    *,
    seed: int,
    configs: int | None,
    offered: Mapping[str, NDArray[np.bool_]] | None = None,
    pytorch: bool,
    measured: Mapping[Measured, AbstractSet[str]],
) -> list[Task]:
    """The tasks left, problems in random order so that a run cut short leaves a fair sample.

    Args:
        suite: the problems; one that occurs twice counts once, with the networks of both.
        device: decides which configs are legal.
        seed: of the order, and of the choice of configs.
        configs: a random choice of this many configs a problem and family; None for all. It
            depends on the seed and the problem alone, so that a resumed run chooses the same.
        offered: masks over the config tables of the families to measure, by family; None for all
            of every family.
        pytorch: whether to time PyTorch's own operator too.
        measured: the texts (see `config_name`) of the configs that need no measurement.
    """
    networks: dict[Record, tuple[str, ...]] = {}
    for entry in suite.entries:
        known = networks.get(entry.problem, ())
        networks[entry.problem] = tuple(dict.fromkeys(known + entry.networks))
    tasks = []
    problems = list(networks)
    for index in np.random.default_rng(seed).permutation(len(problems)):
        problem = problems[index]
        for family in families_of(problem).values():
            mask = offered.get(family.name, np.False_) if offered is not None else np.True_
            rows = _choose(family, problem, device, mask, configs, seed)
            if not len(rows):
                continue
            digest = source_digest(family.launch(problem, rows[0]).steps[0].kernel.file)
            have = measured.get(Measured(problem, family.name, digest), frozenset())
            left = tuple(row for row in rows if config_name(family.name, row) not in have)
            if left:
                tasks.append(Task(problem, networks[problem], family.name, digest, left))
        if pytorch and Measured(problem, PYTORCH, "") not in measured:
            tasks.append(Task(problem, networks[problem], PYTORCH, "", (PYTORCH_ROW,)))
    return tasks


def _choose(
    family: Family,
    problem: Record,
    device: Device,
    offered: NDArray[np.bool_] | np.bool_,
    configs: int | None,
    seed: int,
) -> list[int]:
    rows = np.flatnonzero(family.legal(problem, device) & offered)
    if configs is not None and configs < len(rows):
        name = zlib.crc32(f"{family.name} {problem}".encode())
        chosen = np.random.default_rng([seed, name]).choice(rows, configs, replace=False)
        rows = np.sort(chosen)
    return [int(row) for row in rows]


def config_name(family: str, row: int) -> str:
    """The ``config`` column of config `row`; empty for ``PYTORCH``."""
    return "" if family == PYTORCH else config_texts(family)[row]
