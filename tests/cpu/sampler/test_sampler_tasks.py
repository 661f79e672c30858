"""Which configs are measured, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
from layers import first_kernel

from confpred.data.suites import Entry, Suite
from confpred.families.kernel_text import source_digest
from confpred.families.protocol import PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.families.registry import all_families, config_words
from confpred.problem.conv2d import Problem
from confpred.problem.device import get_device
from confpred.sampler.tasks import Choosing, RowKey, part_of, plan

DEVICE = get_device("h100")
FAMILY = all_families()["grouped_fprop"]
LAYERS = [Problem(n, 64, 28, 28, 64, 3, 3, padding=1, groups=8) for n in range(1, 41)]
SUITE = Suite("test", tuple(Entry(layer) for layer in LAYERS))


def tasks(suite=SUITE, *, measured=None, **choosing):
    return plan(suite, DEVICE, Choosing(**{"pytorch": False} | choosing), measured or {})


def test_all_legal_configs_of_all_problems_are_planned():
    planned = tasks()
    for task in planned:
        assert list(task.config_ids) == np.flatnonzero(FAMILY.legal(task.problem, DEVICE)).tolist()
        assert task.source_digest == source_digest(first_kernel(FAMILY).file)
    assert len(planned[0].kernels()) == len(planned[0].config_ids)
    assert {task.problem for task in planned} == set(LAYERS)


def test_a_problem_without_legal_configs_is_left_to_pytorch():
    dense = Problem(8, 256, 28, 28, 256, 3, 3)
    found = tasks(Suite("dense", (Entry(dense),)), pytorch=True)
    (task,) = found
    assert (task.provider, task.config_ids) == (PYTORCH, (PYTORCH_OPERATOR.config_id,))
    assert task.kernels() == [()]


def test_the_order_is_random_and_decided_by_the_seed():
    def order(seed):
        return [task.problem for task in tasks(seed=seed)]

    assert order(1) == order(1) != order(2)
    assert order(1) != LAYERS


def test_a_choice_of_configs_depends_on_the_seed_and_the_problem_alone():
    def choice(suite, seed):
        return {task.problem: task.config_ids for task in tasks(suite, seed=seed, configs=20)}

    whole, part = choice(SUITE, 3), choice(Suite("part", SUITE.entries[5:9]), 3)
    assert all(len(set(rows)) == 20 for rows in whole.values())
    alike: dict[bytes, list[tuple[int, ...]]] = {}
    for problem, rows in whole.items():
        alike.setdefault(FAMILY.legal(problem, DEVICE).tobytes(), []).append(rows)
    assert max(map(len, alike.values())) > 1  # problems that have the same legal configs ...
    assert all(len(set(rows)) == len(rows) for rows in alike.values())  # ... get others of them
    assert part == {problem: whole[problem] for problem in part}
    assert choice(SUITE, 4) != whole


@pytest.mark.parametrize("parts", [1, 2, 7, 40, 64])
def test_parts_are_the_whole_and_depend_on_nothing_else(parts):
    found = [part_of(LAYERS, part, parts) for part in range(1, parts + 1)]
    assert sorted(map(str, set().union(*found))) == sorted(map(str, LAYERS))
    assert sum(map(len, found)) == len(LAYERS)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert found == [part_of(LAYERS[::-1] * 2, part, parts) for part in range(1, parts + 1)]
    planned = [tasks(seed=parts, part=(part, parts)) for part in range(1, parts + 1)]
    assert [{task.problem for task in of_part} for of_part in planned] == found
    together = [task for of_part in planned for task in of_part]
    assert sorted(together, key=str) == sorted(tasks(), key=str)


def test_a_part_is_a_fair_sample():
    smaller = part_of(LAYERS, 1, 2)
    assert 5 < len(smaller & set(LAYERS[:20])) < 15


def test_a_problem_that_occurs_twice_counts_once_with_both_networks():
    twice = Suite("twice", (Entry(LAYERS[0], ("a", "b")), Entry(LAYERS[0], ("b", "c"))))
    (task,) = tasks(twice)
    assert task.networks == ("a", "b", "c")


def test_what_is_measured_is_left_out_unless_the_kernel_changed():
    suite = Suite("one", SUITE.entries[:1])
    (whole,) = tasks(suite)
    have = {config_words(Candidate(FAMILY.name, row)) for row in whole.config_ids[::2]}
    now = RowKey(LAYERS[0], FAMILY.name, whole.source_digest)
    (rest,) = tasks(suite, measured={now: have})
    assert rest.config_ids == whole.config_ids[1::2]
    before = RowKey(LAYERS[0], FAMILY.name, "0123456789abcdef")
    assert tasks(suite, measured={before: have}) == [whole]
    everything = {config_words(Candidate(FAMILY.name, row)) for row in whole.config_ids}
    done = {now: everything, RowKey(LAYERS[0], PYTORCH, ""): {""}}
    assert tasks(suite, measured=done, pytorch=True) == []
