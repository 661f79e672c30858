"""The process beside the workers that checks uploads and retrains, while nobody needs the cores.

It runs at the system's idle priority, on `Settings.job_cores` cores. A retraining has a process of
its own, as it takes minutes. Either may end at any moment: all that is to be kept is on the disk
(`service.exchange`), and the supervisor starts another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from confpred.concurrency import end_with
from confpred.data.parquet import new_rows, operation_in, write
from confpred.errors import ConfpredError
from confpred.families.registry import all_operations
from confpred.model.folder import Model, load_model, publish
from confpred.problem.conv2d import CONVOLUTION
from confpred.retraining.admission import Distrusted, check_shard
from confpred.retraining.exchanged import retrain_from

from . import Settings, logs
from .child import command
from .exchange import (
    ADMITTED,
    CONTROLS,
    INCOMING,
    KEPT,
    PUBLISHED,
    Exchange,
    newest_models,
    published,
)

_IDLE_S = 0.2  # between looks for something to do
_log = logging.getLogger(__name__)


class Keeper:
    """The one process that admits uploads and starts jobs."""

    def __init__(self, settings: Settings, supervisor: int) -> None:
        self._settings, self._supervisor = settings, supervisor
        self._exchange = Exchange(Path(settings.exchange or ""))
        self._models: dict[Path, Model] = {}
        self._new: Counter[str] = Counter()  # rows of each device since its last job
        self._job: tuple[int, subprocess.Popen[bytes]] | None = None

    def run(self) -> None:
        """Check uploads, and start jobs, for ever."""
        self._exchange.tidy()
        for job in self._exchange.jobs():
            if job.state == "running":
                self._exchange.set_job(job.id, "failed", "the server ended")
        while True:
            self._run_job()
            upload = self._exchange.next_received()
            if upload is None:
                time.sleep(_IDLE_S)
            else:
                self._check(upload)

    def models(self) -> dict[str, Model]:
        """Return the models in use, by device."""
        paths = newest_models(self._settings)
        loaded = self._models
        self._models = {p: loaded.get(p) or load_model(p, in_parts=True) for p in paths.values()}
        return {device: self._models[path] for device, path in paths.items()}

    def _check(self, upload: str) -> None:
        """Admit an upload, or quarantine it with the reason."""
        exchange = self._exchange
        path = exchange.path(INCOMING, upload)
        try:
            controls = sorted((exchange.folder / CONTROLS).glob("*.parquet"))
            shard = check_shard(path, self.models(), controls)
            if bad := exchange.distrusted(shard.run_ids):
                raise Distrusted(
                    f"control configs of run {bad} take other times than elsewhere", []
                )
            operation, rows = all_operations()[operation_in(path)], 0
            parts = exchange.parts_with(shard.run_ids)
            parts = [part for part in parts if operation_in(part) == operation.name]
            for room, table in ((ADMITTED, shard.rows), (CONTROLS, shard.controls)):
                new = new_rows(table, parts, operation)
                if new.num_rows:
                    write(new, exchange.path(room, upload))
                    if room == ADMITTED:
                        rows = new.num_rows
                        if operation is CONVOLUTION:  # which retraining is for
                            self._new.update(new["device"].to_pylist())
            exchange.admit(upload, rows, shard.run_ids)
        except ConfpredError as error:
            reason = str(error).removeprefix(f"{path}: ").replace(str(path), "the file")
            exchange.quarantine(upload, reason, getattr(error, "run_ids", ()))
            _log.warning("upload %s is quarantined: %s", upload[:12], reason)
        else:
            _log.info("upload %s is admitted with %d new rows", upload[:12], rows)
            self._ask_for_jobs()

    def _ask_for_jobs(self) -> None:
        """Ask for a retraining of each device with enough new rows."""
        wanted = self._settings.retrain_rows
        for device in [d for d, rows in self._new.items() if wanted and rows >= wanted]:
            del self._new[device]
            self._exchange.add_job(device)

    def _run_job(self) -> None:
        """Start the next job where none runs, and see how one has ended."""
        exchange = self._exchange
        if self._job is not None:
            number, process = self._job
            if process.poll() is None:
                return
            self._job = None
            (job,) = (job for job in exchange.jobs() if job.id == number)
            if job.state == "running":  # it has not said how it ended
                exchange.set_job(number, "failed", f"its process ended with {process.returncode}")
            elif job.state == "published":
                os.kill(self._supervisor, signal.SIGHUP)  # which reloads
        waiting = [job for job in exchange.jobs() if job.state == "queued"]
        if waiting:
            job = waiting[-1]
            exchange.set_job(job.id, "running")
            words = (json.dumps(asdict(self._settings)), str(os.getpid()), str(job.id), job.device)
            self._job = job.id, subprocess.Popen(command("keeper", *words))


def retrain(settings: Settings, exchange: Exchange, number: int, device: str) -> None:
    """Retrain for a device, and publish the model if it is better; the job says how that ended."""
    paths = newest_models(settings)
    models = {device: load_model(paths[device])} if device in paths else {}
    with TemporaryDirectory(prefix="confpred-retrain-") as folder:
        trained = Path(folder) / "model"
        data = [exchange.folder / ADMITTED]
        try:
            outcome = retrain_from(data, models, trained, device=device, say=_log.info)
            if outcome.verdict.better:
                made = publish(trained, exchange.folder / PUBLISHED)
        except ConfpredError as error:
            exchange.set_job(number, "failed", str(error))
            return
        why = outcome.verdict.why
        if not outcome.verdict.better:
            exchange.set_job(number, "kept", f"against {outcome.old or 'PyTorch'}, {why}")
            return
    of_device = [path for path, each in published(exchange.folder) if each.card.device == device]
    for old in of_device[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    exchange.set_job(number, "published", f"{made.name}: against {outcome.old or 'PyTorch'}, {why}")


def main() -> None:
    """Check uploads and start jobs; or, where the command line names a job, do it."""
    fields, parent, *job = sys.argv[1:]
    settings = Settings(**json.loads(fields))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with(int(parent))
    logs.configure(settings, "job" if job else "keeper")
    cores = sorted(os.sched_getaffinity(0))[-settings.job_cores :]
    os.sched_setaffinity(0, cores)
    with contextlib.suppress(OSError):  # where the system forbids it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if not job:
        Keeper(settings, int(parent)).run()
    number, device = job
    retrain(settings, Exchange(Path(settings.exchange or "")), int(number), device)
    logging.shutdown()
