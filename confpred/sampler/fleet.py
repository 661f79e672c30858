"""The GPUs of a Ray cluster as an engine of the sampler: an actor a GPU, compilers on its cores.

An actor keeps the killable worker of its GPU as a child, so a kernel that crashes or hangs costs
that child alone. Ray restarts an actor that dies, on the same GPU or another. Ray repeats no call,
because only the sampler's loop knows which unit was being measured. Ray notices no hang: an actor
sends a sign of life every few seconds, and one that does not is killed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from confpred.cuda.compiler import compiled_before, keep_compiled
from confpred.data.measurements import Run
from confpred.errors import ConfpredError, InvalidInput, LaunchError
from confpred.measure.timing import Status
from confpred.problem.device import get_device
from confpred.problem.operation import KernelSpec
from confpred.sampler.jobs import (
    MAX_FAILURES,
    CompileJob,
    Compiling,
    Finished,
    GpuWorker,
    Lost,
    Refusals,
)
from confpred.sampler.run import Sampling, project_version
from confpred.sampler.tasks import Unit
from confpred.sampler.worker import Done, Failed

#: Import path of the function that describes the one GPU that an actor sees.
DESCRIBE = "confpred.sampler.run:find_gpus"
#: Units that a GPU has at a time: while one is measured, the kernels of the next are fetched.
WINDOW = 2
#: Most seconds that an actor takes to start, or to start again.
START_S = 300.0
#: Seconds to wait for other GPUs after the first one has started, before the run is planned.
SETTLE_S = 30.0
#: Most seconds of a compilation, waiting for a core included.
_COMPILE_S = 900.0
_FETCH_S = 30.0
_REACH_S = 10.0
#: Compiled kernels that Ray keeps; an actor compiles others again.
_MOST_KEPT = 30_000
_BEATS = 4  # signs of life in the time after which an actor counts as hanging
_BEGUN, _ALIVE = "begun", "alive"


@dataclass(frozen=True, slots=True)
class Site:
    """Location of an actor: its host and GPU in words, Ray's id of the host, and the columns that
    its rows share."""

    name: str
    node: str
    run: Run


class Actor:
    """One GPU, in a process of its own on the GPU's host.

    Two calls of `measure` may be under way: the second one fetches its kernels while the first one
    measures.
    """

    def __init__(self, describe: str, function: str, silence_s: float, seed: int) -> None:
        # Otherwise each child would import the program of Ray's worker, which takes a second.
        vars(sys.modules["__main__"]).pop("__file__", None)
        self._own = (function, silence_s, seed)
        self._describe = describe
        self._beat_s = silence_s / _BEATS
        self._gpu: GpuWorker | None = None
        self._measuring = threading.Lock()

    def site(self) -> Site:
        """Return the actor's location; raises as `confpred.sampler.run.find_gpus`."""
        module, _, name = self._describe.partition(":")
        ((ordinal, run),) = getattr(import_module(module), name)("all").items()
        with self._measuring:  # a call that the driver counts as lost may still run
            self._gpu = GpuWorker(run, ordinal, *self._own)
        context = ray.get_runtime_context()
        numbers = ",".join(context.get_accelerator_ids()["GPU"])
        return Site(f"{socket.gethostname()} GPU {numbers}", context.get_node_id(), run)

    def measure(
        self, unit: Unit, refusals: Refusals, cubins: Sequence[tuple[KernelSpec, Any]], arch: str
    ) -> Iterator[str | list[Finished]]:
        """Yield a sign of life when the unit begins and every few seconds, and last the results."""
        fetch(cubins, arch)
        with self._measuring:
            yield _BEGUN
            gpu = self._gpu
            if gpu is None:
                raise LaunchError("the actor has not said where it is")
            gpu.send(unit, refusals)
            finished: list[Finished] = []
            said = time.monotonic()
            while gpu.units:
                wait(gpu.connections(), min(self._beat_s, 1.0))
                finished += [event for event in gpu.poll() if isinstance(event, Finished)]
                if time.monotonic() - said > self._beat_s:
                    said = time.monotonic()
                    yield _ALIVE
            yield finished


def fetch(cubins: Sequence[tuple[KernelSpec, Any]], arch: str) -> None:
    """Put compiled kernels of other hosts into this host's cache; those that are lost or late are
    compiled where they are measured."""
    for kernel, cubin in cubins:
        if compiled_before(kernel, arch) is None:
            try:
                keep_compiled(kernel, arch, ray.get(cubin, timeout=_FETCH_S))
            except RayError:
                return


