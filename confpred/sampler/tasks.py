"""Tasks that are left: the candidates of a suite's problems that the folder lacks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from confpred.cuda.epilogue import epilogue_source
from confpred.data.suites import Suite
from confpred.errors import DataError, InvalidInput, nearest, placed
from confpred.families.kernel_text import identity_of
from confpred.families.protocol import PYTORCH_OPERATOR, Family, LibraryFamily, Rows
from confpred.families.registry import (
    all_families,
    config_ids,
    families_of,
    kernels_of,
    operation_of,
)
from confpred.files import read_json
from confpred.problem.device import Device
from confpred.problem.operation import KernelSpec
from confpred.problem.record import Record

#: How cuDNN chooses PyTorch's algorithm: by timing several, or by its heuristics.
BENCHMARK, HEURISTICS = "benchmark", "heuristics"
#: Orders some rows of a family's table, the most promising first; None without a model of the
#: family.
Pick = Callable[[Family, Record, Rows], Rows | None]


@dataclass(frozen=True, slots=True)
class Task:
    """Candidates of one provider to be measured together on one problem, without a break.

    Attributes:
        problem: the layer.
        networks: networks that have it.
        provider: provider of the candidates (`confpred.families.protocol.Candidate`).
        source_digest: digest of a family's present kernel; for a library's plan the library and its
            version; for PyTorch's operator the digest of the kernel that follows it
            (`confpred.cuda.epilogue`), or empty.
        config_ids: the provider's numbers of the configs.
        cudnn_mode: for PyTorch's operator, ``BENCHMARK`` or ``HEURISTICS``; else empty.
        anchor: whether it is measured in every run.
    """

    problem: Record
    networks: tuple[str, ...]
    provider: str
    source_digest: str
    config_ids: tuple[int, ...]
    cudnn_mode: str = ""
    anchor: bool = False

    def kernels(self) -> list[tuple[KernelSpec, ...]]:
        """Return the kernels to compile for each of `config_ids`."""
        family = all_families().get(self.provider)
        if family is None:
            return [() for _ in self.config_ids]
        return [family.launch(self.problem, row).kernels for row in self.config_ids]

    @property
    def key(self) -> RowKey:
        """The columns that its rows in the folder share."""
        return RowKey(self.problem, self.provider, self.source_digest)


def task_of(
    problem: Record, networks: tuple[str, ...], family: Family, rows: Sequence[int]
) -> Task:
    """Return the task of some `rows` of a family's config table."""
    digest = identity_of(family.launch(problem, rows[0]).source)
    return Task(problem, networks, family.name, digest, tuple(rows))


def pytorch_task(problem: Record, networks: tuple[str, ...], mode: str = BENCHMARK) -> Task:
    """Return the task of PyTorch's own operator."""
    provider, config_id = PYTORCH_OPERATOR.provider, PYTORCH_OPERATOR.config_id
    return Task(problem, networks, provider, epilogue_source(problem), (config_id,), mode)


def left_of(task: Task, measured: Mapping[RowKey, AbstractSet[str]]) -> list[Task]:
    """Return `task` without the `measured` configs, if any are left."""
    have = measured.get(task.key, frozenset())
    done = {config_ids(task.provider).get(words) for words in have}
    left = tuple(row for row in task.config_ids if row not in done)
    return [replace(task, config_ids=left)] if left else []


@dataclass(frozen=True, slots=True)
class Unit:
    """All tasks of a problem, which one GPU measures in one session; or all anchors."""

    tasks: tuple[Task, ...]

    @property
    def problem(self) -> Record:
        """The problem, or that of the first anchor."""
        return self.tasks[0].problem

    @property
    def anchors(self) -> bool:
        """Whether these are anchors."""
        return self.tasks[0].anchor

    def kernels(self) -> list[KernelSpec]:
        """Return the distinct kernels of all tasks."""
        every = (kernel for task in self.tasks for kernels in task.kernels() for kernel in kernels)
        return list(dict.fromkeys(every))


def units_of(tasks: Iterable[Task]) -> list[Unit]:
    """Return the tasks of each problem together, problems in the order of their first tasks."""
    together: dict[Record, list[Task]] = {}
    for task in tasks:
        together.setdefault(task.problem, []).append(task)
    return [Unit(tuple(of_problem)) for of_problem in together.values()]


@dataclass(frozen=True, slots=True)
class RowKey:
    """The columns that rows of one task share in the folder; a kernel that has changed since is
    measured again."""

    problem: Record
    provider: str
    source_digest: str


@dataclass(frozen=True, slots=True)
class Choosing:
    """Which candidates of each problem are measured.

    Attributes:
        seed: seed of the order of problems, and of the choice of configs.
        configs: how many random configs a problem and family; None for all. They depend on the seed
            and the problem alone, so that a resumed run chooses the same.
        picked, pick: how many further configs, the first ones in the order of `pick`; random ones
            if there is none, or it has no order for the family.
        families: families to measure; every family of kernels if empty.
        pytorch: whether to time PyTorch's own operator too, in each of `cudnn_modes`.
        cudnn_modes: ``BENCHMARK``, ``HEURISTICS`` or both.
        part: (i, n) for the problems of the i-th of n parts, counted from 1.
    """

    seed: int = 0
    configs: int | None = None
    picked: int = 0
    pick: Pick | None = None
    families: Sequence[str] = ()
    pytorch: bool = True
    cudnn_modes: Sequence[str] = (BENCHMARK,)
    part: tuple[int, int] = (1, 1)


