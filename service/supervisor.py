"""The parent of the server's processes: starts and replaces workers, and hands them connections.

Workers do not listen. The supervisor hands each connection to the worker that has the fewest: a few
clients are spread evenly, and none waits for a worker that is dead or still starting.

    to a worker                               from a worker
    prepare folder      load a generation     ready generation   takes connections now
    switch generation   answer by it, accept  failed reason      could not start, and ends
      keep, accepted    these tokens, and     closed count       connections closed since its start
                        forget all others     counts ...         its counts since its start
    counts              send your counts      leaving            it was asked to end
    stop wait           finish, and end       reload, rollback   a client asks for it
                                              metrics            a client asks for all counts
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from confpred.errors import ConfpredError, InvalidInput
from confpred.files import raising

from . import Settings, generations, logs, tokens
from .child import Child, Fields, keep, show_life, tell_systemd
from .metrics import Metrics, Totals, read, rows

#: Starts of a worker that may fail in succession before the server gives up, unless another worker
#: answers.
MOST_FAILED_STARTS = 5
#: Seconds after which a worker counts as started.
_STARTED_S = 10.0
#: Workers that end within so many seconds after a switch before the server rolls back; a crash
#: counts as so many.
_BLAMED, _ON_TRIAL_S = 2, 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0
#: Seconds for a worker to load a generation, to switch to it, and to end after its last request.
_PREPARE_S, _SWITCH_S, _END_S = 120.0, 30.0, 5.0
#: Seconds that connections without a request stay open when the server ends, in case one comes.
_LAST_S = 0.5
#: Seconds for a worker to report its counts; later its last report is used.
_COUNTS_S = 1.0
_ACCEPTED_AT_ONCE, _NO_DESCRIPTORS_S, _BACKLOG = 64, 0.5, 2048
_log = logging.getLogger(__name__)


class GaveUp(ConfpredError):
    """No worker keeps running."""

    exit_code = 3  # of the command


def serve(settings: Settings) -> None:
    """Serve until asked to stop (SIGINT or SIGTERM), then finish the requests under way.

    Raises:
        ModelError: the model folder is missing, damaged or foreign.
        InvalidInput, DataError: the plan or the file of tokens is not valid; or there are no tokens
            and other machines could connect.
        ConfpredError: the address cannot be listened on.
        GaveUp: workers ended again and again.
    """
    logs.configure(settings, "supervisor")
    with _listener(settings) as listener, _home() as home:
        try:
            asyncio.run(Supervisor(settings, listener, home).run())
        finally:
            logging.shutdown()  # writes the queued lines


def _listener(settings: Settings) -> socket.socket:
    """Listen on the address of `settings`, if they allow it."""
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not (tokens.is_loopback(str(address[0])) or settings.tokens or settings.allow_anonymous):
            allowed = "127.0.0.1 or another loopback address, unless --tokens FILE says who may "
            raise InvalidInput("host", host, allowed + "ask, or --allow-anonymous is given")
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        reason = getattr(error, "strerror", None) or "no such host"
        raise ConfpredError(f"cannot listen on {host}, port {port}: {reason}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listener


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """Make a folder that the processes of this server share; remove it when it ends."""
    with raising(ConfpredError, "make a temporary folder"):
        made = tempfile.TemporaryDirectory(prefix="confpred-serve-", ignore_cleanup_errors=True)
    with made as name:
        lock = os.open(name, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)  # cleaners of /tmp leave a locked folder
        try:
            yield Path(name)
        finally:
            os.close(lock)


class Supervisor:
    """Parent of the workers of one server."""

    def __init__(self, settings: Settings, listener: socket.socket, home: Path) -> None:
        """Serve connections to `listener`; keep published generations in `home`."""
        self._settings, self._listener, self._home = settings, listener, home
        self._children: dict[int, Child] = {}  # by process id
        self._slots: list[asyncio.Task[None]] = []
        self._history: list[Path] = []  # the generations that are loaded; the last is current
        self._accepted: list[Fields] = []  # access tokens, read with the current generation
        self._changing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._fatal: ConfpredError | None = None
        self._accepting = self._announced = False
        self._held: list[socket.socket] = []  # connections that wait for a worker
        self._switched, self._ended = -math.inf, 0  # time of the switch; workers ended since
        self._metrics, self._totals = Metrics(logs.lost), Totals()
        for outcome in ("reloaded", "unchanged", "refused", "rolled_back", "taken_back"):
            self._metrics.add(0, "confpred_reloads", outcome)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; SIGHUP reloads. Raises as `serve` does."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._try("reload", "SIGHUP")))
        self._listener.setblocking(False)
        seen = generations.fingerprint(self._settings)
        first, self._accepted = await asyncio.to_thread(self._read)
        self._history = [first]
        slots = map(self._slot, map(str, range(self._settings.workers)))
        self._slots = [*map(asyncio.create_task, slots)]
        self._spawn(show_life())
        if self._settings.exchange is not None:
            self._spawn(keep(self._settings))
        if self._settings.watch_models:
            self._spawn(self._watch(seen))
        await self._stopping.wait()
        await self._stop()
        for task in self._tasks:
            task.cancel()
        if self._fatal is not None:
            raise self._fatal

    async def _reload(self) -> str:
        """Read models, plan and tokens again, and switch all workers to them. If one is broken,
        raise a ConfpredError and leave all workers as they are."""
        async with self._changing:
            if self._announced:
                tell_systemd(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))
            try:
                new, accepted = await asyncio.to_thread(self._read)
                outcome = "unchanged" if new == self._history[-1] else "reloaded"
                await self._answer_by([*(g for g in self._history if g != new), new], accepted)
            except ConfpredError as error:
                self._reloaded("refused", f"reload refused: {error}")
                raise
            self._reloaded(outcome, f"generation {new.name[:12]} answers")
            return outcome

    def _reloaded(self, outcome: str, status: str) -> None:
        self._metrics.add(1, "confpred_reloads", outcome)
        if self._announced:
            tell_systemd(READY="1", STATUS=status.partition("\n")[0])

    async def _rollback(self, outcome: str = "rolled_back") -> str:
        """Switch all workers to the generation before the current one; tokens stay. Withdraw the
        models that were published since."""
        async with self._changing:
            former = self._history[:-1]
            if not former and generations.withdraw(self._settings, None):
                former = [await asyncio.to_thread(self._publish)]
            if not former:
                raise ConfpredError("no former generation is loaded")
            await self._answer_by(former, self._accepted)
            generations.withdraw(self._settings, former[-1])
            self._switched = -math.inf
            self._metrics.add(1, "confpred_reloads", outcome)
            return outcome

    async def _try(self, word: str, cause: str) -> Fields:
        """Reload or roll back, and log the outcome, or the error after which nothing has
        changed."""
        try:
            outcome = await (self._reload() if word == "reload" else self._rollback())
        except ConfpredError as error:
            _log.error("%s for %s refused: %s", word, cause, error)
            return {"error": str(error)}
        _log.info("%s for %s: generation %s", outcome, cause, self._history[-1].name[:12])
        return {"outcome": outcome}

    def _read(self) -> tuple[Path, list[Fields]]:
        """Copy models and plan; return the folder of the copy, and the tokens."""
        path = self._settings.tokens
        accepted = [] if path is None else [asdict(token) for token in tokens.read(path)]
        return self._publish(), accepted

    def _publish(self) -> Path:
        folder = generations.publish(self._settings, self._home / "generations")
        generations.give_back()
        return folder

    async def _answer_by(self, history: Sequence[Path], accepted: list[Fields]) -> None:
        """Have all workers load the generations of `history` and, when all have loaded them,
        answer by the last one and accept the tokens `accepted`."""
        history = history[-1 - self._settings.keep_models :]
        new = history[-1]
        is_new = new not in self._history
        if is_new:
            await self._check(new)
        ready = [child for child in self._children.values() if child.ready or child.leaving]
        asked = (child.ask("prepare", _PREPARE_S, folder=str(new)) for child in ready)
        answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        reasons = [answer["error"] for answer in answers if "error" in answer]
        if is_new and ready and not answers:
            reasons = ["all workers ended as they loaded it"]
        if reasons:
            if is_new:  # workers that have loaded it forget it
                await asyncio.gather(*(self._switch(child, self._history) for child in ready))
                shutil.rmtree(new, ignore_errors=True)
            raise ConfpredError(reasons[0])
        if is_new:
            self._switched, self._ended = time.monotonic(), 0
        self._accepted = accepted
        await asyncio.gather(*(self._switch(child, history) for child in ready))
        dropped = [folder for folder in self._history if folder not in history]
        self._history = [*history]
        for folder in dropped:
            shutil.rmtree(folder, ignore_errors=True)

    async def _check(self, folder: Path) -> None:
        """Try a generation in a process of its own; remove it and raise an error if that fails."""
        if reason := await generations.refusal(folder):
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfpredError(reason)

    async def _switch(self, child: Child, history: Sequence[Path]) -> bool:
        """Have `child` answer by the last of `history` and accept the tokens; return False if it
        had to be killed."""
        keep = [folder.name for folder in history]
        wanted = {"generation": keep[-1], "keep": keep, "accepted": self._accepted}
        answer = await child.ask("switch", _SWITCH_S, **wanted)
        if answer is None or "error" in answer:
            child.kill()
            return False
        return True

    async def _slot(self, name: str) -> None:
        """Keep one worker running."""
        failures, ended = 0, ""
        while not self._stopping.is_set():
            await self._restore()
            began, child = time.monotonic(), Child(name)
            try:
                handle = functools.partial(self._handle, child)
                await child.start(self._settings, self._home, self._history, handle)
            except OSError as error:
                ended = f"cannot be started: {error.strerror or error}"
            else:
                self._children[child.pid] = child
                self._totals.begin(child.pid)
                ended = await child.run()
                del self._children[child.pid]
                self._totals.end(child.pid)
                self._update()
                self._blame(child, ended)
            if self._stopping.is_set() or child.leaving:
                return
            has_started = child.was_ready and time.monotonic() - began > _STARTED_S
            failures = 0 if has_started else failures + 1
            await self._consider(child, failures, ended)

    async def _restore(self) -> None:
        """Copy the models again if the copy that new workers read was removed."""
        if self._history[-1].is_dir():
            return
        async with self._changing:
            wanted = self._history[-1]
            try:
                copy = await asyncio.to_thread(self._publish)
                if copy != wanted:
                    await self._check(copy)
            except ConfpredError as error:
                _log.error("the models cannot be copied again: %s", error)
                return
            left = [folder for folder in self._history if folder.is_dir() and folder != copy]
            self._history = [*left, copy]
        if copy != wanted:  # they have changed meanwhile
            self._spawn(self._try("reload", "a copy that was removed"))

    async def _consider(self, child: Child, failures: int, ended: str) -> None:
        """Wait before `child` is replaced, or give up."""
        others = any(other.ready for other in self._children.values())
        if child.failed is not None and not self._announced and not others:
            self._fatal = self._fatal or ConfpredError(child.failed)
        elif failures >= MOST_FAILED_STARTS and not others:
            said = f"gave up after {failures} starts of a worker: {ended}"
            self._fatal = self._fatal or GaveUp(said)
        if self._fatal is not None:
            return self._stopping.set()
        doubled = _FIRST_PAUSE_S * 2 ** min(failures - 1, 30) if failures else 0.0
        pause = min(doubled, _LONGEST_PAUSE_S)
        _log.warning("worker %s %s; another starts in %.3g s", child.name, ended, pause)
        self._metrics.add(1, "confpred_workers_replaced")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause)
        return None

    def _blame(self, child: Child, ended: str) -> None:
        """Roll back if workers end soon after a switch."""
        expected = child.leaving or child.failed is not None or self._stopping.is_set()
        if expected or time.monotonic() - self._switched > _ON_TRIAL_S:
            return
        self._ended += _BLAMED if child.crashed else 1
        if self._ended >= _BLAMED and len(self._history) > 1:
            self._switched = -math.inf
            self._spawn(self._take_back(ended))

    async def _take_back(self, ended: str) -> None:
        blamed = self._history[-1].name[:12]
        try:
            await self._rollback("taken_back")
        except ConfpredError as error:
            _log.error("generation %s is not taken back: %s", blamed, error)
        else:
            now = self._history[-1].name[:12]
            _log.error("took generation %s back, for %s: a worker %s", blamed, now, ended)

    async def _handle(self, child: Child, word: str, fields: Fields) -> Fields | None:
        """Handle a message of a worker."""
        if word == "ready":
            await self._admit(child, fields["generation"])
        elif word == "failed":
            child.failed = fields["reason"]
        elif word == "closed":
            child.closed = fields["count"]
        elif word == "leaving":
            self._replace(child)
        elif word == "counts":
            self._totals.note(child.pid, fields["counts"])
        elif word == "metrics":
            return await self._tell_metrics()
        elif word in ("reload", "rollback"):
            return await self._try(word, "a request")
        return None

    def _replace(self, child: Child) -> None:
        """Start another worker, which replaces `child` once it answers."""
        if not child.leaving:
            child.leaving = True
            _log.info("worker %s was asked to end; another starts", child.name)
            self._metrics.add(1, "confpred_workers_replaced")
            self._slots = [slot for slot in self._slots if not slot.done()]
            self._slots.append(asyncio.create_task(self._slot(child.name)))

    async def _tell_metrics(self) -> Fields:
        """Return the counts of all processes, and their ids."""
        ready = [child for child in self._children.values() if child.ready]
        answers = await asyncio.gather(*(child.ask("counts", _COUNTS_S) for child in ready))
        for child, answer in zip(ready, answers, strict=True):
            if answer and "counts" in answer:
                self._totals.note(child.pid, answer["counts"])
        own = read(self._metrics.rows())
        own["confpred_workers",] = len(ready)
        own["confpred_workers_wanted",] = self._settings.workers
        processes = {"supervisor": os.getpid()} | {child.name: child.pid for child in ready}
        return {"counts": rows(self._totals.sum(own)), "processes": processes}

    async def _admit(self, child: Child, generation: str) -> None:
        """Hand `child` connections from now on, after bringing it to the current generation, which
        may have changed since it was started."""
        async with self._changing:
            if generation != self._history[-1].name:
                for folder in self._history:
                    await child.ask("prepare", _PREPARE_S, folder=str(folder))
            if not await self._switch(child, self._history) or child.leaving:
                return
            child.ready = child.was_ready = True
        for other in self._children.values():
            if other.leaving and other.name == child.name and other is not child:
                other.ready = False
                other.channel.send("stop", wait=self._settings.grace)
        self._update()
        ready = sum(worker.ready for worker in self._children.values())
        wanted = self._settings.workers
        if self._announced:
            _log.info("worker %s answers, process %d", child.name, child.pid)
        elif ready == wanted:
            self._announced = True
            host, port = self._listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            workers = f"{wanted} worker{'s' if wanted > 1 else ''}"
            unsigned = self._settings.model and not self._settings.signed_by
            workers += ", models unsigned as far as is known" if unsigned else ""
            _log.info("confpred running on http://%s:%d with %s", shown, port, workers)
            tell_systemd(READY="1")

    def _update(self) -> None:
        """Accept connections while a worker is ready to take them."""
        ready = any(child.ready for child in self._children.values())
        while ready and self._held:
            self._hand(self._held.pop())
            ready = any(child.ready for child in self._children.values())
        loop = asyncio.get_running_loop()
        if ready != self._accepting and not self._stopping.is_set():
            self._accepting = ready
            if ready:
                loop.add_reader(self._listener.fileno(), self._accept)
            else:
                loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        """Hand over the waiting connections."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or memory, until others are freed
                _log.error("cannot accept connections: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                self._accepting = False
                loop.call_later(_NO_DESCRIPTORS_S, self._update)
                return
            self._hand(connection)

    def _hand(self, connection: socket.socket) -> None:
        """Hand `connection` to the first worker that takes it, in the order of their connections.
        It waits if all workers have just ended, and is closed if all have too many."""
        ready = [child for child in self._children.values() if child.ready]
        taken = any(child.hand(connection) for child in sorted(ready, key=lambda child: child.load))
        if taken or any(child.ready for child in ready):
            connection.close()
        else:
            self._held.append(connection)
            self._update()

    async def _watch(self, seen: str) -> None:
        """Reload when the models or the plan change on disk."""
        while True:
            await asyncio.sleep(self._settings.watch_models)
            current = await asyncio.to_thread(generations.fingerprint, self._settings)
            if current != seen:
                seen = current
                await self._try("reload", "changed files")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_signal(self) -> None:
        if self._stopping.is_set():  # the second signal ends at once
            self._kill()
        self._stopping.set()

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()

    async def _stop(self) -> None:
        """End all workers, at the latest after the grace period of their requests."""
        if self._accepting:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        for child in self._children.values():
            if child.ready or child.leaving:
                child.channel.send("stop", wait=min(_LAST_S, self._settings.grace))
            else:
                child.kill()
        await asyncio.wait(self._slots, timeout=self._settings.grace + _END_S)
        self._kill()
        await asyncio.gather(*self._slots)
