"""The process that has uploads checked and models retrained, while the workers leave cores free.

It runs at the system's idle priority, on `Settings.job_cores` cores. A child process checks
uploads, within limits of memory and time, and another one retrains. Each of them may end at any
moment: its state is on the disk (`service.exchange`), and a new process continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from confpred.concurrency import end_with
from confpred.errors import ConfpredError

from . import Settings, generations, logs
from . import exchange as rooms
from .child import command
from .schema import Job, Submission

_IDLE_S = 0.2  # between looks for uploads and jobs
#: Most bytes of data and seconds of processor time of the check of an upload.
MOST_MEMORY, MOST_S = 3 * 2**30, 120
_log = logging.getLogger(__name__)


class Keeper:
    """The one process that admits uploads and starts jobs."""

    def __init__(self, settings: Settings, supervisor: int) -> None:
        self._settings, self._supervisor = settings, supervisor
        self._exchange = rooms.Exchange(Path(settings.exchange or ""))
        self._checker: subprocess.Popen[str] | None = None
        self._job: tuple[int, subprocess.Popen[str]] | None = None

    def run(self) -> None:
        """Have uploads checked, and start jobs, for ever."""
        self._exchange.tidy()
        for job in self._exchange.jobs():
            if job.state == "running" and not settled(self._exchange, job, self._supervisor):
                self._exchange.set_job(job.id, "queued")
        while True:
            self._run_job()
            if upload := self._exchange.due():
                self._check(upload)
            else:
                time.sleep(_IDLE_S)

    def _start(self, *words: str, **how: Any) -> subprocess.Popen[str]:
        own = (json.dumps(asdict(self._settings)), str(os.getpid()))
        return subprocess.Popen(command("keeper", *own, *words), text=True, **how)

    def _check(self, upload: Submission) -> None:
        """Admit an upload, or quarantine it with the reason. An upload that the server cannot
        check, or during which the checking process ends, is tried again later."""
        pipe, checker = subprocess.PIPE, self._checker
        if checker is None or checker.poll() is not None:
            checker = self._checker = self._start("check", stdin=pipe, stdout=pipe, bufsize=1)
        with contextlib.suppress(BrokenPipeError):
            print(upload.id, file=checker.stdin)
        line = checker.stdout.readline() if checker.stdout else ""
        reply = json.loads(line) if line.endswith("\n") else {}
        if not reply and checker.wait() == -signal.SIGXCPU:
            reply = {"refused": f"its check takes more than {MOST_S} s of a processor"}
        if "rows" in reply:
            self._exchange.admit(upload.id, **reply, wanted=self._settings.retrain_rows)
            _log.info("upload %s is admitted with %d new rows", upload.id[:12], reply["rows"])
        elif "refused" in reply:
            self._exchange.quarantine(upload, **reply)
        else:
            ended = f"the process that checked it ended with {checker.returncode}"
            self._exchange.postpone(upload, reply.get("error", ended))

    def _run_job(self) -> None:
        """Start the next job if none runs, and record how one has ended."""
        exchange = self._exchange
        if self._job is not None:
            number, process = self._job
            if process.poll() is None:
                return
            self._job = None
            job = exchange.job(number)
            if job.state == "running" and not settled(exchange, job, self._supervisor):
                exchange.set_job(number, "failed", f"its process ended with {process.returncode}")
        waiting = [job for job in exchange.jobs() if job.state == "queued"]
        if waiting:
            job = waiting[-1]
            exchange.set_job(job.id, "running")
            self._job = job.id, self._start(str(job.id), str(self._supervisor))


def check_all(settings: Settings) -> None:
    """Read upload ids from standard input, and write one line for each: the result of its check, or
    the error of the server that prevented it."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # as a library may print
        exchange = rooms.Exchange(Path(settings.exchange or ""))
        for name in map(str.strip, sys.stdin):
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + MOST_S, hard))
            try:
                reply = _check(settings, exchange, exchange.named(name)[0])
            except MemoryError:
                reply = {"refused": f"its check takes more than {MOST_MEMORY} bytes of memory"}
            except (ConfpredError, OSError) as error:
                reply = {"error": str(error)}
            print(json.dumps(reply), file=answers, flush=True)


@lru_cache(maxsize=16)
def _loaded(folder: Path) -> Any:
    from confpred.model.folder import load_model

    return load_model(folder, in_parts=True)


