"""From a problem to a choice: candidates -> features -> cost -> compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from confpred.choice import Choice
from confpred.device import Device, get_device
from confpred.families import all_families, config_dict
from confpred.problem import Problem


class Predictor:
    """Chooses configs. Immutable after loading; safe to share between threads."""

    @classmethod
    def load(cls, model: str | Path | None = None, *, plan: str | Path | None = None) -> Predictor:
        """Load a model folder, or the newest model that ships with the package."""
        return cls()

    def choose(self, problem: Problem, device: str | Device) -> Choice:
        """The best config known for `problem` on `device`; never fails for a valid problem."""
        return self.rank(problem, device, top=1)[0]

    def rank(self, problem: Problem, device: str | Device, top: int = 5) -> list[Choice]:
        """The best `top` configs, best first; one ``fallback`` choice if no kernel is legal."""
        device = get_device(device)
        found: list[tuple[float, str, int]] = []
        for family in all_families().values():
            rows = np.flatnonzero(family.legal(problem, device))
            seconds = family.estimate_s(problem, device, rows)
            best = np.argsort(seconds, kind="stable")[:top]
            found += [(float(seconds[i]), family.name, int(rows[i])) for i in best]
        found.sort()
        if not found:
            return [Choice(problem, device.key, "fallback")]
        return [
            Choice(
                problem,
                device.key,
                "heuristic",
                family=name,
                config_id=row,
                config=config_dict(all_families()[name], row),
                predicted_ms=seconds * 1e3,
            )
            for seconds, name, row in found[:top]
        ]