def compile_remotely(function: str, job: CompileJob) -> tuple[tuple[str | None, str], bytes]:
    """Compile a kernel by the job function at an import path; return the compiler's log if it
    refuses, with the host's id, and the compiled kernel."""
    module, _, name = function.partition(":")
    refused = getattr(import_module(module), name)(job, lambda value: None)
    compiled = None if refused else compiled_before(job.kernel, job.arch)
    node = ray.get_runtime_context().get_node_id()
    return (refused, node), compiled.cubin if compiled is not None else b""


class RayCompiler:
    """One compilation at a time on a core of the cluster, as `confpred.sampler.jobs.Compiling`
    describes."""

    def __init__(self, fleet: Fleet, function: str) -> None:
        self.job: CompileJob | None = None
        self._fleet, self._function = fleet, function
        self._remote = ray.remote(num_cpus=1, num_returns=2, max_retries=0)(compile_remotely)
        self._ended: Any = None
        self._cubin: Any = None
        self._since = 0.0

    def start(self, job: CompileJob) -> None:
        """Compile a kernel on whichever host has a free core."""
        self.job, self._since = job, time.monotonic()
        self._ended, self._cubin = self._remote.remote(self._function, job)

    def poll(self) -> Done | Failed | None:
        """Return how the job has ended, None while it goes on; never waits."""
        if self.job is None:
            return None
        seconds = time.monotonic() - self._since
        if id(self._ended) not in self._fleet.ready:
            if seconds < _COMPILE_S:
                return None
            self.stop()
            return Failed("silent", f"not compiled within {_COMPILE_S:g} s", None)
        job, self.job = self.job, None
        try:
            refused, node = ray.get(self._ended)
        except RayTaskError as error:
            return Failed("error", _reason(error), None)
        except RayError as error:
            return Failed("died", _reason(error), None)
        if refused is None:
            self._fleet.keep(job.kernel, node, self._cubin)
        return Done(refused, seconds)

    def waited_for(self) -> list[Any]:
        """Return what to wait for while a job is in flight."""
        return [] if self.job is None else [self._ended]

    def stop(self, *, kill: bool = False) -> None:
        """Drop the job in flight."""
        if self.job is not None:
            ray.cancel(self._ended, force=True)
        self.job = None


@dataclass(slots=True, eq=False)
class _Sent:
    """A unit that was sent to an actor: the stream of its replies, and whether it has begun."""

    unit: Unit
    words: Any
    begun: bool = False


class RayGpu:
    """A GPU of the cluster, as `confpred.sampler.jobs.Gpu` describes.

    Attributes:
        name: host and number of the GPU, once the actor has started.
        run: the columns that its rows share; another run after Ray restarts the actor elsewhere.
        units: units that were sent and have not ended.
        site: location of its actor; None while the actor starts.
    """

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.name = f"GPU {number} of the cluster"
        self.run = Run("", "", "", "", "", "")
        self.units: list[Unit] = []
        self.site: Site | None = None
        self._fleet = fleet
        self._sent: deque[_Sent] = deque()
        self._heard = 0.0
        self._why = ""
        self._losses = 0  # lost workers in a row, without a unit that ended
        self._actor = fleet.start_actor()
        self._ask()

    def has_room(self) -> bool:
        """Return whether the actor has started and takes a further unit."""
        return self.site is not None and len(self._sent) < WINDOW

    def send(self, unit: Unit, refusals: Refusals) -> None:
        """Queue a unit at the actor."""
        if self.site is None:
            raise LaunchError(f"{self.name} has not started")
        cubins = self._fleet.cubins_of(unit, self.site.node)
        words = self._actor.measure.options(num_returns="streaming").remote(
            unit, refusals, cubins, self._fleet.arch
        )
        if not self._sent:
            self._heard = time.monotonic()
        self._sent.append(_Sent(unit, words))
        self.units.append(unit)

    def poll(self) -> list[Finished | Lost]:
        """Return what has happened since the last call; never waits.

        Raises:
            LaunchError: the GPU cannot be used.
        """
        if self._losses == MAX_FAILURES:
            raise LaunchError(f"{self.name} lost {MAX_FAILURES} workers in a row: {self._why}")
        if self.site is None:
            self._arrive()
            return []
        events: list[Finished | Lost] = []
        for sent in list(self._sent):
            ready = id(sent.words) in self._fleet.ready
            while ready and sent in self._sent:
                try:
                    said = ray.get(next(sent.words), timeout=_FETCH_S)
                except RayTaskError as error:
                    raise LaunchError(f"{self.name}: {_reason(error)}") from error
                except (RayError, StopIteration) as error:
                    return [*events, self._lose("launch_error", _reason(error))]
                self._heard = time.monotonic()
                if isinstance(said, list):
                    self._sent.remove(sent)
                    self.units.remove(sent.unit)
                    self._losses = 0
                    events += said
                else:
                    sent.begun = True
                    ready = bool(ray.wait([sent.words], timeout=0, fetch_local=False)[0])
        limit = self._fleet.silence_s
        if self._sent and time.monotonic() - self._heard > limit:
            ray.kill(self._actor, no_restart=False)
            events.append(self._lose("timeout", f"no sign of life for {limit:g} s: killed"))
        return events

    def connections(self) -> list[Any]:
        """Return what to wait for until the next `poll`."""
        return [self._asked] if self.site is None else [sent.words for sent in self._sent]

    def stop(self, *, kill: bool) -> None:
        """End the actor; its child ends with it."""
        ray.kill(self._actor)

    def _lose(self, status: Status, message: str) -> Lost:
        begun = next((sent.unit for sent in self._sent if sent.begun), None)
        lost = Lost(begun, tuple(self.units), status, f"{self.name}: {message}")
        self._sent.clear()
        self.units.clear()
        self._losses += 1
        self._why = message
        self._ask()
        return lost

    def _ask(self) -> None:
        """Ask the actor, which is starting, for its location."""
        self.site, self._since = None, time.monotonic()
        self._asked = self._actor.site.remote()

    def _arrive(self) -> None:
        if id(self._asked) not in self._fleet.ready:
            if time.monotonic() - self._since > self._fleet.start_s:
                waited = f"{self._fleet.start_s:g} s"
                raise LaunchError(f"{self.name} did not start within {waited}: set aside")
            return
        try:
            site = ray.get(self._asked)
        except ActorUnavailableError:
            self._asked = self._actor.site.remote()
            return
        except RayError as error:
            raise LaunchError(f"{self.name}: {_reason(error)}") from error
        self._fleet.check(site)
        if (site.name, replace(self.run, run_id="")) != (self.name, replace(site.run, run_id="")):
            self.run = replace(site.run, run_id=self._fleet.next_run_id())
        self.name, self.site = site.name, site


