"""The families of a model against one another: who competes for a problem, and how they rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from confpred.families.candidate import Candidate
from confpred.families.several import Several
from confpred.model.cascade import FINALISTS
from confpred.model.deciding import Options
from confpred.model.gate import Gate
from confpred.model.ranking import FamilyModel
from confpred.problem.device import Device
from confpred.problem.limits import UNLIMITED, Limits
from confpred.problem.record import Record


def rank_families(
    families: Mapping[str, FamilyModel],
    gate: Gate | None,
    problems: Sequence[Record],
    device: Device,
    wanted: int = 1,
    limits: Limits = UNLIMITED,
) -> list[Options]:
    """The best configs for each of `problems`: of the families that can win; then, where these
    have too few, those of the other families that serve it, as no faster than the last of these.
    However many are wanted, the first ones are the same, and each family's finalists are there.

    Args:
        families: what competes, by name.
        gate: who can win; None if all can.
        problems: all are worked out together, which takes a fraction of the time.
        device: the device to compute them on.
        wanted: how many configs; there may be more or fewer.
        limits: what every config keeps within. Who can win was learned without any, so that all
            families compete where there are some.
    """
    serving = [[n for n, known in families.items() if known.serves(p)] for p in problems]
    together = Several.of(problems)
    gate = gate if limits == UNLIMITED else None
    opened = serving if gate is None else gate.open(problems, device, serving)
    found = _rank(families, range(len(problems)), opened, together, device, wanted, limits)
    closed = [
        [name for name in served if name not in tried]
        for served, tried in zip(serving, opened, strict=True)
    ]
    short = [i for i, ranking in enumerate(found) if closed[i] and len(ranking) < wanted]
    others = _rank(families, short, closed, together, device, wanted, limits)
    for ranking, other in zip(found, others, strict=True):
        last = ranking[-1][0] if ranking else 0.0
        ranking += [(max(last, seconds), candidate) for seconds, candidate in other]
    return found


def _rank(
    families: Mapping[str, FamilyModel],
    places: Iterable[int],
    names: Sequence[Sequence[str]],
    problems: Several,
    device: Device,
    wanted: int,
    limits: Limits,
) -> list[Options]:
    """How the families in `names` rank together, for the problems at `places`; empty for others."""
    asked: dict[str, list[int]] = {}
    for i in places:
        for name in names[i]:
            asked.setdefault(name, []).append(i)
    found: list[Options] = [[] for _ in problems.problems]
    for name, mine in asked.items():
        if limits == UNLIMITED and families[name].is_free:
            ranks = families[name].rank_all(problems.part(mine), device, runners_up=wanted > 1)
        else:
            some = [problems.problems[i] for i in mine]
            ranks = families[name].rank_within(some, device, limits)
        for place, (rows, seconds) in ranks.items():
            most = max(wanted, FINALISTS)
            pairs = zip(seconds[:most].tolist(), rows[:most].tolist(), strict=True)
            found[mine[place]] += [(value, Candidate(name, row)) for value, row in pairs]
    for ranking in found:
        # Stable: a family's candidates of equal seconds keep their order.
        ranking.sort(key=lambda entry: (entry[0], entry[1].provider))
    return found
