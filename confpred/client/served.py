"""A predictor that asks the service and delays no program for long; ``CONFPRED_URL`` turns it on.

The first request about a layer waits for the service, up to ``CONFPRED_URL_WAIT_MS``. Then the
model of this process answers, and the service's answer is cached for the next request. From then
on no request waits, and the service is asked in the background, until it answers in time again.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from confpred.client.clients import Client
from confpred.concurrency import PerProcess, Recent, submit
from confpred.errors import ConfpredError, InvalidInput
from confpred.families.registry import all_families
from confpred.model.folder import Model
from confpred.predict.choice import Choice, check_max_regret, with_fallback
from confpred.predict.predictor import BEST_KEPT, RANKINGS_KEPT, Predictor
from confpred.problem.device import Device
from confpred.problem.record import Record

log = logging.getLogger(__name__)
TOKEN, PATIENCE = "CONFPRED_TOKEN", "CONFPRED_URL_WAIT_MS"
DEFAULT_PATIENCE_MS = 50
#: Seconds that a question may take in the background.
_TIMEOUT_S = 2.0
_THREADS = 2
_Asked = tuple[Record, Device, int]
_Choices = tuple[Choice, ...]


def predictor_at(url: str) -> ServedPredictor:
    """Return a predictor that asks the service at `url`, with the token in ``$CONFPRED_TOKEN``, and
    waits up to ``$CONFPRED_URL_WAIT_MS``.

    Raises:
        InvalidInput: the address, or one of the variables, is not allowed.
    """
    patience = os.environ.get(PATIENCE) or str(DEFAULT_PATIENCE_MS)
    if not re.fullmatch(r"[0-9]{1,6}", patience):
        raise InvalidInput(PATIENCE, patience, "a whole number of milliseconds")
    all_families()  # 0.1 s that is spent in any case, and not while somebody waits for an answer
    token = os.environ.get(TOKEN) or None
    client = Client(url, token=token, timeout_s=_TIMEOUT_S, retries=1, kept=0)
    return ServedPredictor(client, Predictor.load().models, int(patience) * 1e-3)


@dataclass(slots=True)
class _Background:
    """Questions under way in this process: its threads do not live in a forked child."""

    threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, _THREADS))
    under_way: dict[_Asked, Future[None]] = field(default_factory=dict)


class ServedPredictor(Predictor):
    """Predictor that returns the service's choices where they arrive in time.

    Safe to share between threads, and to fork. A choice of this process has no `Choice.server`.
    Expected times (`expected_ms`) are always of its own model, and so are choices `within` limits.
    """

    def __init__(self, client: Client, models: Mapping[str, Model], patience_s: float) -> None:
        """Ask `client`; `models` answer while it fails, or takes more than `patience_s` seconds."""
        super().__init__(models)
        self._client, self._patience_s = client, patience_s
        self._best_cache: Recent[_Asked, _Choices] = Recent(BEST_KEPT)
        self._ranking_cache: Recent[_Asked, _Choices] = Recent(RANKINGS_KEPT)
        self._background = PerProcess(_Background)
        self._answers_in_time = True

    def choose_many(
        self, problems: Iterable[Record], device: str | Device, *, max_regret: float | None = None
    ) -> list[Choice]:
        """Return the `choose` of each of `problems`, in order; all of them wait once."""
        target, asked = self._device(device), list(problems)
        accepted = check_max_regret(max_regret)
        self._wait_for(asked, target, 1)
        answers = (self._answer(problem, target, 1, wait_for_it=False) for problem in asked)
        return [with_fallback(choices, accepted)[0] for choices in answers]

    def _answer(
        self, problem: Record, device: Device, top: int, *, wait_for_it: bool = True
    ) -> _Choices:
        if wait_for_it:
            self._wait_for([problem], device, top)
        return self._cache(top).get((problem, device, top)) or super()._answer(problem, device, top)

    def _cache(self, top: int) -> Recent[_Asked, _Choices]:
        """Return the cache of the service's answers with `top` choices."""
        return self._best_cache if top == 1 else self._ranking_cache

    def _wait_for(self, problems: Sequence[Record], device: Device, top: int) -> None:
        """Ask the service for problems without an answer, and wait for the patience at most."""
        background = self._background.get()
        missing = [
            problem
            for problem in dict.fromkeys(problems)
            if isinstance(problem, Record) and self._cache(top).get((problem, device, top)) is None
        ]
        new = [p for p in missing if (p, device, top) not in background.under_way]
        if new:
            asked = [(p, device, top) for p in new]
            future = submit(background.threads, self._ask, new, device, top)
            background.under_way.update(dict.fromkeys(asked, future))
            future.add_done_callback(lambda _: [background.under_way.pop(a, None) for a in asked])
        if missing and self._answers_in_time:
            futures = {background.under_way.get((p, device, top)) for p in missing} - {None}
            _, late = wait(filter(None, futures), self._patience_s)
            if late:
                self._stop_waiting(f"no answer within {self._patience_s * 1e3:g} ms")

    def _ask(self, problems: Sequence[Record], device: Device, top: int) -> None:
        """Ask the service, in a background thread, and cache its answers. Requests wait for it from
        the next answer in time on, and no more after an error, which is logged."""
        begun = time.monotonic()
        try:
            answers: list[_Choices]
            if top == 1:
                answers = [(c,) for c in self._client.choose_many(problems, device)]
            else:
                answers = [tuple(self._client.rank(p, device, top)) for p in problems]
        except ConfpredError as error:
            return self._stop_waiting(str(error))
        for problem, choices in zip(problems, answers, strict=True):
            self._cache(top).put((problem, device, top), choices)
        if time.monotonic() - begun <= self._patience_s:
            self._answers_in_time = True
        return None

    def _stop_waiting(self, reason: str) -> None:
        if self._answers_in_time:
            log.warning("%s: %s; choosing in this process meanwhile", self._client.url, reason)
        self._answers_in_time = False