class Fleet:
    """The engine of a Ray cluster, as `confpred.sampler.run.Engine` describes; a context manager.

    Args:
        settings: settings of the run.
        address: address of the cluster, such as ``auto``; None for ``$RAY_ADDRESS``, or else for a
            Ray of this machine alone that ends with the run.
        kind: key of the device to sample; None if all GPUs are of one kind.
        describe: import path of the function that describes an actor's GPU.
        start_s, settle_s: see ``START_S`` and ``SETTLE_S``.

    Raises:
        LaunchError: there is no GPU that can be used.
        InvalidInput: the GPUs are of several kinds, or none is of `kind`.
        ConfpredError: Ray cannot be reached.
    """

    def __init__(
        self,
        settings: Sampling,
        address: str | None = None,
        *,
        kind: str | None = None,
        describe: str = DESCRIBE,
        start_s: float = START_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.device, self.arch = kind or "", ""
        self.run_id = secrets.token_hex(4)
        self.gpus: list[RayGpu] = []
        self.set_aside: list[str] = []
        self.ready: set[int] = set()  # ids of connections with something to read
        self.silence_s, self.start_s = settings.silence_s, start_s
        self._settle_s = settle_s
        self._own = (describe, settings.measure, settings.silence_s, settings.seed)
        self._runs = 0
        self._project = project_version()
        self._cubins: dict[KernelSpec, tuple[str, Any]] = {}
        self._compiled_on: set[str] = set()
        self._began = not ray.is_initialized()
        if self._began:
            _connect(address)
        try:
            self._settle()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        for gpu in self.gpus:
            gpu.stop(kill=True)
        if self._began:
            ray.shutdown()

    def start_actor(self) -> Any:
        """Start an actor on a GPU that has none."""
        options = {"num_gpus": 1, "num_cpus": 1, "max_restarts": -1, "max_task_retries": 0}
        return ray.remote(**options, max_concurrency=WINDOW)(Actor).remote(*self._own)

    def next_run_id(self) -> str:
        """Return the id of a run on a further GPU."""
        self._runs += 1
        return f"{self.run_id}-{self._runs - 1}"

    def check(self, site: Site) -> None:
        """Check that rows measured at a site may join the others.

        Raises:
            LaunchError: the site has another version of confpred, or a GPU of another kind.
        """
        if site.run.project != self._project:
            raise LaunchError(
                f"{site.name} has confpred {site.run.project}, and this is {self._project}: set "
                "aside; install the same there, or set CONFPRED_COMMIT alike"
            )
        if self.device and site.run.device != self.device:
            kinds = f"{site.run.device}, and this run is of {self.device}"
            raise LaunchError(f"{site.name} is of kind {kinds}: set aside")

    def compiling(self, settings: Sampling) -> list[Compiling]:
        """Return as many compilers as the cluster has cores beside those of the actors."""
        spare = int(ray.cluster_resources().get("CPU", 0)) - len(self.gpus)
        count = min(settings.processes, spare)
        return [RayCompiler(self, settings.compile) for _ in range(count)]

    def wait(self, connections: list[Any], seconds: float) -> None:
        """Wait until an actor or a compilation has something to read, or for so many seconds."""
        if not connections:
            time.sleep(seconds)
            self.ready = set()
            return
        ray.wait(connections, timeout=seconds, fetch_local=False)
        ready, _ = ray.wait(connections, num_returns=len(connections), timeout=0, fetch_local=False)
        self.ready = {id(ref) for ref in ready}

    def keep(self, kernel: KernelSpec, node: str, cubin: Any) -> None:
        """Keep a compiled kernel for the GPUs of other hosts."""
        self._cubins[kernel] = (node, cubin)
        self._compiled_on.add(node)
        if len(self._cubins) > _MOST_KEPT:
            del self._cubins[next(iter(self._cubins))]

    def cubins_of(self, unit: Unit, node: str) -> list[tuple[KernelSpec, Any]]:
        """Return the unit's kernels that other hosts than `node` have compiled."""
        if self._compiled_on <= {node}:
            return []
        cubins = ((kernel, self._cubins.get(kernel)) for kernel in unit.kernels())
        return [(kernel, kept[1]) for kernel, kept in cubins if kept and kept[0] != node]

    def _settle(self) -> None:
        """Start an actor a GPU, and find out the GPUs' kind."""
        count = int(ray.cluster_resources().get("GPU", 0))
        if not count:
            raise LaunchError("measuring needs an NVIDIA GPU, and the Ray cluster has none")
        self.gpus = [RayGpu(self, number) for number in range(count)]
        first = None
        while starting := [gpu for gpu in self.gpus if gpu.site is None]:
            if first is not None and time.monotonic() - first > self._settle_s:
                break
            self.wait([connection for gpu in starting for connection in gpu.connections()], 0.1)
            self._refuse(starting)
            if first is None and any(gpu.site is not None for gpu in self.gpus):
                first = time.monotonic()
        kinds = Counter(gpu.run.device for gpu in self.gpus if gpu.site is not None)
        if not self.device:
            if len(kinds) != 1:
                counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
                raise InvalidInput("device", counts, "GPUs of one kind: name it with --device")
            (self.device,) = kinds
        self.arch = get_device(self.device).arch

    def _refuse(self, starting: Sequence[RayGpu]) -> None:
        """Take in the actors that have started; those that cannot be used are set aside."""
        for gpu in starting:
            try:
                gpu.poll()
            except LaunchError as error:
                gpu.stop(kill=True)
                self.gpus.remove(gpu)
                self.set_aside.append(str(error))
                if not self.gpus:
                    raise


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start a Ray of this machine."""
    if address not in (None, "auto") and not re.fullmatch(r"[^/\s]+:[0-9]{1,5}", address):
        raise InvalidInput("address", address, "auto, or HOST:PORT of the cluster's head")
    alone = address is None and not os.environ.get("RAY_ADDRESS")
    own = {"address": "local", "include_dashboard": False} if alone else {"address": address}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # confpred sends nothing anywhere
    try:
        if address not in (None, "auto"):  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _REACH_S).close()
        ray.init(log_to_driver=False, logging_level="ERROR", **own)
    except (OSError, OverflowError, RayError, RuntimeError, ValueError) as error:
        where = (
            "a Ray of this machine" if alone else f"the Ray cluster at {address or 'RAY_ADDRESS'}"
        )
        hint = "" if alone else "; its token is that of RAY_AUTH_TOKEN or ~/.ray/auth_token"
        raise ConfpredError(f"cannot reach {where}: {_reason(error)}{hint}") from error


def _reason(error: BaseException) -> str:
    """Return the cause of one of Ray's errors in one line."""
    cause = getattr(error, "cause", None) or error
    text = (str(cause).strip() or type(cause).__name__).splitlines()[-1 if cause is error else 0]
    is_readable = isinstance(cause, (ConfpredError, RayError))
    return text if is_readable else f"{type(cause).__name__}: {text}"