def _check(settings: Settings, exchange: rooms.Exchange, upload: Submission) -> dict[str, Any]:
    """Check an upload, and write its new rows as a part of the data."""
    from confpred.data.parquet import new_rows, write
    from confpred.problem.conv2d import CONVOLUTION
    from confpred.retraining.admission import TOKEN, RefusedShard, check_shard

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    file, part = (exchange.path(room, upload.id) for room in (rooms.UPLOADS, rooms.ADMITTED))
    if not file.exists():
        return {"refused": "its file was removed"}
    models = {device: _loaded(path) for device, path in generations.newest_models(settings).items()}
    try:
        shard = check_shard(file, models, exchange.files(rooms.CONTROLS))
    except RefusedShard as error:
        reason = str(error).removeprefix(f"{file}: ").replace(str(file), "the file")
        return {"refused": reason, "run_ids": [*error.run_ids]}
    if bad := exchange.distrusted(upload.token) & {*shard.run_ids}:
        return {"refused": f"control configs of run {min(bad)} take other times than elsewhere"}
    rows = new_rows(shard.rows, [file for file in exchange.data() if file != part], shard.operation)
    if rows.num_rows:  # written whole: a process that is about to end may write the same part
        metadata = {**(rows.schema.metadata or {}), TOKEN: upload.token.encode()}
        write(rows.replace_schema_metadata(metadata), part)
    else:
        part.unlink(missing_ok=True)
    taught = rows["device"].to_pylist() if shard.operation is CONVOLUTION else []
    return {"rows": rows.num_rows, "in_all": shard.sent, "devices": Counter(taught)}


def retrain(
    settings: Settings, exchange: rooms.Exchange, job: Job, supervisor: int | None = None
) -> None:
    """Retrain a device, and publish the model if it is better; the job says how that ended."""
    from confpred.model.folder import publish
    from confpred.retraining import exchanged

    data, holdout = exchange.files(rooms.BASE) + exchange.data(), exchange.files(rooms.HOLDOUT)
    how: dict[str, Any] = {"device": job.device, "facts": {"job": [job.id, job.started]}}
    with TemporaryDirectory(prefix="confpred-retrain-") as folder:
        made, models = Path(folder) / "model", generations.newest_models(settings)
        try:
            outcome = exchanged.retrain_from(
                data, models, made, holdout=holdout, say=_log.info, **how
            )
            if outcome.verdict.better:
                publish(made, exchange.folder / generations.PUBLISHED)
        except (ConfpredError, OSError) as error:
            return exchange.set_job(job.id, "failed", rooms.readable(str(error)))
    if not (outcome.verdict.better and settled(exchange, job, supervisor)):
        return exchange.set_job(job.id, "kept", outcome.why)
    cards = generations.published(exchange.folder)
    for old in [path for path, read in cards if read.card.device == job.device][generations.KEPT :]:
        shutil.rmtree(old, ignore_errors=True)
    return None


def settled(exchange: rooms.Exchange, job: Job, supervisor: int | None) -> bool:
    """Have the model that a job has published loaded, then record that; return False if there is
    none. The model's card names the job, so that this can be repeated after a kill."""
    for path, read in generations.published(exchange.folder):
        content = read.card.content
        if content.get("job") == [job.id, job.started]:
            if supervisor is not None:
                os.kill(supervisor, signal.SIGHUP)  # which reloads
            exchange.set_job(job.id, "published", f"{path.name}: {content.get('why')}")
            return True
    return False


def main() -> None:
    """Have uploads checked and start jobs; or check or do one, if the command line says so."""
    fields, parent, *job = sys.argv[1:]
    settings = Settings(**json.loads(fields))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with(int(parent))
    logs.configure(settings, "job" if job else "keeper")
    cores = sorted(os.sched_getaffinity(0))[-settings.job_cores :]
    os.sched_setaffinity(0, cores)
    if job in ([], ["check"]):
        os.setpriority(os.PRIO_PROCESS, 0, 10)  # below the workers, above the idle priority
    else:
        with contextlib.suppress(OSError):  # if the system forbids it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if not job:
        Keeper(settings, int(parent)).run()
    elif job == ["check"]:
        check_all(settings)
    else:
        exchange, (number, supervisor) = rooms.Exchange(Path(settings.exchange or "")), job
        retrain(settings, exchange, exchange.job(int(number)), int(supervisor))
    logging.shutdown()