def plan(
    suite: Suite,
    device: Device,
    choosing: Choosing,
    measured: Mapping[RowKey, AbstractSet[str]],
) -> list[Task]:
    """Return the tasks left. Problems are in random order, so that a run cut short leaves a fair
    sample.

    Args:
        suite: the problems; one that occurs twice counts once, with the networks of both.
        device: device that the configs must be legal on.
        choosing: which of the legal configs are measured.
        measured: the `config_words` that need no measurement; for PyTorch's operator the modes.
    """
    tasks, networks = [], suite.networks
    mine = part_of(networks, *choosing.part)
    problems = [problem for problem in networks if problem in mine]
    for index in np.random.default_rng(choosing.seed).permutation(len(problems)):
        problem = problems[index]
        named = choosing.families or kernels_of(problem)
        for family in families_of(problem).values():
            if family.name in named and (rows := _choose(family, problem, device, choosing)):
                tasks += left_of(task_of(problem, networks[problem], family, rows), measured)
        has_call = operation_of(problem).operands(problem)  # or PyTorch has no call for it
        for mode in choosing.cudnn_modes if choosing.pytorch and has_call else ():
            task = pytorch_task(problem, networks[problem], mode)
            timed = measured.get(task.key, frozenset())
            if mode not in timed and not (mode == BENCHMARK and "" in timed):  # rows of old
                tasks.append(task)
    return tasks


def part_of(problems: Iterable[Record], part: int, parts: int) -> set[Record]:
    """Return the problems of one part, counted from 1, of about equally many problems each.

    Distinct problems are sorted by their words and shuffled the same way every time, so a part
    depends on the problems and the two numbers alone, and each is a fair sample.
    """
    ordered = sorted(set(problems), key=str)
    shuffled = np.random.default_rng(0).permutation(len(ordered))
    return {ordered[index] for index in shuffled[part - 1 :: parts]}


def _choose(family: Family, problem: Record, device: Device, choosing: Choosing) -> list[int]:
    legal = family.listed if isinstance(family, LibraryFamily) else family.legal
    rows = np.flatnonzero(legal(problem, device))
    configs, picked, pick = choosing.configs, choosing.picked, choosing.pick
    if configs is not None and configs < len(rows):
        name = zlib.crc32(f"{family.name} {problem}".encode())
        generator = np.random.default_rng([choosing.seed, name])
        chosen = generator.choice(rows, configs, replace=False)
        others = np.setdiff1d(rows, chosen)
        order = pick(family, problem, others) if pick is not None and picked else None
        if order is None:
            order = generator.permutation(others)
        rows = np.sort(np.concatenate([chosen, order[:picked]]))
    return [int(row) for row in rows]


# *Anchors* are a few configs that every run measures again on every GPU, to show how much times
# differ between GPUs and days. Their rows are in shards of their own, and no model is trained on
# them. The file is one object::
#
#     {"format": "confpred-anchors/1", "anchors": [
#       {"problem": {"n": 32, "c": 128, ...}, "family": "grouped_fprop", "config": "block_n=1 ..."},
#       ...]}

FORMAT = "confpred-anchors/1"
MAX_ANCHORS = 32


def read_anchors(path: Path, device: Device) -> tuple[Task, ...]:
    """Return the anchors in the file at `path`, a task each.

    Raises:
        DataError: the file cannot be read, is no file of anchors, or has none or too many.
        InvalidInput: the file names a family or a config that this version does not have, or a
            config that is not legal on `device`.
        InvalidProblem: a problem's field is not allowed.
    """
    anchors = read_json(path, "a file of anchors", FORMAT).get("anchors")
    if not isinstance(anchors, list) or not 1 <= len(anchors) <= MAX_ANCHORS:
        raise DataError(f'{path}: "anchors" must be a list of 1 to {MAX_ANCHORS} anchors')
    return tuple(_task(f"{path}: anchors[{i}]", fields, device) for i, fields in enumerate(anchors))


def _task(where: str, fields: object, device: Device) -> Task:
    if not isinstance(fields, Mapping) or not isinstance(fields.get("problem"), Mapping):
        raise DataError(f"{where} must be an object of a problem, a family and a config")
    name, words = fields.get("family"), fields.get("config")
    with placed(f"{where}."):
        if not isinstance(name, str) or name not in all_families():
            raise InvalidInput("family", name, nearest(name, all_families()))
        family = all_families()[name]
        problem = family.operation.problem.from_json(dict(fields["problem"]))
        row = config_ids(name).get(words) if isinstance(words, str) else None
        if row is None or not family.legal(problem, device)[row]:
            allowed = f"a config of {name} that is legal for the problem on {device.key}"
            raise InvalidInput("config", words, allowed)
    return replace(task_of(problem, (), family, [row]), anchor=True)
